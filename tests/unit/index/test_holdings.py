"""Size and limits of the flat memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from kvstore.config.defaults import DEFAULT_ENTRIES, ENTRIES_MIN
from kvstore.index import holdings
from kvstore.index.check import check_holdings
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index, default_slot_count
from kvstore.index.rows import home_of_row
from kvstore.types import Tier
from tests.unit.index.words import SPACE, keys

BYTES_PER_ENTRY_MAX = 120
NODES_MAX = 4096
HOLDERS = 9
"""Of a node: its own memory and eight engines."""


def test_an_entry_costs_no_more_than_its_budget() -> None:
    for entries in (1_000_000, 10_000_000):
        slots = default_slot_count(entries)
        flat = Holdings(entry_count_max=entries, slot_count_max=slots, seed=1, is_native=False)
        assert flat.memory_bytes <= BYTES_PER_ENTRY_MAX * entries


def test_all_nodes_find_slots_for_a_snapshot_beside_what_they_told() -> None:
    index = Index(entry_count_max=DEFAULT_ENTRIES, now_ms=0, is_native=False)
    assert len(index.holdings.free_slots) >= 2 * HOLDERS * NODES_MAX


def test_the_smallest_index_has_room_for_its_slots() -> None:
    assert default_slot_count(ENTRIES_MIN) < ENTRIES_MIN


def test_to_find_a_slot_it_sweeps_some_rows_and_goes_on_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdings, "_SWEPT_TO_OPEN", 10)
    flat = Holdings(entry_count_max=100, slot_count_max=2, seed=1, is_native=False)
    full, other = (flat.open("t", SPACE, is_hidden=False) for _ in range(2))
    assert full is not None
    assert other is not None
    flat.stored(full, Tier.DRAM, keys(*range(30)))
    assert flat.open("t", SPACE, is_hidden=False) is None
    flat.void(full)
    for left in (20, 10):
        assert flat.open("t", SPACE, is_hidden=False) is None
        assert flat.entry_count == left
    assert flat.open("t", SPACE, is_hidden=False) == full
    assert flat.entry_count == 0
    check_holdings(flat)


def test_a_prompt_on_many_nodes_costs_little_more_than_on_one() -> None:
    flat = Holdings(entry_count_max=10_000, slot_count_max=64, seed=1, is_native=False)
    for _ in range(64):
        slot = flat.open("t", SPACE, is_hidden=False)
        assert slot is not None
        flat.stored(slot, Tier.DRAM, keys(*range(100)))
    assert (flat.block_count, flat.entry_count) == (100, 6400)
    assert np.count_nonzero(flat.arrays["set_cells"]) == 1


def test_there_is_a_chunk_for_every_set_that_can_be() -> None:
    # All sets different, as small as they can be: most memory per entry.
    slots = 40
    wanted: list[tuple[tuple[int, int], ...]] = [
        tuple((slot, tier) for tier in range(3) if tiers >> tier & 1)
        for slot in range(slots)
        for tiers in range(1, 8)
    ]
    wanted += [((a, 0), (b, 0)) for a, b in combinations(range(slots), 2)]
    entries = 7 * slots + 2 * (len(wanted) - 7 * slots)
    flat = Holdings(entry_count_max=entries, slot_count_max=slots, seed=1, is_native=False)
    names = [flat.open("t", SPACE, is_hidden=False) or 0 for _ in range(slots)]
    for block, members in enumerate(wanted):
        for slot, tier in members:
            flat.stored(names[slot], Tier(tier), keys(block))
    assert flat.entry_count == entries
    assert flat.evicted_count == 0
    assert np.count_nonzero(flat.arrays["set_cells"]) == len(wanted)
    check_holdings(flat)


def words_of(*words: int) -> bytes:
    """A key of these words, the other ones 0."""
    return np.array(words + (0,) * (8 - len(words)), dtype=np.uint32).tobytes()


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda n: bytes(8) + n.to_bytes(24), id="the first 8 bytes are alike"),
        pytest.param(lambda n: n.to_bytes(32, "little"), id="the last 28 bytes are alike"),
        pytest.param(
            lambda n: words_of(*((n >> bit & 1) << 31 for bit in range(7)), n >> 7),
            id="they differ in the highest bits of words",
        ),
        pytest.param(
            lambda n: words_of(*(n if i % 2 else -n & 0xFFFFFFFF for i in range(8))),
            id="words make up for each other",
        ),
    ],
)
def test_nobody_can_choose_blocks_that_collide(chosen: Callable[[int], bytes]) -> None:
    """A replica would spend minutes to take in as many as one word can name."""
    told = [chosen(n) for n in range(4000)]
    assert len(set(told)) == len(told)
    flat = Holdings(entry_count_max=len(told), slot_count_max=4, seed=1, is_native=False)
    slot = flat.open("t", SPACE, is_hidden=False)
    assert slot is not None
    flat.stored(slot, Tier.DRAM, b"".join(told))
    cells, rows, meta = (flat.arrays[name].tolist() for name in ("cells", "rows", "meta"))
    probes = [
        (cell - home_of_row(meta, rows, row)) % len(cells) for cell, row in enumerate(cells) if row
    ]
    assert len(probes) == len(told)
    assert max(probes) < 100
