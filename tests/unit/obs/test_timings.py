"""Percentiles out of few counts: never below the true one, never far above it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from kvstore.obs.metrics import BOUNDS_NS, STEPS, TRANSFERS, TTFTS, Timings


@given(st.lists(st.integers(0, BOUNDS_NS[-1]), min_size=1), st.integers(1, 100))
def test_a_percentile_is_close_above_the_true_one(times: list[int], percent: int) -> None:
    timings = Timings()
    for took_ns in times:
        timings.add(took_ns)
    true = sorted(times)[math.ceil(len(times) * percent / 100) - 1]
    found = timings.percentile_ns(percent)
    assert true <= found <= max(true, BOUNDS_NS[0]) * 1.4143


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


@given(st.lists(st.integers(0, 2 * BOUNDS_NS[-1])))
def test_buckets_count_everything_up_to_their_bound(took_ns: list[int]) -> None:
    timings = Timings()
    for each in took_ns:
        timings.add(each)
    for of in (STEPS, TRANSFERS, TTFTS, range(0)):
        counted, total_s = timings.buckets(of)
        assert total_s == pytest.approx(sum(took_ns) / 10**9)
        assert {bound: sum(ns <= bound * 10**9 for ns in took_ns) for bound in counted} == counted


def test_an_operator_pays_for_twelve_to_fifteen_buckets_that_reach_two_minutes() -> None:
    for of in (TRANSFERS, TTFTS):
        bounds = list(Timings().buckets(of)[0])
        assert 12 <= len(bounds) <= 15
        assert bounds[-2:] == [128.0, math.inf]
    assert 1.0 in Timings().buckets(TTFTS)[0], "goals are whole seconds"
