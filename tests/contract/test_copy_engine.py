"""What every copy engine keeps: bytes, checksums, ends, order behind marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from kvstore.kernels import device, pinning
from kvstore.kernels.device import NOT_PINNED_IN_TIME
from kvstore.kernels.host import NOT_COMPARABLE, PagedCache
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.kernels.port import DeviceError
from kvstore.ports import BlockCopy, CopyWay
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
    room,
)
from tests.kit.gpu_party import GPU_PARTIES
from tests.kit.reference import checksum

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
@pytest.mark.parametrize("page_bytes", [(96, 96, 40), (1, 700_001), (16,) * 80])
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
    party.slots = room(party.slots.size)
    party.attach()
    party.do(CopyWay.STORE, 0, slot=2)
    assert party.slot(2).tobytes() == noise(party.block_bytes, 1)
    assert not party.slot(1).any()


# ── of a device alone ────────────────────────────────────────────────────────────────────────────


def test_a_block_that_runs_over_two_chunks_waits_for_both(party: DeviceParty) -> None:
    ready = 0
    party.slots = room(CHUNK_BYTES + party.block_bytes)
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
    monkeypatch.setattr(PagedCache, "load_checked", mock.Mock(side_effect=MemoryError))
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
    party.slots = room(party.slots.size)
    party.device.pin_failures.append("no more than 64 KiB of memory may be locked")
    party.attach()
    party.write(1, bytes(party.block_bytes))
    assert party.do(CopyWay.STORE, 1).reason == party.copies.trouble != ""
    assert party.do(CopyWay.STORE, 1).reason
    assert not party.do(CopyWay.LOAD, 2).reason


def test_one_chunk_that_cannot_be_pinned_is_not_all_and_not_for_ever(
    party: DeviceParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registrations of one chunk among many fail now and then (SGLang, issue 39744)."""
    party.slots = room(2 * CHUNK_BYTES)
    monkeypatch.setattr(pinning, "AGAIN_S", 3600.0)
    party.device.pin_failures.append("out of memory")
    party.attach()

    def store(begin: int) -> str:
        copy = BlockCopy(7, CopyWay.STORE, 0, 1, begin, HEADER, after=party.copies.mark())
        party.copies.begin(copy)
        return party.ended(1)[7].reason

    assert "cannot be pinned" in store(0)
    assert store(CHUNK_BYTES) == ""
    assert "cannot be pinned" in party.copies.trouble
    pins = party.copies._pins
    assert pins is not None
    with pins._wake:
        pins._again_at_s = 0.0
        pins._wake.notify()
    while party.copies.trouble:
        pass
    assert store(0) == ""


def test_memory_is_pinned_ahead_chunk_by_chunk(party: DeviceParty) -> None:
    party.slots = room(3 * CHUNK_BYTES + 4096)
    party.attach()
    for count in (1, 2, 3):
        party.copies.pin_ahead(party.slots.size)
        while party.copies.pinned_bytes < count * CHUNK_BYTES:
            pass
        assert party.copies.pinned_bytes == count * CHUNK_BYTES
    party.copies.pin_ahead(party.slots.size)
    party.copies.pin_ahead(party.slots.size - 1)
    assert party.copies.pinned_bytes == 3 * CHUNK_BYTES, "what is not ready yet is left alone"
    party.copies.pin_ahead(party.slots.size)
    while party.copies.pinned_bytes < party.slots.size:
        pass
    party.copies.pin_ahead(party.slots.size)


@pytest.mark.parametrize("way", [CopyWay.STORE, CopyWay.LOAD])
def test_a_batch_that_fails_half_way_ends_when_its_first_part_has(
    way: CopyWay, party: DeviceParty
) -> None:
    """The device goes on with what it was given: until then nobody may have that memory."""
    party.do(CopyWay.STORE, 1, 1)  # pins the slots
    party.device.finish()
    # By pieces there is one call; else the digests of a store, or a load's blocks, come first.
    party.device.copy_failures[1 if not party.by_pieces else 0] = "an error"
    number = party.order(way, 2, 2, after=party.copies.mark())
    (end,) = party.ended(1).values()
    assert (end.number, "an error" in end.reason or "cuMemcpyBatchAsync" in end.reason) == (
        number,
        True,
    )
    assert party.device.is_idle, "it ended before what it was given was done"


