"""Size and limits of the flat memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from kvstore.config.defaults import DEFAULT_ENTRIES, ENTRIES_MIN
from kvstore.index import holdings, loops
from kvstore.index.feed import Holder
from kvstore.index.holdings import Holdings
from kvstore.index.loops import ROW, SCOPE, home_of
from kvstore.types import Tier
from tests.kit.index_check import check_holdings
from tests.unit.index.words import SPACE, keys

BYTES_PER_ENTRY_MAX = 120
NODES_MAX = 4096
HOLDERS = 9
"""Of a node: its own memory and eight engines."""
HOLDER, PLACE = Holder("n"), ("t", SPACE)


def test_an_entry_costs_no_more_than_its_budget() -> None:
    for entries in (1_000_000, 10_000_000):
        flat = Holdings(entries, is_native=False)
        assert flat.memory_bytes <= BYTES_PER_ENTRY_MAX * entries


def test_all_nodes_find_slots_for_a_snapshot_beside_what_they_told() -> None:
    flat = Holdings(DEFAULT_ENTRIES, is_native=False)
    assert len(flat.free_slots) >= 2 * HOLDERS * NODES_MAX
    assert holdings.default_slot_count(ENTRIES_MIN) < ENTRIES_MIN


def test_to_find_a_slot_it_sweeps_some_rows_and_goes_on_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdings, "_SWEPT_TO_OPEN", 10)
    flat = Holdings(entry_count_max=100, slot_count_max=2, seed=1, is_native=False)
    full, other = (flat.open(HOLDER, PLACE, is_hidden=False) for _ in range(2))
    assert full is not None
    assert other is not None
    flat.stored(full, PLACE, Tier.DRAM, keys(*range(30)))
    assert flat.open(HOLDER, PLACE, is_hidden=False) is None
    flat.void(full)
    for left in (20, 10):
        assert flat.open(HOLDER, PLACE, is_hidden=False) is None
        assert flat.statistics().entry_count == left
    assert flat.open(HOLDER, PLACE, is_hidden=False) == full
    assert flat.statistics().entry_count == 0
    check_holdings(flat)


def test_a_row_that_changes_as_the_one_before_costs_the_sweep_two_calls() -> None:
    # In machine code a call with all its arrays takes longer than the rest of such a row.
    flat = Holdings(entry_count_max=5000, slot_count_max=2, seed=1, is_native=False)
    slots = [flat.open(HOLDER, PLACE, is_hidden=False) for _ in range(2)]
    for slot in filter(None, slots):
        flat.stored(slot, PLACE, Tier.DRAM, keys(*range(1000)))
    flat.void(slots[0] or 0)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        flat.sweep(2000)
    finally:
        sys.setprofile(None)
    assert flat.statistics().entry_count == 1000
    assert calls < 2100, "`give` and `release`"


def test_a_prompt_on_many_nodes_costs_little_more_than_on_one() -> None:
    flat = Holdings(entry_count_max=10_000, slot_count_max=64, seed=1, is_native=False)
    for _ in range(64):
        slot = flat.open(HOLDER, PLACE, is_hidden=False)
        assert slot is not None
        flat.stored(slot, PLACE, Tier.DRAM, keys(*range(100)))
    sizes = flat.statistics()
    assert (sizes.block_count, sizes.entry_count) == (100, 6400)
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
    names = [flat.open(HOLDER, PLACE, is_hidden=False) or 0 for _ in range(slots)]
    for block, members in enumerate(wanted):
        for slot, tier in members:
            flat.stored(names[slot], PLACE, Tier(tier), keys(block))
    assert flat.statistics().entry_count == entries
    assert flat.statistics().evicted_count == 0
    assert np.count_nonzero(flat.arrays["set_cells"]) == len(wanted)
    check_holdings(flat)


def test_blocks_with_the_same_holders_are_compared_and_no_others_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = Holdings(entry_count_max=1000, slot_count_max=32, seed=1, is_native=False)
    slots = [flat.open(HOLDER, PLACE, is_hidden=False) or 0 for _ in range(30)]
    for slot in slots:
        flat.stored(slot, PLACE, Tier.DRAM, keys(1, 2, 4))
        if slot % 2:
            flat.stored(slot, PLACE, Tier.DRAM, keys(3))
    flat.stored(slots[13], PLACE, Tier.HBM, keys(2))  # another set, of the same holders
    odd = {slot: (0, 2, 2) for slot in slots if slot % 2}
    told = {s: (h, d, f) for s, h, d, f, _ in flat.match("t", SPACE, keys(3, 4))}
    assert told == odd, "the others that hold the second block are passed over"
    for slot in slots:
        flat.stored(slot, PLACE, Tier.FILE if slot == slots[3] else Tier.DRAM, keys(5))
    slower = {s: (d, f) for s, _, d, f, _ in flat.match("t", SPACE, keys(1, 5))}
    assert slower == dict.fromkeys(slots, (2, 2)) | {slots[3]: (1, 2)}
    monkeypatch.setattr(loops, "narrow", None)
    assert {s: d for s, _, d, *_ in flat.match("t", SPACE, keys(1, 2))} == dict.fromkeys(slots, 2)


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
    slot = flat.open(HOLDER, PLACE, is_hidden=False)
    assert slot is not None
    flat.stored(slot, PLACE, Tier.DRAM, b"".join(told))
    cells, rows, meta = (flat.arrays[name].tolist() for name in ("cells", "rows", "meta"))
    probes = [
        (cell - home_of(meta, rows, row * ROW, rows[row * ROW + SCOPE])) % len(cells)
        for cell, row in enumerate(cells)
        if row
    ]
    assert len(probes) == len(told)
    assert max(probes) < 100
