"""The core under random events, and faults planted in it that the walk must find."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvstore.routing import core as core_module, decide, legs, placing
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Scraped
from kvstore.routing.fleet import Fleet
from kvstore.routing.legs import Blame, Legs
from kvstore.routing.rows import FleetColumn, Flight, WorkerState
from kvstore.routing.values import WorkerRole
from kvstore.routing.waiting import WaitingRoom
from tests.amounts import amount, covered
from tests.kit.planted import Patch, instead_of
from tests.unit.routing.walk import Walk

STEPS = 100
SEEDS = amount(80, nightly=10_000)


def test_every_request_is_decided_once_and_no_worker_is_over_its_bound() -> None:
    """They go where it is rare, too: else the rules about that are not looked at."""
    seen = Counter[str]()
    for seed in range(SEEDS):
        walk = Walk(seed)
        walk.run(STEPS)
        assert walk.final.total() == walk.arrived
        seen += walk.seen
    covered("walks of the router's core", SEEDS)
    rare = {
        "idle",
        "back to a silent one",
        "flaw 2",
        "flaw 4",
        "flaw 6",
        "half-open",
        "evicted-priority",
    }
    assert rare <= seen.keys(), rare - seen.keys()


@instead_of(decide, "dropped")
def no_queue_bound(real: Any, columns: Any, limits: Any, *, need_tokens: int) -> Any:
    codes = real(columns, limits, need_tokens=need_tokens)
    codes[codes == decide.Dropped.QUEUE] = 0
    return codes


@instead_of(placing, "unfit")
def draining_is_up(unfit: Any, *args: Any, **more: Any) -> int:
    code: int = unfit(*args, **more)
    return 0 if code == decide.Dropped.DRAINING else code


@instead_of(placing, "unfit")
def failed_is_forgotten(real: Any, state: Any, opened: Any, now_ns: int) -> Any:
    return real(state, msgspec.structs.replace(opened, failed=set()), now_ns)


@instead_of(placing, "unfit")
def subset_is_ignored(real: Any, state: Any, opened: Any, now_ns: int) -> Any:
    request = msgspec.structs.replace(opened.request, subset=None)
    return real(state, msgspec.structs.replace(opened, request=request), now_ns)


@instead_of(placing, "unfit")
def media_and_contexts_are_ignored(unfit: Any, *args: Any) -> int:
    code: int = unfit(*args)
    flaws = decide.Dropped.MEDIA, decide.Dropped.CONTEXT
    return 0 if code in flaws else code


@instead_of(placing, "unfit")
def whoever_is_down_is_up(unfit: Any, *args: Any) -> int:
    code: int = unfit(*args)
    return 0 if code == decide.Dropped.DOWN else code


def last_resorts_are_tried_at_random(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "LAST_RESORTS", decide.LAST_RESORTS[::-1])


def last_resorts_are_not_put_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "is_of_the_moment", lambda _codes: False)


def races_go_to_last_resorts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(legs, "_is_free", lambda *_: True)


@instead_of(RouterCore, "_may_wait_for_workers")
def what_can_never_be_placed_waits(_: Any, self: RouterCore, pool: str) -> bool:
    return pool in self.room.pools()


def every_silence_gives_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "silent_with_others", lambda self, worker: self.state(worker) is not None)


@instead_of(WorkerState, "probed")
def late_is_down(real: Any, self: WorkerState, result: Any, why: str, late_s: float) -> None:
    real(self, result, why, late_s)
    self.is_down |= late_s > 1


def changes_are_not_told(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.take_changes
    patch.setattr(Fleet, "take_changes", lambda self: real(self)[:1])


@instead_of(Fleet, "adopt")
def who_drains_is_read_once(_: Any, self: Fleet, policy: Any) -> None:
    self.policy = policy


def a_second_suspect_is_tried_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core_module, "may_retry", lambda *_a, **_m: True)


def unstreamed_ones_are_queued_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "pass_time", lambda *_: None)


def unstreamed_ones_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.pass_time
    patch.setattr(Fleet, "pass_time", lambda self, now_ns: real(self, now_ns + 10**9))


@instead_of(Legs, "race_over")
def flights_of_races_leak(real: Any, self: Legs, opened: Any, loser: str, now_ns: int) -> None:
    flights = dict(self._fleet.flights)
    real(self, opened, loser, now_ns)
    self._fleet.flights |= flights


@instead_of(Blame, "failed")
def who_may_be_blamed_is_forgotten(real: Any, self: Blame, opened: Any, *rest: Any) -> None:
    real(self, opened, *rest)
    opened.decode_suspects = 0


@instead_of(Fleet, "scraped")
def reported_needs_are_subtracted_again(
    real: Any, self: Fleet, event: Scraped, now_ns: int
) -> None:
    real(self, event, now_ns)
    if event.worker in self.row_of:
        self.workers[self.row_of[event.worker]].reported_ns = -1


@instead_of(Fleet, "ended")
def prefill_flight_leaks(real: Any, self: Fleet, flight: Flight, now_ns: int) -> None:
    state = self.state(flight.worker)
    if state is None or state.role is not WorkerRole.PREFILL:
        real(self, flight, now_ns)


@instead_of(Fleet, "ended")
def streams_are_not_counted_down(real: Any, self: Fleet, flight: Flight, now_ns: int) -> None:
    was_known = flight in self.flights
    real(self, flight, now_ns)
    if was_known and flight.has_begun and flight.worker in self.row_of:
        self.columns[FleetColumn.STREAMS, self.row_of[flight.worker]] += 1


@instead_of(Fleet, "leave")
def rows_are_mixed_up_when_a_worker_leaves(real: Any, self: Fleet, worker: str) -> None:
    row = self.row_of.get(worker)
    before = None if row is None else self.columns[:, row].copy()
    real(self, worker)
    if row is not None and row < len(self.workers):
        self.columns[:, row] = before


@instead_of(WaitingRoom, "remove")
def an_abort_stays_in_the_lanes(real: Any, self: WaitingRoom, opened: Any) -> None:
    laned_ns, lanes = opened.laned_ns, self._laned[opened.pool]
    real(self, opened)
    if laned_ns is not None:
        lanes[opened.request_id] = opened


def expired_ones_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RouterCore, "_expire", lambda self, now_ns: self.room.expired(now_ns) and [])


def displaced_ones_are_lost(patch: pytest.MonkeyPatch) -> None:
    real = WaitingRoom.add
    patch.setattr(WaitingRoom, "add", lambda *a, **m: real(*a, **m) and None)


@instead_of(WaitingRoom, "heads")
def batch_passes(real: Any, self: WaitingRoom, pool: str, now_ns: int) -> Any:
    yield from reversed(list(real(self, pool, now_ns)))


def a_choice_that_nobody_can_replay(patch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1 << 40))
    patch.setattr(decide, "mix", lambda _value: next(calls) * 7919)


@instead_of(Fleet, "scraped")
def scraped_values_change_own_counts(real: Any, self: Fleet, event: Scraped, now_ns: int) -> None:
    real(self, event, now_ns)
    if event.worker in self.row_of and event.sample.waiting is not None:
        self.columns[FleetColumn.QUEUED, self.row_of[event.worker]] = event.sample.waiting


PLANTED: list[Patch] = [
    no_queue_bound,
    draining_is_up,
    failed_is_forgotten,
    subset_is_ignored,
    media_and_contexts_are_ignored,
    whoever_is_down_is_up,
    last_resorts_are_tried_at_random,
    last_resorts_are_not_put_off,
    races_go_to_last_resorts,
    what_can_never_be_placed_waits,
    every_silence_gives_up,
    late_is_down,
    changes_are_not_told,
    who_drains_is_read_once,
    a_second_suspect_is_tried_on,
    unstreamed_ones_are_queued_for_ever,
    unstreamed_ones_begin_at_once,
    flights_of_races_leak,
    who_may_be_blamed_is_forgotten,
    reported_needs_are_subtracted_again,
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
def test_a_planted_fault_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(notices(seed) for seed in range(200))
