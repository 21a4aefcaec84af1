"""The other policies: points and counts, as routers in use score. Lower is better.

    least-load, round-robin, session (bounded load), prefix-load (threshold), weighted (scorers)

They are baselines for `cost` and a refuge where its measures mislead. Each is one function of the
features, so receipts replay under any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from kvstore.routing.costs import TRUST_FACTORS
from kvstore.routing.features import FeatureColumn
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.workers.rows import Floats

PREFIX_POINTS, LOAD_POINTS, MEMORY_POINTS = 100.0, 50.0, 30.0
"""Policy `weighted`: for a whole prefix, an idle worker, an empty KV cache."""
_MASK: Final = (1 << 64) - 1
_SESSION_LOAD_MAX: Final = 1.25
"""Bounded load: a session leaves a worker that has so many times the mean, for that request."""
_SESSION_FREE: Final = 8
"""So few requests at a worker never make a session leave."""
_IMBALANCE, _IMBALANCE_FACTOR, _MATCH_SHARE = 64, 1.5, 0.3
"""`prefix-load`: the thresholds of routers that have this policy as default."""
_CROWDED, _PRESSURE = 5, 0.8
"""`additive`: queue and memory use from which a worker is penalised."""


class ScoreContext(msgspec.Struct, frozen=True):
    """Scalars of the decision."""

    prompt_tokens: int
    number: int
    session_hash: int
    """0: no session; its worker is by hash of the first block then."""
    policy: RoutingPolicy


def mix(value: int) -> int:
    """64 well-mixed bits of a number (splitmix64): seeded choices without a random module."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _requests(columns: Floats) -> Floats:
    return np.asarray(columns[FeatureColumn.QUEUED] + columns[FeatureColumn.STREAMS])


def _match_share(columns: Floats, context: ScoreContext) -> Floats:
    """Share of the prompt in any tier of the worker, by trust."""
    longest = columns[FeatureColumn.HBM : FeatureColumn.FILE + 1].max(axis=0)
    trust = TRUST_FACTORS[columns[FeatureColumn.TRUST].astype(np.intp)]
    return np.asarray(longest * trust / max(1, context.prompt_tokens))


def least_load(columns: Floats, _context: ScoreContext) -> dict[str, Floats]:
    """Requests in flight: blind to caches."""
    return {"requests": _requests(columns)}


def round_robin(columns: Floats, context: ScoreContext) -> dict[str, Floats]:
    """By turns; the number of the decision is whose turn it is."""
    count = columns.shape[1]
    turn = np.argsort(np.argsort(columns[FeatureColumn.POSITION]))
    return {"turn": np.asarray((turn - context.number) % count, dtype=np.float64)}


def session(columns: Floats, context: ScoreContext) -> dict[str, Floats]:
    """The worker that it was at, else the highest hash of (session, worker) first; past workers
    with more than their share."""
    positions = columns[FeatureColumn.POSITION].astype(int).tolist()
    hashes = [mix(context.session_hash ^ mix(position + 1)) / _MASK for position in positions]
    requests = _requests(columns)
    bound = max(_SESSION_FREE, np.ceil((requests.sum() + 1) / len(requests) * _SESSION_LOAD_MAX))
    scores = np.where(columns[FeatureColumn.STAYS] > 0, -1.0, 1 - np.array(hashes))
    return {"hash": scores, "over": 2.0 * (requests >= bound)}


def prefix_load(columns: Floats, context: ScoreContext) -> dict[str, Floats]:
    """Longest prefix, if it is a good share of the prompt and loads are even; else least load."""
    requests = _requests(columns)
    spread, top = requests.max() - requests.min(), requests.max()
    is_uneven = spread > _IMBALANCE and top > _IMBALANCE_FACTOR * requests.min()
    match = _match_share(columns, context)
    if is_uneven or match.max() <= _MATCH_SHARE:
        return {"requests": requests}
    return {"prefix": -match * 1e6, "requests": requests}


def weighted(columns: Floats, context: ScoreContext) -> dict[str, Floats]:
    """Sum of points; the sign is turned, so that the best has the lowest."""
    match = _match_share(columns, context)
    requests = _requests(columns)
    memory = np.minimum(1.0, columns[FeatureColumn.MEMORY])
    spread = requests.max() - requests.min()
    evenness = (requests.max() - requests) / spread if spread else np.ones_like(requests)
    return {
        "prefix": -PREFIX_POINTS * match,
        "load": -LOAD_POINTS * evenness,
        "memory": -MEMORY_POINTS * (1 - memory),
    }


SCORERS: Final[dict[str, Callable[[Floats, ScoreContext], dict[str, Floats]]]] = {
    "least-load": least_load,
    "prefix-load": prefix_load,
    "round-robin": round_robin,
    "session": session,
    "weighted": weighted,
}
