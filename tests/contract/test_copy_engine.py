"""What every copy engine keeps: bytes, checksums, ends, order behind marks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from kvstore.kernels import device
from kvstore.kernels.device import COPIES_MAX, NOT_PINNED_IN_TIME, DeviceError
from kvstore.kernels.hashes import Hashes, HashesAtOnce, Hashing
from kvstore.kernels.host import NOT_COMPARABLE
from kvstore.kernels.pack import PagedCache
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.kernels.reference import Bytes, checksum
from kvstore.kernels.slab import MappedSlab
from kvstore.ports import BlockCopy, CopyWay
from kvstore.tiers.hbm import HbmTier
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, Incarnation, SlotId
from kvstore.wire.checksum import PIECE_BYTES
from tests.kit.copy_parties import (
    BLOCKS,
    DEVICE_PARTIES,
    HEADER,
    SLOTS,
    DeviceParty,
    HostParty,
    Party,
    StagedCudaParty,
    StagedParty,
    noise,
)
from tests.kit.fake_cuda import FIRST_HANDLE
from tests.kit.gpu_party import GPU_PARTIES
from tests.kit.memory_tier import MemoryTier
from tests.kit.simulated_device import SimulatedDevice
from tests.kit.slab import ended, order_of

Make = Callable[..., Party]


ON_GPU = [pytest.param(party, marks=pytest.mark.gpu) for party in GPU_PARTIES]


@pytest.fixture(params=[HostParty, *DEVICE_PARTIES, *ON_GPU])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Party] = []

    def new(
        page_bytes: tuple[int, ...] = (96, 96, 40), *, block_major: bool = False, values: str = ""
    ) -> Party:
        made.append(request.param(page_bytes, block_major=block_major, values=values))
        return made[-1]

    yield new
    for party in made:
        party.close()


@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("page_bytes", [(64,), (96, 96, 40), (1, 700_001), (16,) * 80])
def test_what_is_stored_is_loaded(
    make: Make, page_bytes: tuple[int, ...], block_major: bool
) -> None:
    party = make(page_bytes, block_major=block_major)
    blocks = [noise(party.block_bytes, seed) for seed in range(BLOCKS)]
    for block, data in enumerate(blocks):
        party.write(block, data)
    for block in (2, 5):
        end = party.do(CopyWay.STORE, block, slot=block - 2)
        assert (end.reason, end.checksum) == ("", checksum(HEADER, blocks[block]))
        assert party.slot(block - 2).tobytes() == blocks[block]
    end = party.do(CopyWay.LOAD, 0, slot=3)
    assert (end.reason, end.checksum) == ("", checksum(HEADER, blocks[5]))
    assert party.do(CopyWay.LOAD, 1, slot=0, is_verified=False).checksum == b""
    party.do(CopyWay.CLEAR, 4)
    changed = {0: blocks[5], 1: blocks[2], 4: bytes(party.block_bytes)}
    assert [party.read(block) for block in range(BLOCKS)] == [
        changed.get(block, data) for block, data in enumerate(blocks)
    ]


def test_the_checksum_of_a_load_is_that_of_the_bytes(make: Make) -> None:
    party = make()
    party.slot(1)[:] = np.frombuffer(noise(party.block_bytes, 7), np.uint8)
    party.slot(1)[-1] ^= 1
    end = party.do(CopyWay.LOAD, 3, slot=1)
    assert end.checksum == checksum(HEADER, party.slot(1).tobytes())


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_values_are_compared_and_nothing_is_written(make: Make, off: float) -> None:
    party = make((64, 128), values="float32")
    numbers = np.random.default_rng(3).standard_normal(48).astype(np.float32)
    party.write(2, numbers.tobytes())
    other = numbers + np.float32(off)
    party.slot(4)[:] = other.view(np.uint8)
    end = party.do(CopyWay.COMPARE, 2, slot=4)
    assert (end.reason, end.diverged, end.error > 0) == ("", bool(off), bool(off))
    assert party.read(2) == numbers.tobytes()
    assert party.slot(4).tobytes() == other.tobytes()


def test_values_that_cannot_be_compared_are_not(make: Make) -> None:
    party = make()
    assert party.do(CopyWay.COMPARE, 2, slot=4).reason == NOT_COMPARABLE


def test_every_copy_ends_once(make: Make) -> None:
    party = make()
    for block in range(BLOCKS):
        party.write(block, noise(party.block_bytes, block))
    mark, ways = party.copies.mark(), (CopyWay.STORE, CopyWay.LOAD)
    for begin in range(0, 40, party.copies.copies_max):
        orders = [
            party.order(ways[at % 2], at % BLOCKS, at % SLOTS, after=mark)
            for at in range(begin, begin + party.copies.copies_max)
        ]
        assert sorted(party.ended(len(orders))) == orders
    assert party.copies.ended() == []


def test_copies_that_are_ordered_together_keep_to_their_own_blocks(make: Make) -> None:
    """Of several kinds, in any number: like ones may be given to a device in one go."""
    party = make((96,) * 40)
    blocks = [noise(party.block_bytes, seed) for seed in range(BLOCKS)]
    for count in (2, 3, party.copies.copies_max):
        for block, data in enumerate(blocks):
            party.write(block, data)
        mark = party.copies.mark()
        stores = [party.order(CopyWay.STORE, n, n, after=mark) for n in range(min(count, SLOTS))]
        ends = party.ended(len(stores))
        for n, number in enumerate(stores):
            assert ends[number].checksum == checksum(HEADER, blocks[n])
            assert party.slot(n).tobytes() == blocks[n]
        mark = party.copies.mark()
        loads = [party.order(CopyWay.LOAD, n, 1 - n, after=mark) for n in range(2)]
        loads.append(party.order(CopyWay.CLEAR, 3, after=mark))
        party.ended(len(loads))
        expected = [blocks[1], blocks[0], blocks[2], bytes(party.block_bytes), *blocks[4:]]
        assert [party.read(block) for block in range(BLOCKS)] == expected


def test_memory_can_be_another_one_later(make: Make) -> None:
    party = make()
    party.write(0, noise(party.block_bytes, 1))
    party.do(CopyWay.STORE, 0, slot=1)
    party.slots = np.zeros_like(party.slots)
    party.attach()
    party.do(CopyWay.STORE, 0, slot=2)
    assert party.slot(2).tobytes() == noise(party.block_bytes, 1)
    assert not party.slot(1).any()


# ── of a device alone ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=DEVICE_PARTIES)
def party(request: pytest.FixtureRequest) -> Iterator[DeviceParty]:
    party: DeviceParty = request.param((96, 40), block_major=False, values="float32")
    yield party
    party.close()


def test_a_block_that_runs_over_two_chunks_waits_for_both(party: DeviceParty) -> None:
    ready = 0
    party.slots = np.zeros(CHUNK_BYTES + party.block_bytes, np.uint8)
    party.copies.attach(party.slots, lambda: ready)
    party.write(1, noise(party.block_bytes, 1))
    begin = CHUNK_BYTES - 50
    copy = BlockCopy(1, CopyWay.STORE, 0, 1, begin, HEADER, after=party.copies.mark())
    party.copies.begin(copy)
    for _ in range(100):
        assert not party.copies.ended(), "pages of its slot have not arrived"
    ready = party.slots.size
    while not party.copies.ended():
        pass
    assert party.slots[begin : begin + party.block_bytes].tobytes() == noise(party.block_bytes, 1)
    assert party.device.pinned_bytes > CHUNK_BYTES


def test_a_store_whose_slot_is_never_pinned_ends_all_the_same(
    party: DeviceParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node died while its memory grew. The copy thread attaches anew once nothing is left."""
    monkeypatch.setattr(device, "PIN_NS_MAX", 10_000_000)
    party.copies.attach(party.slots, lambda: 0)
    assert party.do(CopyWay.STORE, 1, slot=2).reason == NOT_PINNED_IN_TIME
    party.attach()
    monkeypatch.undo()
    assert not party.do(CopyWay.STORE, 1, slot=2).reason


