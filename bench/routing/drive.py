"""Runs a trace through simulated engines under a router, and measures.

    trace ─▶ Chooser (ours by `RouterCore`, or another) ─▶ engines ─▶ TTFT, ITL, goodput

The index is exact and up to date: it shows what each engine's cache holds at that moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from bench.routing.engine import BLOCK_TOKENS, EngineModel, Job, SimulatedEngine
from bench.routing.traces import RouterTrace
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    FirstToken,
    Joined,
    Rejected,
    RequestEnded,
    Routed,
    RouteEvent,
    RouteTick,
)
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import (
    PrefixAnswer,
    PrefixMatch,
    PrefixTrust,
    RouteRequest,
    WorkerSpec,
)
from kvstore.units import NS_PER_S

TTFT_S: Final = 2.0
ITL_S: Final = 0.025
TICK_S: Final = 0.05


class Chooser(Protocol):
    """A router in the simulation. Each verb returns (job, worker) pairs to send now; worker −1:
    rejected."""

    def arrived(
        self, job: Job, engines: Sequence[SimulatedEngine], now_s: float
    ) -> list[tuple[int, int]]: ...
    def first_token(self, job: Job, now_s: float) -> list[tuple[int, int]]: ...
    def ended(self, job: Job, now_s: float) -> list[tuple[int, int]]: ...
    def tick(self, now_s: float) -> list[tuple[int, int]]: ...
    @property
    def holds(self) -> bool: ...


class CoreChooser:
    """The product's core, under any of its policies."""

    def __init__(
        self, policy: RoutingPolicy, model: EngineModel, workers: int, *, seed: int
    ) -> None:
        self.core = RouterCore(policy, seed=seed)
        self._has_dram = model.dram_blocks > 0
        for number in range(workers):
            spec = WorkerSpec(
                worker=f"w{number}",
                address=f"w{number}",
                pool="pool",
                node=f"n{number}",
                engine="e",
                memory_tokens=model.cache_blocks * BLOCK_TOKENS,
            )
            self.core.step(Joined(spec), 0)

    @property
    def holds(self) -> bool:
        return len(self.core.room) > 0

    def _step(self, event: RouteEvent, now_s: float) -> list[tuple[int, int]]:
        sent = []
        for command in self.core.step(event, int(now_s * NS_PER_S)):
            if isinstance(command, Routed):
                sent.append((int(command.request_id), int(command.worker[1:])))
            elif isinstance(command, Rejected):
                sent.append((int(command.request_id), -1))
        return sent

    def arrived(
        self, job: Job, engines: Sequence[SimulatedEngine], now_s: float
    ) -> list[tuple[int, int]]:
        matches = []
        for number, engine in enumerate(engines):
            if hits := engine.hit_blocks(job.blocks):
                matches.append(PrefixMatch(f"n{number}", "e", 0, hits))
            if self._has_dram and (hits := engine.dram_hits(job.blocks)):
                matches.append(PrefixMatch(f"n{number}", "", 0, 0, hits))
        request = RouteRequest(
            request_id=str(job.number),
            model="m",
            prompt_tokens=job.prompt_tokens,
            keys=b"".join(block.to_bytes(8, "little") * 4 for block in job.blocks),
            block_tokens=BLOCK_TOKENS,
            output_tokens_max=256,
            session=job.session,
            tenant=job.tenant,
            service=job.service,
        )
        return self._step(Arrived(request, PrefixAnswer(PrefixTrust.EXACT, tuple(matches))), now_s)

    def first_token(self, job: Job, now_s: float) -> list[tuple[int, int]]:
        return self._step(FirstToken(str(job.number)), now_s)

    def ended(self, job: Job, now_s: float) -> list[tuple[int, int]]:
        done = RequestEnded(str(job.number), Ending.DONE, job.cached_tokens, job.output_tokens)
        return self._step(done, now_s)

    def tick(self, now_s: float) -> list[tuple[int, int]]:
        return self._step(RouteTick(), now_s)


def run(trace: RouterTrace, chooser: Chooser, model: EngineModel, *, workers: int) -> list[Job]:
    """All requests of a trace; returns them with their times."""
    engines = [SimulatedEngine(model) for _ in range(workers)]
    jobs = trace.fresh()
    queue: list[tuple[float, int, int, int]] = []
    """(time, order, engine, its version)"""
    order = 0

    def send(sent: list[tuple[int, int]], now_s: float) -> None:
        nonlocal order
        for number, worker in sent:
            job = jobs[number]
            job.worker = worker
            if worker < 0:
                job.status = 429
                continue
            engine = engines[worker]
            version = engine.version
            engine.submit(job, now_s)
            if engine.version != version:
                order += 1
                heapq.heappush(queue, (engine.until_s, order, worker, engine.version))

    at, tick_s = 0, 0.0
    while at < len(jobs) or queue:
        next_s = jobs[at].arrival_s if at < len(jobs) else float("inf")
        if chooser.holds and tick_s <= min(next_s, queue[0][0] if queue else float("inf")):
            send(chooser.tick(tick_s), tick_s)
            tick_s += TICK_S
            continue
        if not queue or next_s <= queue[0][0]:
            job = jobs[at]
            at += 1
            tick_s = max(tick_s, next_s + TICK_S)
            send(chooser.arrived(job, engines, next_s), next_s)
            continue
        now_s, _, worker, version = heapq.heappop(queue)
        engine = engines[worker]
        if engine.version != version:
            continue
        firsts, ends = engine.advance(now_s)
        if engine.is_busy:
            order += 1
            heapq.heappush(queue, (engine.until_s, order, worker, engine.version))
        tick_s = max(tick_s, now_s)
        for job in firsts:
            send(chooser.first_token(job, now_s), now_s)
        for job in ends:
            send(chooser.ended(job, now_s), now_s)
    for engine in engines:
        engine.check()
    return jobs


def figures(jobs: Sequence[Job]) -> dict[str, Any]:
    """Goodput and latencies; a rejected request is no good one and has no latency."""
    served = [job for job in jobs if job.status == 200]
    assert all(job.end_s >= 0 for job in served), "every request ends"
    ttft = np.array([job.ttft_s for job in served])
    itl = np.array([job.itl_s for job in served])
    good = int(((ttft <= TTFT_S) & (itl <= ITL_S)).sum())
    cached = sum(job.cached_tokens for job in served)
    return {
        "requests": len(jobs),
        "rejected": len(jobs) - len(served),
        "goodput": round(good / len(jobs), 4),
        "ttft_mean_s": round(float(ttft.mean()), 4),
        "ttft_p50_s": round(float(np.percentile(ttft, 50)), 4),
        "ttft_p95_s": round(float(np.percentile(ttft, 95)), 4),
        "ttft_p99_s": round(float(np.percentile(ttft, 99)), 4),
        "itl_mean_ms": round(float(itl.mean() * 1e3), 2),
        "itl_p99_ms": round(float(np.percentile(itl, 99) * 1e3), 2),
        "hit_tokens": round(cached / sum(job.prompt_tokens for job in served), 4),
    }
