"""Ways of blocks, without what they need, and their checksums by the real kernels on a host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from kvstore.kernels import launches, moves, pinning
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.moves import BATCH_MAX, NO_ROOM, ROOM_BYTES, BlockMoves
from kvstore.kernels.pinning import CHUNK_BYTES, cut
from kvstore.kernels.port import Addresses, Device, DeviceCache, DeviceError, LayerPages
from kvstore.ports import CopyWay
from kvstore.wire.record import PIECE_BYTES, root_of
from tests.amounts import amount
from tests.kit.copy_parties import HEADER, DeviceParty, StagedCudaParty, StagedParty, noise
from tests.kit.host_kernels import HostKernels
from tests.kit.reference import checksum
from tests.kit.simulated_device import SimulatedDevice

BLOCKS, GAP = 3, 24
NONE = np.array([], np.uint64)


def _moves_a_block(party: DeviceParty) -> None:
    data = noise(party.block_bytes, 1)
    party.write(1, data)
    assert party.do(CopyWay.STORE, 1, slot=0).checksum == checksum(HEADER, data)
    assert party.do(CopyWay.LOAD, 2, slot=0).checksum == checksum(HEADER, data)
    assert party.read(2) == data
    party.close()


class _WithoutKernels(StagedParty):
    def device_of_copies(self) -> Device:
        self.device.no_kernels = "CUDA's runtime compiler is missing"
        return self.device


class _WithoutRoom(StagedParty):
    def device_of_copies(self) -> Device:
        self.device.allocations_max = 3
        return self.device


@pytest.mark.parametrize(
    ("party_class", "trouble"),
    [
        (StagedParty, ""),
        (StagedCudaParty, ""),
        (_WithoutKernels, "CUDA's runtime compiler is missing"),
        (_WithoutRoom, NO_ROOM),
    ],
)
def test_without_what_staging_needs_blocks_go_by_pieces(
    party_class: type[DeviceParty], trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    party = party_class((96, 96, 40), block_major=False, values="")
    assert [record.args for record in caplog.records] == ([(trouble,)] if trouble else [])
    assert party.copies.moves.is_staged is not bool(trouble)
    assert party.copies.moves.trouble == trouble
    assert party.device.allocation_count == (1 if trouble else 5)
    _moves_a_block(party)


@pytest.mark.parametrize(("verb", "count"), [("allocate", 0), ("allocate", 2), ("pin", 0)])
def test_a_device_that_fails_at_the_start_keeps_nothing(
    verb: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(1, 4096)
    call, calls = getattr(device, verb), iter(range(100))

    def fails(*arguments: int) -> Any:
        if next(calls) >= count:
            raise DeviceError("cudaErrorIllegalAddress")
        return call(*arguments)

    monkeypatch.setattr(device, verb, fails)
    pages = [LayerPages(device.address + at, 64, 32) for at in (0, 512)]
    with pytest.raises(DeviceError):
        DeviceCopies(device, [DeviceCache(pages, 4)])
    assert (device.pinned_bytes, device.allocation_count, device.is_closed) == (0, 1, True)


def test_a_run_of_bytes_is_hashed_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a block that follow one another (BLHNC): no kernel moves anything."""
    moved: list[object] = []
    monkeypatch.setattr(SimulatedDevice, "move", lambda *pieces: moved.append(pieces))
    _moves_a_block(StagedParty((96, 96, 64), block_major=True, values=""))
    assert not moved


