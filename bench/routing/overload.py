"""Overload: all classes of service at 1.5 × what the engines can do, with and without the core's
classes. Low sharing, so that capacity is a plain number of tokens a second."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from bench.routing.drive import CoreChooser, run
from bench.routing.engine import EngineModel, Job
from bench.routing.traces import RouterTrace, low_sharing
from kvstore.routing.policy import PolicyCosts, RoutingPolicy, ServiceClass
from tests.kit.routing_check import check

WORKERS: Final = 4
SHARES: Final = {"inline": 0.25, "interactive": 0.25, "tolerant": 0.25, "batch": 0.25}
OBJECTIVE_S: Final = 1.0
FACTOR: Final = 1.5


def trace(model: EngineModel, seed: int, *, requests: int) -> RouterTrace:
    """Prompts of low sharing at `FACTOR` times the prefill that the engines can do."""
    base = low_sharing(seed, requests=requests, rate=1.0)
    work_s = sum(
        job.prompt_tokens
        / model.tokens_per_s
        * (1 + job.prompt_tokens / 2 / model.attention_tokens)
        + -(-job.prompt_tokens // model.chunk_tokens) * model.step_s
        for job in base.jobs
    )
    fast = base.at_speed(FACTOR * base.jobs[-1].arrival_s * WORKERS / work_s)
    names = np.random.default_rng(seed).choice(list(SHARES), size=requests, p=list(SHARES.values()))
    jobs = tuple(
        msgspec.structs.replace(
            job,
            # A prompt whose compute alone breaks the objective is no inline one.
            service="tolerant" if name == "inline" and job.prompt_tokens > 8192 else str(name),
            tenant=f"t{job.number % 5}",
        )
        for job, name in zip(fast.jobs, names, strict=True)
    )
    return RouterTrace("overload", jobs)


def within(jobs: list[Job], service: str) -> float:
    """Share of the requests of a class that were served within the objective of inline."""
    its = [job for job in jobs if job.service == service]
    good = sum(job.status == 200 and job.ttft_s <= OBJECTIVE_S for job in its)
    return round(good / len(its), 4)


def overload(model: EngineModel, costs: PolicyCosts, *, requests: int = 2000) -> dict[str, Any]:
    """Shares within the objective, by class, with classes and without."""
    its = trace(model, 1, requests=requests)
    default = RoutingPolicy().classes  # inline is for tenants that the policy names
    for_all = {n: msgspec.structs.replace(c, tenants=("*",)) for n, c in default.items()}
    one = {"one": ServiceClass(rank=0, queue_max=100_000, ttl_s=1e5)}
    policies = {
        "with_classes": RoutingPolicy(costs=costs, classes=for_all),
        "without": RoutingPolicy(costs=costs, classes=one, default_class="one"),
    }
    result: dict[str, Any] = {}
    for name, policy in policies.items():
        chooser = CoreChooser(policy, model, WORKERS, seed=1)
        jobs = run(its, chooser, model, workers=WORKERS)
        check(chooser.core)
        result[name] = {service: within(jobs, service) for service in SHARES}
        result[name]["rejected"] = sum(job.status != 200 for job in jobs)
        print("overload", name, result[name], flush=True)
    return result
