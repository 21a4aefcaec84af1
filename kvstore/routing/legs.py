"""Legs of requests at their workers: counted, doubled when late, and judged when they fail.

    Placement ─▶ `Legs`: flights of each leg, both attempts of a race      late ─▶ `Races`: a second
    failure, answer ─▶ `Blame`: whose fault it is, and whether another worker is tried

Does not cover: whether and where (`placing`), roles of workers (`role_planner`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

import msgspec

from kvstore.routing.events import (
    Ending,
    Failure,
    Fault,
    Lack,
    Leg,
    LegFailed,
    PrefillDone,
    RequestEnded,
)
from kvstore.routing.features import FeatureColumn
from kvstore.routing.fleet import Fleet
from kvstore.routing.learning import smoothed_ratio
from kvstore.routing.placing import Placer
from kvstore.routing.pressure import Rung
from kvstore.routing.requests import OpenRequest, Placement
from kvstore.routing.rows import MODELS_MAX, FleetColumn, Flight
from kvstore.units import NS_PER_S

# ── flights ───────────────────────────────────────────────────────────────────────────────────────
# Counts at workers, and prefixes that the approximate tree remembers.
#
#     Placement ─▶ sent: the decode leg, a prefill leg ─▶ began, prefilled ─▶ ended
#               └▶ raced: the same request at a second worker ─▶ race_over: one of the two is left
#
# Rule: each leg is a flight of the fleet, and leaves it exactly once.


class Legs:
    """Flights of the legs of requests."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self._fleet, self._placer = fleet, placer

    def sent(self, opened: OpenRequest, placed: Placement, now_ns: int) -> None:
        """An attempt begins: its legs count at their workers, and in the tree of what was sent."""
        request = opened.request
        placed.legs = (_decode_leg(opened, placed, now_ns),)
        if placed.prefill_worker:
            its = placed.prefill_worker, placed.work_s, request.prompt_tokens
            placed.legs += (Flight(*its, now_ns, placed.uncached),)
        for flight in placed.legs:
            self._fleet.sent(flight)
            for keys in request.chains:
                self._placer.tree.insert(keys, flight.worker, now_ns, step=request.key_step)

    def raced(self, opened: OpenRequest, placed: Placement, now_ns: int) -> None:
        """A second attempt begins beside the first."""
        assert opened.race is None, "at most one race at a time"
        opened.race = placed
        opened.outcome.raced_s = (now_ns - opened.routed_ns) / NS_PER_S
        self.sent(opened, placed, now_ns)

    def race_over(self, opened: OpenRequest, loser: str, now_ns: int) -> None:
        """One of two attempts has ended; the other is from now on the request's only one."""
        first, second, outcome = opened.placement, opened.race, opened.outcome
        assert first is not None
        assert second is not None
        left, gone = first, second
        if loser == first.worker:
            left, gone = msgspec.structs.replace(second, draft=first.draft), first
            opened.routed_ns += int((outcome.raced_s or 0.0) * NS_PER_S)
        opened.placement, opened.race = left, gone
        self._end_race(opened, now_ns)
        outcome.race_winner, outcome.race_loser = left.worker, gone.worker

    def _end_race(self, opened: OpenRequest, now_ns: int) -> None:
        """End the attempt beside the request's placement, if there is one."""
        gone, opened.race = opened.race, None
        if gone is not None:
            self._fleet.ended(gone.legs[0], now_ns)
            self._placer.withdraw(opened.request, gone)

    def began(self, opened: OpenRequest, placed: Placement, now_ns: int) -> None:
        """The first token came: the prefill leg is over, and the decode leg streams."""
        self.prefilled(placed, now_ns)
        self._fleet.began(placed.legs[0], now_ns)

    def prefilled(self, placed: Placement, now_ns: int) -> None:
        """The prefill leg is over."""
        for flight in placed.legs[1:]:
            self._fleet.ended(flight, now_ns)

    def learn_hits(self, opened: OpenRequest, served_by: str) -> None:
        """A request is over: learn how the cached tokens that its worker reported compare with
        those predicted.
        """
        placed = opened.placement
        row = None if placed is None else self._fleet.row_of.get(placed.worker)
        cached = opened.outcome.cached_tokens
        if placed is None or row is None or cached is None or placed.prefill_worker:
            return
        if served_by in ("", placed.worker):
            near, far = placed.offered  # before any ratio, or it would settle at its own root
            ratios = self._fleet.columns[FleetColumn.HIT_RATIO : FleetColumn.FETCH_RATIO + 1, row]
            ratios[0] = smoothed_ratio(ratios[0], near, cached)
            ratios[1] = smoothed_ratio(ratios[1], far, cached - near)

    def ended(self, opened: OpenRequest, now_ns: int) -> None:
        """End all legs of a request."""
        for flight in opened.placement.legs if opened.placement is not None else ():
            self._fleet.ended(flight, now_ns)
        self._end_race(opened, now_ns)


