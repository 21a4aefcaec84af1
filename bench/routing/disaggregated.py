"""Prefill and decode on engines of their own beside engines that do both: goodput an engine.

Goodput: the highest rate at which 90 % of the requests have TTFT ≤ 2 s and ITL ≤ 10 ms, found by
bisection. Both sides choose their best set-up: chunk sizes for engines that do both, the number of
prefillers for the split. Low sharing, so that caches do not matter.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bench.routing.drive import CoreChooser, figures, run
from bench.routing.engine import EngineModel
from bench.routing.traces import low_sharing
from kvstore.routing.policy import PolicyCosts, RoutingPolicy
from tests.kit.routing_check import check

ENGINES: Final = 4
TTFT_S, ITL_S, SHARE = 2.0, 0.010, 0.9
CHUNKS: Final = (512, 1024, 2048)
PREFILLERS: Final = (1, 2)


def attained(
    model: EngineModel, costs: PolicyCosts, *, rate: float, prefillers: int, requests: int
) -> float:
    """Share of requests within both objectives."""
    its = low_sharing(3, requests=requests, rate=rate)
    policy = RoutingPolicy(policy="cost", costs=costs)
    chooser = CoreChooser(policy, model, ENGINES, seed=1, prefillers=prefillers)
    jobs = run(its, chooser, model, workers=ENGINES)
    check(chooser.core)
    share: float = figures(jobs, ttft_s=TTFT_S, itl_s=ITL_S)["goodput"]
    return share


def highest(
    model: EngineModel, costs: PolicyCosts, *, prefillers: int, requests: int, rounds: int
) -> float:
    """Requests a second and engine."""
    low, high = 0.25, 64.0
    for _ in range(rounds):
        middle = (low * high) ** 0.5
        is_good = (
            attained(model, costs, rate=middle, prefillers=prefillers, requests=requests) >= SHARE
        )
        low, high = (middle, high) if is_good else (low, middle)
    return round(low / ENGINES, 3)


def disaggregated(
    model: EngineModel, costs: PolicyCosts, *, requests: int = 600, rounds: int = 7
) -> dict[str, Any]:
    """Both sides, by set-up, and the gain of the best split over the best without."""
    both = {
        chunk: highest(
            msgspec.structs.replace(model, chunk_tokens=chunk),
            costs,
            prefillers=0,
            requests=requests,
            rounds=rounds,
        )
        for chunk in CHUNKS
    }
    split = {
        number: highest(model, costs, prefillers=number, requests=requests, rounds=rounds)
        for number in PREFILLERS
    }
    result = {
        "together_per_s_by_chunk": both,
        "split_per_s_by_prefillers": split,
        "gain": round(max(split.values()) / max(both.values()), 2),
    }
    print("disaggregated", result, flush=True)
    return result
