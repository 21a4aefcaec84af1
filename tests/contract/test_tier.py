"""What every `Memory` promises, run by each of them. Add an implementation to `TIERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.arena import Arena
from kvstore.ports import Memory
from kvstore.tiers.dram import DramTier
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN, Incarnation, SlotId
from tests.kit.memory_tier import MemoryTier, until_populated

CAPACITY_BYTES = 8 * SLOT_BYTES_MIN
SLOTS = [SlotId(n * PAGES_PER_GENERATION) for n in range(8)]


def _dram() -> Memory:
    tier = DramTier(Arena(arena_bytes=CAPACITY_BYTES, incarnation=Incarnation(1)))
    tier.start()
    until_populated(tier)
    return tier


TIERS: dict[str, Callable[[], Memory]] = {
    "memory": lambda: MemoryTier(capacity_bytes=CAPACITY_BYTES),
    "dram": _dram,
}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = TIERS[request.param]()
    yield made
    made.close()


def test_it_is_a_tier(tier: Memory) -> None:
    assert isinstance(tier, Memory)
    assert tier.capacity_bytes == tier.ready_bytes == CAPACITY_BYTES


def test_generations_start_at_one(tier: Memory) -> None:
    assert [tier.generation(slot) for slot in SLOTS] == [1] * 8


@pytest.mark.parametrize("as_arrays", [False, True])
def test_raised_generations_are_read_back_and_touch_no_neighbour(
    tier: Memory, *, as_arrays: bool
) -> None:
    slots, generations = [SLOTS[6], SLOTS[1]], [2**63 - 1, 2]
    if as_arrays:
        arrays: Any = np.array(slots, np.uint32), np.array(generations, np.uint64)
        tier.raise_generations(*arrays)
    else:
        tier.raise_generations(slots, generations)
    assert [tier.generation(slot) for slot in SLOTS] == [1, 2, 1, 1, 1, 1, 2**63 - 1, 1]


def test_raising_nothing_is_fine(tier: Memory) -> None:
    tier.raise_generations([], [])
    assert [tier.generation(slot) for slot in SLOTS] == [1] * 8


def test_a_slot_of_many_pages_has_the_generation_of_its_first(tier: Memory) -> None:
    tier.raise_generations([SLOTS[2]], [7])
    assert tier.generation(SlotId(SLOTS[2] + PAGES_PER_GENERATION - 1)) == 7


def write(tier: Memory, slot: SlotId, data: bytes) -> None:
    """As an engine does."""
    if isinstance(tier, DramTier):
        tier.arena.array.data[slot * PAGE_BYTES :][: len(data)] = data
    else:
        assert isinstance(tier, MemoryTier)
        tier.view(slot, len(data))[:] = data


def read(tier: Memory, slot: SlotId, length: int) -> bytes:
    into = bytearray(b"x" * length)
    tier.read(slot, memoryview(into))
    return bytes(into)


def test_what_is_read_is_what_was_written_until_then(tier: Memory) -> None:
    write(tier, SLOTS[3], b"0123456789")
    assert read(tier, SLOTS[3], 20) == b"0123456789" + bytes(10)
    assert read(tier, SlotId(SLOTS[3] - 1), PAGE_BYTES) == bytes(PAGE_BYTES)


def test_the_whole_tier_can_be_read_and_not_a_byte_more(tier: Memory) -> None:
    assert read(tier, SLOTS[0], CAPACITY_BYTES) == bytes(CAPACITY_BYTES)
    with pytest.raises(AssertionError):
        read(tier, SLOTS[7], SLOT_BYTES_MIN + 1)


@pytest.mark.parametrize("outside", [SlotId(-1), SlotId(8 * PAGES_PER_GENERATION)])
def test_a_slot_outside_is_our_own_bug(tier: Memory, outside: SlotId) -> None:
    with pytest.raises(AssertionError):
        tier.generation(outside)
    with pytest.raises(AssertionError):
        tier.raise_generations([outside], [2])
    with pytest.raises(AssertionError):
        read(tier, outside, 1)


def test_going_back_is_our_own_bug(tier: Memory) -> None:
    tier.raise_generations([SLOTS[0]], [5])
    tier.raise_generations([SLOTS[0], SLOTS[0]], [5, 5])
    with pytest.raises(AssertionError):
        tier.raise_generations([SLOTS[0]], [4])


def test_beating_and_closing_twice_are_harmless(tier: Memory) -> None:
    tier.beat(1)
    tier.close()
    tier.close()
    assert tier.capacity_bytes == CAPACITY_BYTES
