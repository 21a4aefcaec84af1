"""A second worker for a request whose first byte is late: whether, when and where.

    predicted TTFT ─▶ late_after_s ─▶ Late ─▶ second ─▶ Raced

A request is late after ten seconds, five times its predicted TTFT, and the learned quantile of
achieved ÷ predicted, whichever is longest; with `races.is_on` after that quantile alone.

Rule 1: a race needs a request without side effects that is prefilled where it is decoded, a pool
that is not saturated, and a worker that is clearly free: nobody waits there for a first token, and
its predicted TTFT is not longer than what was waited already.
Rule 2: a request is raced once, and races are a share of requests (`PolicyRaces.share`).
Does not cover: counts of both attempts (`flights`), connections (the shell).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from kvstore.routing.features import FeatureColumn
from kvstore.routing.placing import Placer
from kvstore.routing.requests import OpenRequest, Placement
from kvstore.routing.workers.fleet import Fleet
from kvstore.routing.workers.pressure import Rung
from kvstore.units import NS_PER_S

LATE_S_MIN: Final = 10.0
LATE_FACTOR: Final = 5.0
QUANTILE: Final = 0.95
"""A first byte is late when achieved over predicted TTFT is above this quantile of its class, which
is learned."""
_PREFILL: Final = "\0prefill"
_START: Final = 4.0
"""Ratio of achieved to predicted TTFT above which a request is late, before anything is learned."""
_MOST: Final = 64.0
"""Largest value of that ratio; the least is 1."""
_STEP: Final = 0.1
"""Step of the ratio's logarithm for one observation."""


class Races:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._left = float(fleet.policy.races.burst)
        self._late_ratios: dict[str, float] = {}
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
        quantile_s = self._late_ratio(opened, placed) * placed.predicted_s
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
            limit_s = self._late_ratio(opened, placed) * placed.predicted_s
            self._learn(opened, placed, is_late=achieved_s > limit_s)

    def _late_ratio(self, opened: OpenRequest, placed: Placement) -> float:
        return self._late_ratios.get(_name(opened, placed), _START)

    def _learn(self, opened: OpenRequest, placed: Placement, *, is_late: bool) -> None:
        """Move the late ratio a step up for a late request, or a much smaller one down for others:
        both balance at QUANTILE.
        """
        step = _STEP * (QUANTILE - (not is_late))
        ratio = self._late_ratio(opened, placed) * math.exp(step)
        self._late_ratios[_name(opened, placed)] = min(max(ratio, 1.0), _MOST)


def _name(opened: OpenRequest, placed: Placement) -> str:
    return opened.service + _PREFILL * bool(placed.prefill_worker)


def _is_free(placed: Placement, waited_s: float) -> bool:
    assert placed.draft is not None
    queued = placed.draft.feature(FeatureColumn.QUEUED, placed.worker)
    is_calm = {Rung.NO_RACE, Rung.LAST_RESORT}.isdisjoint(placed.draft.plain.degraded)
    return is_calm and queued == 0 and placed.predicted_s <= waited_s
