"""A second worker for a request whose first byte is late: whether, when and where.

    predicted TTFT × quantile of achieved ÷ predicted ─▶ after_s ─▶ Late ─▶ second ─▶ Raced

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
from kvstore.routing.placing import OpenRequest, Placement, Placer
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.pressure import Rung
from kvstore.units import NS_PER_S

_START: Final = 4.0
"""Achieved over predicted TTFT that counts as late, before anything is learned …"""
_MOST: Final = 64.0
"""… and at most; at least 1."""
_STEP: Final = 0.1
"""Step of the logarithm for one observation."""


class Races:
    """See the module."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self._left = float(policy.races.burst)
        self._late_ratios: dict[str, float] = {}
        """Class → quantile."""

    def arrived(self) -> None:
        """A request more."""
        settings = self.policy.races
        self._left = min(settings.burst, self._left + settings.share)

    def after_s(self, opened: OpenRequest, placed: Placement) -> float | None:
        """Time without a first byte, after which the request is late; None: it is not raced."""
        settings = self.policy.races
        can_race = not (opened.request.has_side_effects or opened.is_late or placed.prefill_worker)
        if not (settings.is_on and can_race and placed.has_others):
            return None
        return max(settings.after_s_min, self._late_ratio(opened.service) * placed.predicted_s)

    def second(self, opened: OpenRequest, placer: Placer, now_ns: int) -> Placement | None:
        """Attempt beside the one that is late; None: there is none. Counted against the budget."""
        first = opened.placement
        if first is None or opened.is_held or opened.has_begun:
            return None
        if self.after_s(opened, first) is None:
            return None
        opened.is_late = True
        self._learn(opened.service, is_late=True)
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
        """The first byte came, `achieved_s` after the attempt began."""
        if not opened.is_late and not placed.prefill_worker and placed.predicted_s > 0:
            limit_s = self._late_ratio(opened.service) * placed.predicted_s
            self._learn(opened.service, is_late=achieved_s > limit_s)

    def _late_ratio(self, service: str) -> float:
        return self._late_ratios.get(service, _START)

    def _learn(self, service: str, *, is_late: bool) -> None:
        """A step up for one that is late and many small ones down for the others meet at the
        quantile."""
        step = _STEP * (self.policy.races.quantile - (not is_late))
        ratio = self._late_ratio(service) * math.exp(step)
        self._late_ratios[service] = min(max(ratio, 1.0), _MOST)


def _is_free(placed: Placement, waited_s: float) -> bool:
    assert placed.draft is not None
    queued = placed.draft.feature(FeatureColumn.QUEUED, placed.worker)
    is_calm = Rung.NO_RACE.value not in placed.draft.plain.degraded
    return is_calm and queued == 0 and placed.predicted_s <= waited_s
