"""The core under random events, and faults planted in it that the walk must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstore.routing import core as core_module, decide, legs, placing
from kvstore.routing.core import RouterCore
from kvstore.routing.fleet import Fleet
from kvstore.routing.legs import Blame, Legs
from kvstore.routing.rows import FleetColumn, WorkerHealth
from kvstore.routing.split import PrefillLanes
from kvstore.routing.waiting import WaitingRoom
from tests.amounts import amount, covered
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
        "flaw 1",
        "flaw 2",
        "flaw 3",
        "half-open",
        "evicted-priority",
    }
    assert rare <= seen.keys(), rare - seen.keys()


Plant = Callable[[pytest.MonkeyPatch], None]


def no_queue_bound(patch: pytest.MonkeyPatch) -> None:
    real = decide.dropped

    def without(columns: Any, limits: Any, *, need_tokens: int) -> Any:
        codes = real(columns, limits, need_tokens=need_tokens)
        codes[codes == decide.DROPS.index(decide.Dropped.QUEUE)] = 0
        return codes

    patch.setattr(decide, "dropped", without)


def draining_is_up(patch: pytest.MonkeyPatch) -> None:
    real = decide.unfit
    draining = decide.DROPS.index(decide.Dropped.DRAINING)

    def without(*args: Any, **more: Any) -> int:
        code = real(*args, **more)
        return 0 if code == draining else code

    patch.setattr(placing, "unfit", without)


def failed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real: Any = decide.unfit

    def anew(state: Any, opened: Any, now_ns: int) -> Any:
        return real(state, msgspec.structs.replace(opened, failed=set()), now_ns)

    patch.setattr(placing, "unfit", anew)


def subset_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real: Any = decide.unfit

    def anywhere(state: Any, opened: Any, now_ns: int) -> Any:
        request = msgspec.structs.replace(opened.request, subset=None)
        return real(state, msgspec.structs.replace(opened, request=request), now_ns)

    patch.setattr(placing, "unfit", anywhere)


def media_and_contexts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    real: Any = decide.unfit
    flaws = [decide.DROPS.index(each) for each in (decide.Dropped.MEDIA, decide.Dropped.CONTEXT)]

    def blind(*a: Any) -> int:
        code: int = real(*a)
        return 0 if code in flaws else code

    patch.setattr(placing, "unfit", blind)


def whoever_is_down_is_up(patch: pytest.MonkeyPatch) -> None:
    real: Any = decide.unfit
    down = decide.DROPS.index(decide.Dropped.DOWN)
    patch.setattr(placing, "unfit", lambda *a: real(*a) * (real(*a) != down))


def last_resorts_are_tried_at_random(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "LAST_RESORTS", decide.LAST_RESORTS[::-1])


def last_resorts_are_not_put_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "is_of_the_moment", lambda _codes: False)


def races_go_to_last_resorts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(legs, "_is_free", lambda *_: True)


def what_can_never_be_placed_waits(patch: pytest.MonkeyPatch) -> None:
    def waits(self: RouterCore, opened: Any) -> bool:
        return bool(opened.is_held)

    patch.setattr(RouterCore, "_may_wait_for_workers", waits)


def every_silence_gives_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "silent_with_others", lambda self, worker: self.state(worker) is not None)


def late_is_down(patch: pytest.MonkeyPatch) -> None:
    real = WorkerHealth.probed

    def harsh(self: WorkerHealth, result: Any, why: str, late_s: float) -> None:
        real(self, result, why, late_s)
        self.is_down |= late_s > 1

    patch.setattr(WorkerHealth, "probed", harsh)


def changes_are_not_told(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.take_changes
    patch.setattr(Fleet, "take_changes", lambda self: real(self)[:1])


def who_drains_is_read_once(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: Fleet, policy: Any) -> None:
        self.policy = policy

    patch.setattr(Fleet, "adopt", adopt)


def a_second_suspect_is_tried_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core_module, "may_retry", lambda *_a, **_m: True)


def unstreamed_ones_are_queued_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "pass_time", lambda *_: None)


def unstreamed_ones_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Fleet.pass_time
    patch.setattr(Fleet, "pass_time", lambda self, now_ns: real(self, now_ns + 10**9))


def flights_of_races_leak(patch: pytest.MonkeyPatch) -> None:
    real: Any = Legs.race_over

    def leaky(self: Legs, opened: Any, loser: str, now_ns: int) -> None:
        flights = dict(self._fleet.flights)
        real(self, opened, loser, now_ns)
        lost = flights.keys() - self._fleet.flights.keys()
        self._fleet.flights |= {name: flights[name] for name in lost}

    patch.setattr(Legs, "race_over", leaky)


def who_may_be_blamed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real: Any = Blame.failed

    def lenient(self: Blame, opened: Any, *rest: Any) -> None:
        real(self, opened, *rest)
        opened.decode_suspects = 0

    patch.setattr(Blame, "failed", lenient)


def reported_needs_are_subtracted_again(patch: pytest.MonkeyPatch) -> None:
    real: Any = Fleet.scraped

    def wrong(self: Fleet, worker: str, sample: Any, asked_ns: int, now_ns: int) -> None:
        real(self, worker, sample, asked_ns, now_ns)
        if worker in self.row_of:
            self.workers[self.row_of[worker]].reported_ns = -1

    patch.setattr(Fleet, "scraped", wrong)


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

    def wrong(self: Fleet, worker: str) -> None:
        row = self.row_of.get(worker)
        before = None if row is None else self.columns[:, row].copy()
        real(self, worker)
        if row is not None and row < len(self.workers):
            self.columns[:, row] = before

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

    def wrong(self: Fleet, worker: str, sample: Any, asked_ns: int, now_ns: int) -> None:
        real(self, worker, sample, asked_ns, now_ns)
        if worker in self.row_of and sample.waiting is not None:
            self.columns[FleetColumn.QUEUED, self.row_of[worker]] = sample.waiting

    patch.setattr(Fleet, "scraped", wrong)


PLANTED: list[Plant] = [
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
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(notices(seed) for seed in range(200))
