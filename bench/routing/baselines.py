"""Scorers of other routers in use, which benchmarks compare with policy `cost`.

prefix-load   the longest prefix, unless loads are uneven: thresholds of routers that default to it
weighted      a sum of points for prefix, load and free KV cache

Importing this module adds them to the policies of the core; `other_router` makes the policy.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from kvstore.routing.costs import TRUST_FACTORS
from kvstore.routing.decide import SCORERS, requests_in_flight
from kvstore.routing.features import Case, FeatureColumn
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.rows import Floats

PREFIX_POINTS, LOAD_POINTS, MEMORY_POINTS = 100.0, 50.0, 30.0
"""`weighted`: for a whole prefix, an idle worker, an empty KV cache."""
_IMBALANCE, _IMBALANCE_FACTOR, _MATCH_SHARE = 64, 1.5, 0.3
"""`prefix-load`: loads are uneven from here; shorter prefixes do not count."""


def _match_share(columns: Floats, case: Case) -> Floats:
    """Share of the prompt in any tier of the worker, by trust."""
    longest = columns[FeatureColumn.HBM : FeatureColumn.FILE + 1].max(axis=0)
    trust = TRUST_FACTORS[columns[FeatureColumn.TRUST].astype(np.intp)]
    return np.asarray(longest * trust / max(1, case.prompt_tokens))


def prefix_load(columns: Floats, case: Case) -> dict[str, Floats]:
    """Longest prefix, if it is a good share of the prompt and loads are even; else least load."""
    requests = requests_in_flight(columns)
    spread, top = requests.max() - requests.min(), requests.max()
    is_uneven = spread > _IMBALANCE and top > _IMBALANCE_FACTOR * requests.min()
    match = _match_share(columns, case)
    if is_uneven or match.max() <= _MATCH_SHARE:
        return {"requests": requests}
    return {"prefix": -match * 1e6, "requests": requests}


def weighted(columns: Floats, case: Case) -> dict[str, Floats]:
    """Sum of points; the sign is turned, so that the best has the lowest."""
    match = _match_share(columns, case)
    requests = requests_in_flight(columns)
    memory = np.minimum(1.0, columns[FeatureColumn.MEMORY])
    spread = requests.max() - requests.min()
    evenness = (requests.max() - requests) / spread if spread else np.ones_like(requests)
    return {
        "prefix": -PREFIX_POINTS * match,
        "load": -LOAD_POINTS * evenness,
        "memory": -MEMORY_POINTS * (1 - memory),
    }


SCORERS.update({"prefix-load": prefix_load, "weighted": weighted})


def other_router(name: Literal["prefix-load", "weighted"]) -> RoutingPolicy:
    """A policy that policy files cannot name."""
    return msgspec.structs.replace(RoutingPolicy(), policy=name)
