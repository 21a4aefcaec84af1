"""Saturation of a pool with its cause, the degradation ladder, and replicas that are needed.

    features (load) ─▶ saturation (cause) ─▶ rungs in receipts      work per second ─▶ replicas

Saturation 1 is full: each worker counts with the fullest of its queue (seconds), memory and running
requests, at most as 1. Autoscalers read it, and `wva_desired_replicas`.
"""

from __future__ import annotations

import enum
import math
from typing import Final

import msgspec
import numpy as np

from kvstore.routing.features import FeatureColumn, load_columns
from kvstore.routing.fleet import Fleet
from kvstore.routing.policy import PolicyLimits
from kvstore.routing.rows import Floats
from kvstore.routing.values import PrefixTrust, WorkerRole
from kvstore.units import NS_PER_S

SATURATED_S: Final = 2.0
"""Seconds of prefill ahead from which a worker counts as saturated."""
_TARGET: Final = 0.8
"""Utilisation that replicas are made for."""
_SPARE: Final = 0.9
"""A replica is given back when the others would stay below this share of the target."""
_WINDOW_S: Final = 30.0
_NO_RACE: Final = 0.7


class Cause(enum.StrEnum):
    """Resource that is full."""

    NOTHING = "nothing"
    QUEUE = "queue"
    MEMORY = "memory"
    RUNNING = "running"
    NO_WORKERS = "no-workers"


class Rung(enum.StrEnum):
    """Degradation that was in effect for a request."""

    PREFIX_STALE = "prefix-stale"
    PREFIX_APPROXIMATE = "prefix-approximate"
    LOAD_ONLY = "load-only"
    NO_RACE = "no-race"
    HELD = "held"
    SPLIT_REFUSED = "prefill-local"
    """The prefill queue was full, or every prefiller failed."""
    RETRIED = "retried"
    LAST_RESORT = "last-resort"
    """No worker was fit: one was tried that is down, failing, or said to be too small."""


_OF_TRUST: Final = {
    PrefixTrust.STALE: (Rung.PREFIX_STALE,),
    PrefixTrust.APPROXIMATE: (Rung.PREFIX_APPROXIMATE,),
    PrefixTrust.NONE: (Rung.LOAD_ONLY,),
}


class Saturation(msgspec.Struct, frozen=True):
    """Saturation of a pool and its cause."""

    value: float
    cause: Cause


def saturation(columns: Floats, limits: PolicyLimits) -> Saturation:
    """Mean over workers of the fullest resource; the cause is the resource that adds most."""
    if columns.shape[1] == 0:
        return Saturation(1.0, Cause.NO_WORKERS)
    queued = columns[FeatureColumn.QUEUED]
    running = queued + columns[FeatureColumn.STREAMS]
    queue_share = columns[FeatureColumn.QUEUE_S] / SATURATED_S
    shares = np.array(
        [
            np.maximum(queue_share, queued / (limits.queue_max or np.inf)),
            columns[FeatureColumn.MEMORY] / limits.memory_ceiling,
            running / (limits.running_max or np.inf),
        ]
    )
    # A worker counts as one worker, however long its queue.
    fullest = np.minimum(1.0, shares.max(axis=0))
    value = float(fullest.mean())
    if value <= 0:
        return Saturation(0.0, Cause.NOTHING)
    sums = np.bincount(shares.argmax(axis=0), weights=fullest, minlength=3)
    return Saturation(value, (Cause.QUEUE, Cause.MEMORY, Cause.RUNNING)[int(sums.argmax())])


def rungs(trust: PrefixTrust, *, value: float, is_held: bool, attempt: int) -> list[Rung]:
    """Rungs in effect for a request, from the mildest on. `value`: saturation of its pool."""
    are_in_effect = {Rung.NO_RACE: value >= _NO_RACE, Rung.HELD: is_held, Rung.RETRIED: attempt > 1}
    return [*_OF_TRUST.get(trust, ()), *(rung for rung, its in are_in_effect.items() if its)]


class Gauges:
    """Saturation and replicas by pool, and the work that arrives there."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rates: dict[tuple[str, WorkerRole], tuple[float, int]] = {}
        """(pool, role) → (seconds of prefill per second that arrive, when that was, in ns)."""

    def add(self, pool: str, role: WorkerRole, work_s: float, now_ns: int) -> None:
        """A request brought work to workers of this role."""
        rate = self._rate(pool, role, now_ns) + work_s / _WINDOW_S
        self._rates[pool, role] = rate, now_ns

    def _rate(self, pool: str, role: WorkerRole, now_ns: int) -> float:
        """Workers that are busy in the mean, smoothed over half a minute."""
        rate, at_ns = self._rates.get((pool, role), (0.0, 0))
        return rate * math.exp(-max(0, now_ns - at_ns) / NS_PER_S / _WINDOW_S)

    def saturation(self, pool: str, now_ns: int) -> Saturation:
        """Saturation of the workers that decode."""
        crew = self._fleet.crew(pool, prefill=False)
        return saturation(load_columns(self._fleet, crew, now_ns), self._fleet.policy.limits)

    def desired_replicas(self, pool: str, role: WorkerRole, held: int, now_ns: int) -> int:
        """`wva_desired_replicas{pool,role}`: workers for the work that arrives, for memory in use,
        one more for a queue that does not drain. One is given back only if the rest keeps a spare.
        `held`: requests that wait for the pool."""
        crew = self._fleet.crew(pool, prefill=role is WorkerRole.PREFILL)
        count, limits = len(crew.names), self._fleet.policy.limits
        if not count:
            return 1 if held else 0
        columns = load_columns(self._fleet, crew, now_ns)
        memory = float(columns[FeatureColumn.MEMORY].sum())
        rate = self._rate(pool, role, now_ns)
        need = max(rate / _TARGET, memory / (_TARGET * limits.memory_ceiling))
        if held or saturation(columns, limits).value >= 1:
            need = max(need, count + 1)
        desired = max(1, math.ceil(need))
        return desired if desired >= count or need <= _SPARE * (count - 1) else count
