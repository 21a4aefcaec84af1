"""Percentiles out of few counts: never below the true one, never far above it."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from kvstore.obs.timings import BOUNDS_NS, FIRST_NS, Timings


@given(st.lists(st.integers(0, BOUNDS_NS[-1]), min_size=1), st.integers(1, 100))
def test_a_percentile_is_close_above_the_true_one(times: list[int], percent: int) -> None:
    timings = Timings()
    for took_ns in times:
        timings.add(took_ns)
    true = sorted(times)[math.ceil(len(times) * percent / 100) - 1]
    found = timings.percentile_ns(percent)
    assert true <= found <= max(true, FIRST_NS) * 1.4143


def test_what_takes_for_ever_is_counted() -> None:
    timings = Timings()
    timings.add(10**15)
    assert timings.percentile_ns(99) == BOUNDS_NS[-1]
    assert timings.count == sum(timings.counts) == 1


def test_nothing_takes_no_time() -> None:
    assert (Timings().percentile_ns(50), Timings().bytes_per_s) == (0, 0)


def test_how_much_went_how_quickly() -> None:
    timings = Timings()
    timings.add(10**9, 300)
    timings.add(2 * 10**9, 300)
    assert timings.bytes_per_s == 200