def _decode_leg(opened: OpenRequest, placed: Placement, now_ns: int) -> Flight:
    """Flight of the decode leg. After a remote prefill it has no work before its first token."""
    begins_ns = None
    if not opened.request.is_streamed:
        begins_ns = now_ns + int(placed.predicted_s * NS_PER_S)
    is_remote = bool(placed.prefill_worker)
    work_s, uncached = (0.0, 0.0) if is_remote else (placed.work_s, placed.uncached)
    return Flight(placed.worker, work_s, placed.need_tokens, now_ns, uncached, begins_ns)


# ── races ─────────────────────────────────────────────────────────────────────────────────────────
# A second worker for a request whose first byte is late: whether, when and where.
#
#     predicted TTFT ─▶ late_after_s ─▶ Late ─▶ second ─▶ Raced
#
# A request is late after ten seconds, five times its predicted TTFT, and the learned quantile of
# achieved ÷ predicted, whichever is longest; with `races.is_on` after that quantile alone.
#
# Rule 1: a race needs a request without side effects that is prefilled where it is decoded, a pool
# that is not saturated, and a worker that is clearly free: nobody waits there for a first token,
# and its predicted TTFT is not longer than what was waited already.
# Rule 2: a request is raced once, and races are a share of requests (`PolicyRaces.share`).

LATE_S_MIN: Final = 10.0
LATE_FACTOR: Final = 5.0
QUANTILE: Final = 0.95
"""A first byte is late when achieved over predicted TTFT is above this quantile of its class, which
is learned."""
_START: Final = 4.0
"""Ratio of achieved to predicted TTFT above which a request is late, before anything is learned."""
_MOST: Final = 64.0
"""Largest value of that ratio; the least is 1."""
_STEP: Final = 0.1
"""Step of the ratio's logarithm for one observation."""


