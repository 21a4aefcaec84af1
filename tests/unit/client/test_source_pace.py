"""Hbm or dram: the quicker one, and now and then the other."""

from __future__ import annotations

import pytest

from kvstore.client.core.costs import SOURCE_EVERY as EVERY, SOURCE_TRIED as TRIED, SourcePace


def taken(pace: SourcePace, count: int, *, hbm_ns: int, dram_ns: int) -> list[bool]:
    """Which of so many loads come from hbm, where each takes its source's time."""
    found = []
    for _ in range(count):
        is_hbm = pace.takes_hbm()
        pace.ended(hbm_ns if is_hbm else dram_ns, 1000, is_hbm=is_hbm)
        found.append(is_hbm)
    return found


@pytest.mark.parametrize("hbm_ns", [500, 2000])
def test_the_quicker_one_is_taken_once_both_were_seen(hbm_ns: int) -> None:
    pace = SourcePace()
    first = taken(pace, EVERY, hbm_ns=hbm_ns, dram_ns=1000)
    assert sum(first) == TRIED, "dram, until hbm was tried"
    later = taken(pace, 3 * EVERY, hbm_ns=hbm_ns, dram_ns=1000)
    share = sum(later) / len(later)
    assert share == (1 - TRIED / EVERY if hbm_ns < 1000 else TRIED / EVERY)


def test_a_small_difference_changes_nothing() -> None:
    pace = SourcePace()
    for hbm_ns in (950, 1050, 950, 1050):
        assert sum(taken(pace, EVERY, hbm_ns=hbm_ns, dram_ns=1000)) == TRIED


def test_ends_that_are_seen_together_are_no_change_of_pace() -> None:
    """The first of two batches has all the time, the other one none."""
    pace, changes = SourcePace(), 0
    taken(pace, 2 * EVERY, hbm_ns=500, dram_ns=1000)
    for number in range(3 * EVERY):
        is_hbm = pace.takes_hbm()
        is_first = number // 16 % 2
        each_ns = 500 if is_hbm else 1000
        pace.ended(2 * each_ns * is_first, 1000, is_hbm=is_hbm)
        changes += not is_hbm
    assert changes == 3 * TRIED
