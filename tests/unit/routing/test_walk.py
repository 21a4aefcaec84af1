"""The core under random events, and faults planted in it that the walk must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kvstore.routing import decide, filters, placing
from kvstore.routing.core import RouterCore
from kvstore.routing.fleet import Fleet, FleetColumn
from kvstore.routing.split import PrefillLanes
from kvstore.routing.waiting import WaitingRoom
from tests.amounts import amount, covered
from tests.unit.routing.walk import Walk

STEPS = 100
SEEDS = amount(50, nightly=10_000)


@settings(max_examples=SEEDS, deadline=None)
@given(st.integers(0, 2**32))
def test_every_request_is_decided_once_and_no_worker_is_over_its_bound(seed: int) -> None:
    walk = Walk(seed)
    walk.run(STEPS)
    assert walk.final.total() == walk.arrived
    covered("walks of the router's core", 1)


Plant = Callable[[pytest.MonkeyPatch], None]


def no_queue_bound(patch: pytest.MonkeyPatch) -> None:
    real = filters.dropped

    def without(columns: Any, limits: Any, *, need_tokens: int) -> Any:
        codes = real(columns, limits, need_tokens=need_tokens)
        codes[codes == filters.DROPS.index(filters.Dropped.QUEUE)] = 0
        return codes

    patch.setattr(decide, "dropped", without)


def draining_is_up(patch: pytest.MonkeyPatch) -> None:
    real = filters.unfit
    draining = filters.DROPS.index(filters.Dropped.DRAINING)

    def without(*args: Any, **more: Any) -> int:
        code = real(*args, **more)
        return 0 if code == draining else code

    patch.setattr(placing, "unfit", without)


def failed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real: Any = filters.unfit
    patch.setattr(placing, "unfit", lambda *a: real(*a[:4], (), a[5]))


def subset_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real: Any = filters.unfit
    patch.setattr(placing, "unfit", lambda *a: real(*a[:3], None, *a[4:]))


def prefill_flight_leaks(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.ended

    def leaky(self: Fleet, flight: str, now_ns: int) -> None:
        if "\0" not in flight:
            real(self, flight, now_ns)

    patch.setattr(Fleet, "ended", leaky)


def streams_are_not_counted_down(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.ended

    def wrong(self: Fleet, flight: str, now_ns: int) -> None:
        known = self.flights.get(flight)
        real(self, flight, now_ns)
        if known is not None and known.has_begun and known.worker in self.row_of:
            self.columns[FleetColumn.STREAMS, self.row_of[known.worker]] += 1

    patch.setattr(Fleet, "ended", wrong)


def rows_are_mixed_up_when_a_worker_leaves(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.leave

    def wrong(self: Fleet, worker: str) -> list[str]:
        row = self.row_of.get(worker)
        before = None if row is None else self.columns[:, row].copy()
        lost = real(self, worker)
        if row is not None and row < len(self.workers):
            self.columns[:, row] = before
        return lost

    patch.setattr(Fleet, "leave", wrong)


def an_abort_stays_in_the_lanes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillLanes, "remove", lambda *_: False)


def expired_ones_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RouterCore, "_expire", lambda self, now_ns: self.room.expired(now_ns) and [])


def displaced_ones_are_lost(patch: pytest.MonkeyPatch) -> None:
    real = WaitingRoom.add
    patch.setattr(WaitingRoom, "add", lambda *a, **m: real(*a, **m) and None)


def batch_passes(patch: pytest.MonkeyPatch) -> None:
    real = WaitingRoom.heads

    def upside_down(self: WaitingRoom, pool: str) -> Any:
        yield from reversed(list(real(self, pool)))

    patch.setattr(WaitingRoom, "heads", upside_down)


def a_choice_that_nobody_can_replay(patch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1 << 40))
    patch.setattr(decide, "mix", lambda _value: next(calls) * 7919)


def scraped_values_change_own_counts(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.scraped

    def wrong(self: Fleet, worker: str, sample: Any, now_ns: int) -> None:
        real(self, worker, sample, now_ns)
        if worker in self.row_of and sample.waiting is not None:
            self.columns[FleetColumn.QUEUED, self.row_of[worker]] = sample.waiting

    patch.setattr(Fleet, "scraped", wrong)


PLANTED: list[Plant] = [
    no_queue_bound,
    draining_is_up,
    failed_is_forgotten,
    subset_is_ignored,
    prefill_flight_leaks,
    streams_are_not_counted_down,
    rows_are_mixed_up_when_a_worker_leaves,
    an_abort_stays_in_the_lanes,
    expired_ones_are_not_told,
    displaced_ones_are_lost,
    batch_passes,
    a_choice_that_nobody_can_replay,
    scraped_values_change_own_counts,
]


def notices(seed: int) -> bool:
    try:
        Walk(seed).run(STEPS)
    except (AssertionError, KeyError):
        return True
    return False


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(notices(seed) for seed in range(200))