class Races:
    """Second workers for late requests."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._left = float(fleet.policy.races.burst)
        self._late_ratios = defaultdict[str, float](lambda: _START)
        """Class, with or without remote prefill → quantile."""

    def arrived(self) -> None:
        """Add the share of one more request to the budget."""
        settings = self._fleet.policy.races
        self._left = min(settings.burst, self._left + settings.share)

    def late_after_s(self, opened: OpenRequest, placed: Placement) -> float:
        """Seconds without a first byte, or without the end of a remote prefill, after which a
        request is late.
        """
        settings = self._fleet.policy.races
        quantile_s = self._late_ratios[_name(opened, placed)] * placed.predicted_s
        if settings.is_on and not placed.prefill_worker:
            return max(settings.after_s_min, quantile_s)
        return max(LATE_S_MIN, LATE_FACTOR * placed.predicted_s, quantile_s)

    @staticmethod
    def may_race(opened: OpenRequest, placed: Placement) -> bool:
        """Whether a second worker may begin with the request, too, when it is late."""
        was_raced = opened.outcome.raced_s is not None
        is_bound = opened.request.has_side_effects or was_raced or placed.prefill_worker
        return placed.has_others and not is_bound

    def second(self, opened: OpenRequest, placer: Placer, now_ns: int) -> Placement | None:
        """Placement of a second attempt beside the late one, counted against the budget; None: no
        race.
        """
        first = opened.placement
        if first is None or opened.is_held or opened.has_begun:
            return None
        if not self.may_race(opened, first):
            return None
        if not opened.is_late:
            opened.is_late = True
            self._learn(opened, first, is_late=True)
        if self._left < 1:
            return None
        beside = msgspec.structs.replace(
            opened, failed={*opened.failed, first.worker}, is_local=True, was_held=False
        )
        found = placer.place(beside, now_ns)
        waited_s = (now_ns - opened.routed_ns) / NS_PER_S
        if not isinstance(found, Placement) or not _is_free(found, waited_s):
            return None
        self._left -= 1
        return found

    def learn(self, opened: OpenRequest, placed: Placement, achieved_s: float) -> None:
        """Learn from a first byte that came `achieved_s` after the attempt began."""
        if not opened.is_late and placed.predicted_s > 0:
            limit_s = self._late_ratios[_name(opened, placed)] * placed.predicted_s
            self._learn(opened, placed, is_late=achieved_s > limit_s)

    def _learn(self, opened: OpenRequest, placed: Placement, *, is_late: bool) -> None:
        """Move the late ratio a step up for a late request, or a much smaller one down for others:
        both balance at QUANTILE.
        """
        step = _STEP * (QUANTILE - (not is_late))
        name = _name(opened, placed)
        self._late_ratios[name] = min(max(self._late_ratios[name] * math.exp(step), 1.0), _MOST)


def _name(opened: OpenRequest, placed: Placement) -> str:
    return opened.service + "\0prefill" * bool(placed.prefill_worker)


def _is_free(placed: Placement, waited_s: float) -> bool:
    assert placed.draft is not None
    queued = placed.draft.feature(FeatureColumn.QUEUED, placed.worker)
    is_calm = {Rung.NO_RACE, Rung.LAST_RESORT}.isdisjoint(placed.draft.plain.degraded)
    return is_calm and queued == 0 and placed.predicted_s <= waited_s


# ── blame ─────────────────────────────────────────────────────────────────────────────────────────
# Whose fault a failure is: one rule for all front ends.
#
#     leg failed ─▶ `failed` ─▶ the worker's: counted      500, broken, refused ─▶ suspects
#     served elsewhere ─▶ the suspects' fault   failed at SUSPECTS_MAX workers ─▶ the request's own
#     one worker tried ─▶ its fault, if others have served requests since (`failed_unproven`)
#
# No request or caller can make workers look broken: what fails everywhere counts nowhere, and
# claims of callers count for their own requests only.

SUSPECTS_MAX: Final = 2
"""Workers that may fail at a request before it counts as the cause."""
REFUSALS_MAX: Final = 3
"""Workers that may refuse a request before the last answer goes to the client."""
_SUSPECT: Final = (Failure.ERROR, Failure.BROKEN)
_PUT_OFF: Final = (Failure.BUSY, Failure.REFUSED)


class Blame:
    """Verdicts on failures and answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def failed(self, opened: OpenRequest, worker: str, event: LegFailed, now_ns: int) -> None:
        """Note that a worker failed at a request, which is not sent there again, and judge whose
        fault it is.
        """
        fault, failure = event.fault, event.fault.failure
        opened.failed.add(worker)
        if failure is Failure.SILENT:
            opened.slow.add(worker)
        opened.refusals += failure is Failure.REFUSED
        if event.is_claim:
            self._fleet.record_no_fault(worker, now_ns)
            return
        if failure not in _PUT_OFF:
            self._fleet.count_failure(worker)
        if event.has_streamed and failure in _SUSPECT:
            self._fleet.failed_unproven(worker, fault.why, now_ns)
            return
        opened.decode_suspects += failure in _SUSPECT and event.leg is not Leg.PREFILL
        if fault.lack is Lack.CONTEXT:
            opened.failed.update(self._fleet.no_longer(worker, opened.side.model))
        if fault.lack is Lack.MEDIA and (state := self._fleet.state(worker)) is not None:
            if len(state.without_media) >= MODELS_MAX:  # clients invent names
                state.without_media.clear()
            state.without_media.add(opened.side.model)
        if failure is Failure.REFUSED and fault.lack is None:  # others may not refuse it
            opened.suspects.append((worker, fault.why))
        else:
            self._count(opened, worker, fault, now_ns)

    def _count(self, opened: OpenRequest, worker: str, fault: Fault, now_ns: int) -> None:
        if fault.failure is Failure.STATUS:
            self._fleet.failed(worker, fault.why, now_ns)
        elif fault.failure in _SUSPECT:  # a half-open breaker waits for the verdict
            opened.suspects.append((worker, fault.why))
        else:
            self._fleet.record_no_fault(worker, now_ns, is_full=fault.failure is Failure.BUSY)

    def prefilled(self, opened: OpenRequest, event: PrefillDone, now_ns: int) -> None:
        """A remote prefill is over, and its request goes on: judge the prefiller."""
        assert opened.placement is not None
        worker = opened.placement.prefill_worker
        if event.fault is None:
            self._fleet.answered(worker, now_ns, is_whole=True)
        else:
            self._count(opened, worker, event.fault, now_ns)

    def ended(self, opened: OpenRequest, event: RequestEnded, now_ns: int) -> None:
        """Verdict on the worker of a request that has ended."""
        if event.end in (Ending.DONE, Ending.REFUSED):  # it answered: a 4xx is the client's
            self.served(opened, event.served_by, event.why, now_ns, is_whole=True)
        elif opened.placement is not None:
            worker = event.served_by or opened.placement.worker
            if event.end is Ending.FAILED:
                self._fleet.failed_unproven(worker, event.why, now_ns)
            elif not (opened.has_begun or opened.is_held):
                self._fleet.record_no_fault(worker, now_ns)
                if opened.race is not None:
                    self._fleet.record_no_fault(opened.race.worker, now_ns)

    def served(
        self, opened: OpenRequest, served_by: str, why: str, now_ns: int, *, is_whole: bool
    ) -> None:
        """A worker answers a request. `served_by`: another one than the chosen one, if a gateway
        chose it; then `why` is the fault of the chosen one. Earlier failures of the request were
        the fault of their workers.
        """
        if opened.placement is None:
            return
        chosen = opened.placement.worker
        if served_by not in ("", chosen) and not opened.is_elsewhere:
            opened.is_elsewhere = True
            self._fleet.count_failure(chosen)
            opened.suspects.append((chosen, why))
        self._fleet.answered(served_by or chosen, now_ns, is_whole=is_whole)
        for suspect, why in opened.suspects:
            self._fleet.failed(suspect, why, now_ns)
        opened.suspects.clear()

    def unserved(self, opened: OpenRequest, now_ns: int) -> None:
        """A request is over without an answer. A single suspect is judged by `failed_unproven`;
        several are cleared, since the request is the likely cause.
        """
        if len(opened.suspects) == 1 and opened.decode_suspects:
            self._fleet.failed_unproven(*opened.suspects[0], now_ns)
        else:
            for suspect, _ in opened.suspects:
                self._fleet.record_no_fault(suspect, now_ns)
        opened.suspects.clear()


def may_retry(opened: OpenRequest, failure: Failure, *, has_budget: bool) -> bool:
    """Whether a request that failed at a worker is sent to another one, if any: not after
    REFUSALS_MAX refusals (but always if bound to one) or SUSPECTS_MAX suspect failures, nor for
    STATUS without a budget."""
    if failure is Failure.REFUSED:
        return opened.refusals < REFUSALS_MAX or opened.request.is_bound_to_one
    if failure in _SUSPECT:
        return opened.decode_suspects < SUSPECTS_MAX
    return has_budget or failure is not Failure.STATUS
