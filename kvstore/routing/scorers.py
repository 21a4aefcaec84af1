"""The other policies: counts and hashes. Lower is better.

    least-load, round-robin, session (bounded load)

They are a refuge where the measures of `cost` mislead. Each is one function of the features, so
receipts replay under any of them. Scorers of other routers are in `bench/routing/baselines.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from kvstore.routing.features import Case, FeatureColumn
from kvstore.routing.workers.rows import Floats

_MASK: Final = (1 << 64) - 1
_SESSION_LOAD_MAX: Final = 1.25
"""Bounded load: a session leaves a worker that has so many times the mean, for that request."""
_SESSION_FREE: Final = 8
"""So few requests at a worker never make a session leave."""


def mix(value: int) -> int:
    """64 well-mixed bits of a number (splitmix64): seeded choices without a random module."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def requests_in_flight(columns: Floats) -> Floats:
    """Requests of each worker that wait or run there."""
    return np.asarray(columns[FeatureColumn.QUEUED] + columns[FeatureColumn.STREAMS])


def least_load(columns: Floats, _case: Case) -> dict[str, Floats]:
    """Fewest requests in flight: blind to caches."""
    return {"requests": requests_in_flight(columns)}


def round_robin(columns: Floats, case: Case) -> dict[str, Floats]:
    """By turns; the number of the decision is whose turn it is."""
    count = columns.shape[1]
    turn = np.argsort(np.argsort(columns[FeatureColumn.POSITION]))
    return {"turn": np.asarray((turn - case.number) % count, dtype=np.float64)}


def session(columns: Floats, case: Case) -> dict[str, Floats]:
    """The worker that it was at, else the highest hash of (session, worker) first; past workers
    with more than their share."""
    positions = columns[FeatureColumn.POSITION].astype(int).tolist()
    hashes = [mix(case.session_hash ^ mix(position + 1)) / _MASK for position in positions]
    requests = requests_in_flight(columns)
    bound = max(_SESSION_FREE, np.ceil((requests.sum() + 1) / len(requests) * _SESSION_LOAD_MAX))
    scores = np.where(columns[FeatureColumn.STAYS] > 0, -1.0, 1 - np.array(hashes))
    return {"hash": scores, "over": 2.0 * (requests >= bound)}


SCORERS: Final[dict[str, Callable[[Floats, Case], dict[str, Floats]]]] = {
    "least-load": least_load,
    "round-robin": round_robin,
    "session": session,
}