def test_copies_behind_a_mark_that_could_not_be_taken_fail(
    party: DeviceParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what they must not overtake. Their jobs end all the same."""
    party.do(CopyWay.STORE, 1, 1)
    record = party.device.record

    def fails_for_the_engine(event: int, stream: int | None) -> None:
        if not stream:
            raise DeviceError("out of memory")
        record(event, stream)

    monkeypatch.setattr(party.device, "record", fails_for_the_engine)
    assert party.copies.mark() == device.NO_MARK
    for way in (CopyWay.LOAD, CopyWay.STORE):
        assert "could not be marked" in party.do(way, 2, 2).reason
    monkeypatch.undo()
    assert party.do(CopyWay.LOAD, 2, 2).reason == ""


def test_copies_of_a_device_that_fails_end_as_failed(party: DeviceParty) -> None:
    orders = [party.order(CopyWay.LOAD, at) for at in range(3)]
    party.device.failure = "an illegal memory access was encountered"
    orders.append(party.order(CopyWay.STORE, 4))
    ends = party.ended(4)
    assert sorted(ends) == orders
    assert all(end.reason for end in ends.values())
    party.device.failure = ""


# ── what is hashed ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("party_class", [StagedParty, StagedCudaParty])
def test_a_store_seals_what_the_engine_had_whatever_is_in_the_slot(
    party_class: type[DeviceParty],
) -> None:
    """Another engine gave the slot's pages back to the kernel under the copy, and the host finds
    zeros there, or wrote there itself: sealed as right, loads would take them for the block."""
    party = party_class((96, 40), block_major=False, values="")
    data = noise(party.block_bytes, 3)
    party.write(1, data)
    party.do(CopyWay.STORE, 0, 2)  # pins the slots
    number = party.order(CopyWay.STORE, 1, 2, after=party.copies.mark())
    assert party.copies.ended() == []
    party.device.finish()
    party.slot(2)[:] = 0
    assert party.ended(1)[number].checksum == checksum(HEADER, data)
    party.close()


@pytest.mark.parametrize("party_class", [StagedParty, StagedCudaParty])
def test_a_loads_checksum_is_that_of_what_arrived(party_class: type[DeviceParty]) -> None:
    """The device read pages that the host does not see any more."""
    party = party_class((96, 40), block_major=False, values="")
    data, other = (np.frombuffer(noise(party.block_bytes, seed), np.uint8) for seed in (3, 4))
    party.do(CopyWay.STORE, 0, 2)  # pins the slots
    party.slot(2)[:] = other
    number = party.order(CopyWay.LOAD, 1, 2, after=party.copies.mark())
    assert party.copies.ended() == []
    party.device.finish()
    party.slot(2)[:] = data
    assert party.ended(1)[number].checksum == checksum(HEADER, other.tobytes())
    assert party.read(1) == other.tobytes()
    party.close()


# ── memory in several registrations ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "page_bytes",
    [(96, 40), (CHUNK_BYTES + 4096, 8, 24)],  # in two chunks, and in three
)
@pytest.mark.parametrize("party_class", [DeviceParty, StagedCudaParty])
def test_blocks_lie_anywhere_in_memory_that_is_pinned_in_chunks(
    party_class: type[DeviceParty], page_bytes: tuple[int, ...]
) -> None:
    """`--slab 96MiB`, dram below 256 MiB, blocks of more than 64 MiB."""
    party = party_class(page_bytes, block_major=True, values="")
    size = party.block_bytes
    begin = CHUNK_BYTES - min(8 * (size // 16), 1040)
    party.slots = room(begin + size + CHUNK_BYTES)
    party.attach()
    data = noise(size, 1)
    party.write(1, data)

    def do(way: CopyWay, block: int) -> bytes:
        copy = BlockCopy(9, way, 0, block, begin, HEADER, after=party.copies.mark())
        party.copies.begin(copy)
        end = party.ended(1)[9]
        assert end.reason == ""
        return end.checksum

    expected = checksum(HEADER, data)
    assert do(CopyWay.STORE, 1) == expected
    assert party.slots[begin : begin + size].tobytes() == data
    assert not party.slots[:begin].any()
    assert not party.slots[begin + size :].any()
    assert do(CopyWay.LOAD, 2) == expected
    assert party.read(2) == data
    party.close()


def test_marks_that_no_copy_waits_for_are_forgotten(party: DeviceParty) -> None:
    before = party.device.event_count
    for number in range(1, 200):
        assert party.copies.mark() == number
        party.device.finish()
    assert party.device.event_count <= before + 1


def test_what_needs_staging_memory_waits_for_it(party: DeviceParty) -> None:
    """There are two blocks of it, whatever is under way."""
    party.copies.attach(party.slots, lambda: 0)
    count = party.copies.copies_max
    for _ in range(3):
        ways = [CopyWay.LOAD, CopyWay.COMPARE] * (count // 2)
        orders = [party.order(way, at % BLOCKS, at % SLOTS) for at, way in enumerate(ways)]
        assert sorted(party.ended(count)) == orders


@pytest.mark.parametrize("way", [CopyWay.STORE, CopyWay.COMPARE])
def test_a_copy_that_fails_for_want_of_an_event_writes_nothing_later(
    way: CopyWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that it would write to is another copy's by then."""
    party = DeviceParty((64, 32), block_major=False, values="float32")
    party.write(0, noise(party.block_bytes, 1))
    party.do(CopyWay.STORE, 0, 1)
    staging = cast("Any", party.copies)._own.staging
    before = party.slots.tobytes() + b"".join(each.data.tobytes() for each in staging)
    cast("Any", party.copies)._events.clear()
    monkeypatch.setattr(party.device, "event", mock.Mock(side_effect=DeviceError("out of memory")))
    failed = party.order(way, 0, 2)
    assert "out of memory" in party.ended(1)[failed].reason
    monkeypatch.undo()
    party.device.finish()
    assert party.slots.tobytes() + b"".join(each.data.tobytes() for each in staging) == before
    assert party.do(CopyWay.STORE, 0, 1).reason == ""
    party.close()