def test_a_load_that_breaks_off_leaves_nothing_in_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    party = HostParty((96, 40), block_major=False, values="")
    party.write(3, noise(party.block_bytes, 1))

    def breaks_off(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(PagedCache, "load_checked", breaks_off)
    with pytest.raises(MemoryError):
        party.order(CopyWay.LOAD, 3)
    assert party.read(3) == bytes(party.block_bytes)


def test_a_load_does_not_wait_for_its_slot_to_be_pinned(party: DeviceParty) -> None:
    party.copies.attach(party.slots, lambda: 0)
    data = noise(party.block_bytes, 5)
    party.slot(2)[:] = np.frombuffer(data, np.uint8)
    assert party.do(CopyWay.LOAD, 3, slot=2).checksum == checksum(HEADER, data)
    assert party.read(3) == data


def test_without_pinned_memory_blocks_are_loaded_and_not_stored(party: DeviceParty) -> None:
    party.slots = np.zeros_like(party.slots)
    party.device.pin_failures.append("no more than 64 KiB of memory may be locked")
    party.attach()
    party.write(1, bytes(party.block_bytes))
    assert party.do(CopyWay.STORE, 1).reason == party.copies.trouble != ""
    assert party.do(CopyWay.STORE, 1).reason
    assert not party.do(CopyWay.LOAD, 2).reason


def test_copies_of_a_device_that_fails_end_as_failed(party: DeviceParty) -> None:
    orders = [party.order(CopyWay.LOAD, at) for at in range(3)]
    party.device.failure = "an illegal memory access was encountered"
    orders.append(party.order(CopyWay.STORE, 4))
    ends = party.ended(4)
    assert sorted(ends) == orders
    assert all(end.reason for end in ends.values())
    party.device.failure = ""


def slab_with(data: bytes) -> HbmTier:
    """A slab with these bytes behind its first SLOT_BYTES_MIN."""
    capacity_bytes = (2 + len(data) // SLOT_BYTES_MIN) * SLOT_BYTES_MIN
    dram = MemoryTier(capacity_bytes=capacity_bytes)
    node = SimulatedDevice(9, 4096)
    tier = HbmTier(node, dram, capacity_bytes=capacity_bytes, incarnation=Incarnation(1))
    dram.view(SlotId(0), len(data))[:] = data
    tier.submit(order_of([(0, PAGES_PER_GENERATION, data)]))
    assert ended(tier).good == b"\1"
    return tier


@pytest.mark.parametrize(("trouble", "log"), [("", ""), ("no compiler", "read back")])
@pytest.mark.parametrize("page_bytes", [(96, 40), (1, PIECE_BYTES + 1), (PIECE_BYTES,) * 3])
@pytest.mark.parametrize("party_class", [StagedParty, StagedCudaParty, DeviceParty])
def test_a_verified_load_from_a_slab_costs_the_bus_its_digests(
    party_class: type[DeviceParty],
    page_bytes: tuple[int, ...],
    trouble: str,
    log: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """16 bytes for each 512 KiB. Where there are no kernels, as many as the block has."""
    party = party_class(page_bytes, block_major=False, values="")
    data = noise(party.block_bytes, 3)
    tier = slab_with(data)
    party.device.no_kernels = trouble
    party.copies.moves.trouble = trouble
    for _ in range(2):
        assert party.copies.map_slab(tier.slab) == ""
    before = party.device.bus_bytes
    end = party.do(CopyWay.LOAD, 3, slab_begin=SLOT_BYTES_MIN)
    assert (end.reason, end.checksum) == ("", checksum(HEADER, data))
    pieces = -(-len(data) // PIECE_BYTES)
    assert party.device.bus_bytes - before == (len(data) if trouble else 16 * pieces)
    assert len(caplog.records) == bool(trouble), "a reason is logged once"
    assert log in caplog.text
    assert trouble in caplog.text
    party.close()
    tier.close()


def flips_a_bit(device: SimulatedDevice, stream: int, address: int) -> None:
    """Something writes to memory of the device, in the order of a stream."""

    def work() -> None:
        ctypes.c_ubyte.from_address(address).value ^= 1

    device._queues[stream % FIRST_HANDLE].append(work)


@pytest.mark.parametrize("damaged", ["slab", "pages"])
def test_other_bytes_in_a_slab_or_in_the_pages_have_another_checksum(
    damaged: str, party: DeviceParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is hashed is what the request would read, and not what was to be copied."""
    data = noise(party.block_bytes, 3)
    tier = slab_with(data)
    assert party.copies.map_slab(tier.slab) == ""
    load, page = MappedSlab.load, party.pages(party.device.address)[-1]

    def loads(slab: MappedSlab, stream: int, *place: Any) -> None:
        load(slab, stream, *place)
        end = page.address + 3 * page.stride_bytes + page.size_bytes
        flips_a_bit(party.device, stream, end - 1)

    if damaged == "slab":
        assert isinstance(tier._device, SimulatedDevice)
        end = tier._address + SLOT_BYTES_MIN + len(data)
        flips_a_bit(tier._device, tier._stream, end - 1)
        tier._finish()
    else:
        monkeypatch.setattr(MappedSlab, "load", loads)
    found = party.do(CopyWay.LOAD, 3, slab_begin=SLOT_BYTES_MIN)
    other = data[:-1] + bytes([data[-1] ^ 1])
    assert (found.reason, found.checksum) == ("", checksum(HEADER, other))
    assert party.read(3) == other
    tier.close()


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_load_from_a_slab_is_hashed_as_it_arrived(
    party: DeviceParty, *, is_verified: bool
) -> None:
    assert party.copies.gpu == "simulated"
    before = party.device.allocation_count
    data = noise(party.block_bytes, 3)
    tier = slab_with(data)
    assert party.copies.map_slab(tier.slab) == ""
    end = party.do(CopyWay.LOAD, 3, slot=1, is_verified=is_verified, slab_begin=SLOT_BYTES_MIN)
    assert (end.reason, end.checksum) == ("", checksum(HEADER, data) if is_verified else b"")
    assert party.read(3) == data
    assert party.copies.map_slab(None) == ""
    assert party.device.allocation_count == before
    tier.close()
    assert party.copies.map_slab(tier.slab), "the handle ended with its memory"


def test_marks_that_no_copy_waits_for_are_forgotten(party: DeviceParty) -> None:
    before = party.device.event_count
    for number in range(1, 200):
        assert party.copies.mark() == number
        party.device.finish()
    assert party.device.event_count <= before + 1


def test_staging_memory_suffices_for_all_that_is_under_way(party: DeviceParty) -> None:
    party.copies.attach(party.slots, lambda: 0)
    for _ in range(3):
        ways = [CopyWay.LOAD, CopyWay.COMPARE] * (COPIES_MAX // 2)
        orders = [party.order(way, at % BLOCKS, at % SLOTS) for at, way in enumerate(ways)]
        assert sorted(party.ended(COPIES_MAX)) == orders


class HeldHashes(HashesAtOnce):
    """Threads that have no time until `may_go`."""

    def __init__(self) -> None:
        self.may_go = False

    def begin(self, header: bytes, block: Bytes) -> Hashing:
        checksum = super().begin(header, block)
        return lambda: checksum() if self.may_go else None


class HeldParty(DeviceParty):
    def hashes(self) -> Hashes:
        self.held = HeldHashes()
        return self.held


@pytest.mark.parametrize("way", [CopyWay.STORE, CopyWay.COMPARE])
def test_a_copy_that_fails_for_want_of_an_event_writes_nothing_later(
    way: CopyWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that it would write to is another copy's by then."""
    party = DeviceParty((64, 32), block_major=False, values="float32")
    party.write(0, noise(party.block_bytes, 1))
    party.do(CopyWay.STORE, 0, 1)
    staging = cast("Any", party.copies)._staging
    before = party.slots.tobytes() + staging.tobytes()

    def none() -> int:
        raise DeviceError("out of memory")

    cast("Any", party.copies)._events.clear()
    monkeypatch.setattr(party.device, "event", none)
    failed = party.order(way, 0, 2)
    assert "out of memory" in party.ended(1)[failed].reason
    monkeypatch.undo()
    party.device.finish()
    assert party.slots.tobytes() + staging.tobytes() == before
    assert party.do(CopyWay.STORE, 0, 1).reason == ""
    party.close()


@pytest.mark.parametrize("failure", ["", "an illegal memory access was encountered"])
def test_no_copy_ends_while_a_thread_reads_its_bytes(failure: str) -> None:
    party = HeldParty((96, 40), block_major=False, values="")
    party.held.may_go = True
    party.do(CopyWay.STORE, 0)  # pins the slots
    party.held.may_go = False
    load = party.order(CopyWay.LOAD, 1, 1)
    assert party.copies.ended() == []
    party.device.finish()
    party.device.failure = failure
    for _ in range(100):
        assert party.copies.ended() == []
    party.held.may_go = True
    assert bool(party.ended(1)[load].reason) is bool(failure)
    party.device.failure = ""
    party.close()
