"""Which blocks go to disk, and how many bytes a day."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from kvstore.engine.memory.policies import Prints
from kvstore.engine.moves.writes import DiskAdmission
from kvstore.types import AdmissionMode
from kvstore.units import NS_PER_DAY
from tests.unit.engine.harness import config_of

DAY_BYTES = 1 << 40
BLOCK = 2 << 20


def keys(*numbers: int) -> Prints:
    return np.random.default_rng(1).integers(2**64, size=100, dtype=np.uint64)[list(numbers)]


def admission(
    mode: AdmissionMode, *, day_bytes: int = 0, key_count: int = 1 << 12
) -> DiskAdmission:
    config = config_of(file_admission=mode, file_day_bytes=day_bytes, block_count_max=key_count)
    return DiskAdmission(config)


def budget_of(day_bytes: int, *, spent_bytes: int = 0) -> DiskAdmission:
    return DiskAdmission(config_of(file_day_bytes=day_bytes, file_spent_bytes=spent_bytes))


# ── the budget ───────────────────────────────────────────────────────────────────────────────────


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = budget_of(DAY_BYTES)
    budget.allow(DAY_BYTES, 1, NS_PER_DAY)
    assert budget.left_bytes(0) == 0
    assert budget.left_bytes(NS_PER_DAY) == 0, "and the time is not counted twice"


def test_asking_often_loses_nothing() -> None:
    budget = budget_of(1000)
    budget.allow(1000, 1, 0)
    times = range(0, NS_PER_DAY + 1, NS_PER_DAY // 3000)
    assert sum(budget.allow(1000, 1, now) for now in times) == 1000


@given(
    day=st.integers(1, 10**13),
    asks=st.lists(
        st.tuples(st.integers(0, 10**14), st.integers(0, 10**6), st.integers(1, 10**7)),
        max_size=30,
    ),
)
def test_never_more_than_a_day_and_what_came_in(day: int, asks: list[tuple[int, int, int]]) -> None:
    budget = budget_of(day)
    now, total = 0, 0
    for passed, wanted, record_bytes in asks:
        now += passed
        allowed = budget.allow(wanted, record_bytes, now)
        assert 0 <= allowed <= wanted
        total += allowed * record_bytes
        assert total * NS_PER_DAY <= day * (NS_PER_DAY + now)


def test_what_was_spent_before_the_start_is_missing_whatever_the_clock_says() -> None:
    budget = budget_of(400, spent_bytes=300)
    assert budget.left_bytes(9 * NS_PER_DAY) == 100
    assert budget.left_bytes(9 * NS_PER_DAY + NS_PER_DAY // 4) == 200