@pytest.mark.parametrize(
    ("block_bytes", "count"),
    [(64, BATCH_MAX), (640 << 10, BATCH_MAX), (5 << 20, 6), (50 << 20, 1), (100 << 20, 1)],
)
def test_rooms_have_a_bound_unless_one_block_is_larger(block_bytes: int, count: int) -> None:
    pages = [LayerPages(at * block_bytes * 9, block_bytes // 2, block_bytes // 2) for at in (0, 1)]
    device: Any = SimulatedDevice(1)
    room = BlockMoves(device, [], [DeviceCache(pages, 4)])
    assert room.batch_max(0) == count
    assert room.room_bytes <= max(ROOM_BYTES, block_bytes) * 1.07


# ── cuts at the borders of registrations ─────────────────────────────────────────────────────────


@settings(max_examples=amount(200, nightly=20_000), deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 5 * 64), st.integers(1, 3 * 64)), min_size=1, max_size=9
    ),
    begin=st.sampled_from([0, 7 << 20, (1 << 46) + 4096]),
    is_store=st.booleans(),
)
def test_pieces_are_cut_at_every_border_and_nowhere_else(
    spans: list[tuple[int, int]], begin: int, is_store: bool
) -> None:
    """With chunks of 64 bytes, byte for byte."""
    before = pinning.CHUNK_BYTES
    pinning.CHUNK_BYTES = 64  # type: ignore[misc]
    try:
        host = np.array([begin + at for at, _ in spans], np.uint64)
        sizes = np.array([size for _, size in spans], np.uint64)
        there = np.cumsum(sizes) + np.uint64(1 << 40)
        to, source = (host, there) if is_store else (there, host)
        targets, sources, parts = cut(to, source, sizes, host, begin)
    finally:
        pinning.CHUNK_BYTES = before  # type: ignore[misc]

    def bytes_of(*columns: Addresses) -> list[tuple[int, int]]:
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [(to + n, source + n) for to, source, size in rows for n in range(size)]

    assert bytes_of(targets, sources, parts) == bytes_of(to, source, sizes)
    ends = (targets if is_store else sources) - np.uint64(begin)
    assert (ends // 64 == (ends + parts - np.uint64(1)) // 64).all()
    borders = sum((at % 64 + size - 1) // 64 for at, size in spans)
    assert len(parts) == len(spans) + borders


def test_what_lies_in_one_chunk_stays_as_it_is() -> None:
    host = np.arange(100, dtype=np.uint64) * np.uint64(CHUNK_BYTES)
    sizes = np.full(100, CHUNK_BYTES, np.uint64)
    assert all(a is b for a, b in zip(cut(host, host, sizes, host, 0), (host, host, sizes)))  # noqa: B905


# ── checksums of pages, by the real kernels ──────────────────────────────────────────────────────


class OneStream:
    """A device whose kernels are the real ones, and which does everything at once."""

    def __init__(self, program: Path) -> None:
        self.kernels = HostKernels(program)

    def kernel_trouble(self) -> str:
        return ""

    def move(self, stream: int, *pieces: Addresses) -> None:
        launches.moved(self.kernels.launch, *pieces)

    def digest(self, stream: int, payloads: Addresses, size: int, **places: int) -> None:
        launches.digests(self.kernels.launch, payloads, size, **places)

    def copy(self, stream: int, *pieces: Addresses) -> None:
        for target, source, size in zip(*(each.tolist() for each in pieces), strict=True):
            self.kernels.write(target, self.kernels.get(source, size))

    def allocate(self, size: int) -> int:
        return self.kernels.room(size)

    def free(self, address: int) -> None:
        """With all that the kernels were given."""


@pytest.fixture(scope="module")
def device(program: Path) -> Iterator[OneStream]:
    device = OneStream(program)
    yield device
    device.kernels.close()


@settings(max_examples=amount(25, nightly=1000), deadline=None)
@given(
    pages=st.lists(st.integers(1, 900) | st.sampled_from([16, 1024]), min_size=1, max_size=12),
    blocks=st.permutations(range(BLOCKS)),
    flipped=st.integers(0, 1 << 20),
)
@example([7, PIECE_BYTES, 3 * PIECE_BYTES // 2], [1, 0, 2], 9 * PIECE_BYTES // 4)
@example([16] * 161, [2, 1, 0], 0)
@example([32], [2, 1, 0], 5)
def test_checksums_of_a_batch_are_those_of_the_bytes_in_the_pages(
    device: OneStream, pages: list[int], blocks: list[int], flipped: int
) -> None:
    """One bit of one block differs afterwards, and so does its checksum, and no other."""
    begins = np.cumsum([0, *(BLOCKS * size + GAP for size in pages)]).tolist()
    memory = device.allocate(begins[-1])
    layers = [
        LayerPages(memory + begin, size, size) for begin, size in zip(begins, pages, strict=False)
    ]
    kind: Any = device
    moves.BATCH_MAX, before = BLOCKS, moves.BATCH_MAX  # type: ignore[misc]
    try:
        cache = DeviceCache(layers, BLOCKS)
        ways = BlockMoves(kind, [0], [cache])
    finally:
        moves.BATCH_MAX = before  # type: ignore[misc]
    size, rng = cache.block_bytes, np.random.default_rng(flipped)
    data = [rng.bytes(size) for _ in blocks]
    slab = device.kernels.put(b"".join(bytes(GAP) + each for each in data))
    count = 16 * -(-size // PIECE_BYTES)
    into = np.array([device.allocate(count) for _ in blocks], np.uint64)
    places = np.array([slab + GAP + n * (GAP + size) for n in range(BLOCKS)], np.uint64)
    addresses = cache.places(blocks)

    def found() -> list[bytes]:
        return [root_of(HEADER, device.kernels.get(int(at), count)) for at in into]

    ways.load_within(0, 0, addresses, places, into)
    assert found() == [checksum(HEADER, each) for each in data]
    at = flipped % size
    layer = next(n for n, end in enumerate(np.cumsum(pages).tolist()) if at < end)
    place = layers[layer].address + blocks[0] * pages[layer] + at - sum(pages[:layer])
    device.kernels.write(place, bytes([data[0][at] ^ 1]))
    data[0] = data[0][:at] + bytes([data[0][at] ^ 1]) + data[0][at + 1 :]
    ways.hash(0, 0, addresses, into)
    assert found() == [checksum(HEADER, each) for each in data]
    device.kernels.free()


def test_pages_side_by_side_are_one_piece_only_if_they_are_so_in_every_block() -> None:
    for strides, pieces in (((64, 64), [64]), ((64, 128), [32, 32])):
        pages = [LayerPages(at * 32, stride, 32) for at, stride in enumerate(strides)]
        assert DeviceCache(pages, block_count=2).sizes.tolist() == pieces
