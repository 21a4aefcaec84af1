"""Which blocks go to disk, and how many bytes a day."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from kvstore.engine.memory.policy.disk import NS_PER_DAY, DiskAdmission, WriteBudget
from kvstore.engine.memory.policy.port import Prints
from kvstore.types import AdmissionMode

DAY_BYTES = 1 << 40
BLOCK = 2 << 20


def keys(*numbers: int) -> Prints:
    return np.random.default_rng(1).integers(2**64, size=100, dtype=np.uint64)[list(numbers)]


def admission(
    mode: AdmissionMode, *, day_bytes: int = 0, key_count: int = 1 << 12
) -> DiskAdmission:
    return DiskAdmission(mode, day_bytes=day_bytes, key_count=key_count, seed=7)


def test_second_sight_means_not_the_first_time() -> None:
    disk = admission(AdmissionMode.SECOND_SIGHT)
    assert disk.admit(keys(1, 2, 3), 0).tolist() == [False, False, False]
    assert disk.admit(keys(2, 4, 1), 0).tolist() == [True, False, True]
    assert disk.admit(keys(4, 5), 0).tolist() == [True, False]


def test_strangers_are_seldom_taken_for_seen() -> None:
    disk = admission(AdmissionMode.SECOND_SIGHT, key_count=1 << 16)
    random = np.random.default_rng(3)
    rates = [disk.admit(random.integers(2**64, size=2048, dtype=np.uint64), 0) for _ in range(200)]
    assert np.mean(rates) <= 0.00012 * 1.5


# ── the budget ───────────────────────────────────────────────────────────────────────────────────


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = WriteBudget(DAY_BYTES)
    budget.allow(DAY_BYTES, NS_PER_DAY, unit_bytes=1)
    assert budget.left_bytes(0) == 0
    assert budget.left_bytes(NS_PER_DAY) == 0, "and the time is not counted twice"


def test_asking_often_loses_nothing() -> None:
    budget = WriteBudget(1000)
    budget.allow(1000, 0, unit_bytes=1)
    times = range(0, NS_PER_DAY + 1, NS_PER_DAY // 3000)
    assert sum(budget.allow(1000, now, unit_bytes=1) for now in times) == 1000


@given(
    day=st.integers(1, 10**13),
    asks=st.lists(
        st.tuples(st.integers(0, 10**14), st.integers(0, 10**13), st.integers(1, 10**7)),
        max_size=30,
    ),
)
def test_never_more_than_a_day_and_what_came_in(day: int, asks: list[tuple[int, int, int]]) -> None:
    budget = WriteBudget(day)
    now, total = 0, 0
    for passed, wanted, unit in asks:
        now += passed
        allowed = budget.allow(wanted, now, unit_bytes=unit)
        assert 0 <= allowed <= wanted
        assert allowed % unit == 0
        total += allowed
        assert total * NS_PER_DAY <= day * (NS_PER_DAY + now)


def test_what_was_spent_before_the_start_is_missing_whatever_the_clock_says() -> None:
    budget = WriteBudget(400, spent_bytes=300)
    assert budget.left_bytes(9 * NS_PER_DAY) == 100
    assert budget.left_bytes(9 * NS_PER_DAY + NS_PER_DAY // 4) == 200
