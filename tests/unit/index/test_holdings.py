"""Size and limits of the flat memory."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from kvstore.index.check import check_holdings
from kvstore.index.holdings import Holdings
from kvstore.types import Tier
from tests.unit.index.words import SPACE, keys

BYTES_PER_ENTRY_MAX = 120
SLOTS = 1 << 14
"""As `Index` has them by default."""


def test_an_entry_costs_no_more_than_its_budget() -> None:
    for entries in (1_000_000, 10_000_000):
        flat = Holdings(entry_count_max=entries, slot_count_max=SLOTS, seed=1, is_native=False)
        assert flat.memory_bytes <= BYTES_PER_ENTRY_MAX * entries


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
