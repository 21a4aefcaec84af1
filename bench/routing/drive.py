"""Runs a trace through simulated engines under a router, and measures.

    trace ─▶ Chooser (ours by `RouterCore`, or another) ─▶ engines ─▶ TTFT, ITL, goodput

The index is exact and up to date: it shows what each engine's cache holds at that moment. Engines
are probed once a second, as by the router's shell, whose own rules `bench.routing.shell` has.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np

from bench.routing.engine import BLOCK_TOKENS, EngineModel, Job, SimulatedEngine
from bench.routing.traces import RouterTrace
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    FirstToken,
    Joined,
    PrefillDone,
    Probed,
    Rejected,
    RequestEnded,
    Routed,
    RouteEvent,
    RouteTick,
    Scraped,
)
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import (
    LoadSample,
    PrefixAnswer,
    ProbeResult,
    RouteRequest,
    WorkerRole,
    WorkerSpec,
)
from kvstore.units import NS_PER_S

TTFT_S: Final = 2.0
ITL_S: Final = 0.025
TICK_S: Final = 0.05
PROBE_S: Final = 1.0
OUTPUT_TOKENS_MAX: Final = 8192
"""Limit that clients give, whatever their answers have."""


class Sending(NamedTuple):
    """A job to send now. Worker −1: rejected. Prefiller −1: local prefill."""

    job: int
    worker: int
    prefiller: int = -1


class Chooser(Protocol):
    """A router in the simulation."""

    def arrived(
        self, job: Job, engines: Sequence[SimulatedEngine], now_s: float
    ) -> list[Sending]: ...
    def prefill_done(self, job: Job, now_s: float) -> list[Sending]: ...

    def first_token(self, job: Job, now_s: float) -> list[Sending]: ...
    def ended(self, job: Job, now_s: float) -> list[Sending]: ...
    def tick(self, now_s: float) -> list[Sending]: ...
    def probe(self, engines: Sequence[SimulatedEngine], now_s: float) -> list[Sending]: ...
    @property
    def holds(self) -> bool: ...


class CoreChooser:
    """The product's core, under any of its policies."""

    def __init__(
        self,
        policy: RoutingPolicy,
        model: EngineModel,
        workers: int,
        *,
        seed: int,
        prefillers: int | None = 0,
    ) -> None:
        """`prefillers` None: the planner decides."""
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
                role=_role(number, prefillers),
            )
            self.core.step(Joined(spec), 0)

    @property
    def holds(self) -> bool:
        return bool(self.core.room.entries)

    def _step(self, event: RouteEvent, now_s: float) -> list[Sending]:
        sent = []
        for command in self.core.step(event, int(now_s * NS_PER_S)):
            if isinstance(command, Routed):
                prefiller = int((command.prefill_worker or "w-1")[1:])
                sent.append(Sending(int(command.request_id), int(command.worker[1:]), prefiller))
            elif isinstance(command, Rejected):
                sent.append(Sending(int(command.request_id), -1))
        return sent

    def arrived(self, job: Job, engines: Sequence[SimulatedEngine], now_s: float) -> list[Sending]:
        matches = []
        for number, engine in enumerate(engines):
            if hits := engine.hit_blocks(job.blocks):
                matches.append(Match(Holder(f"n{number}", "e"), hits))
            if self._has_dram and (hits := engine.dram_hits(job.blocks)):
                matches.append(Match(Holder(f"n{number}"), 0, hits))
        request = RouteRequest(
            request_id=str(job.number),
            model="m",
            prompt_tokens=job.prompt_tokens,
            keys=b"".join(block.to_bytes(8, "little") * 4 for block in job.blocks),
            block_tokens=BLOCK_TOKENS,
            answer=PrefixAnswer(Trust.EXACT, matches),
            output_tokens_max=OUTPUT_TOKENS_MAX,
            session=job.session,
            tenant=job.tenant,
            service=job.service,
        )
        return self._step(Arrived(request), now_s)

    def prefill_done(self, job: Job, now_s: float) -> list[Sending]:
        return self._step(PrefillDone(str(job.number)), now_s)

    def first_token(self, job: Job, now_s: float) -> list[Sending]:
        return self._step(FirstToken(str(job.number)), now_s)

    def ended(self, job: Job, now_s: float) -> list[Sending]:
        done = RequestEnded(str(job.number), Ending.DONE, job.cached_tokens, job.output_tokens)
        return self._step(done, now_s)

    def tick(self, now_s: float) -> list[Sending]:
        return self._step(RouteTick(), now_s)

    def probe(self, engines: Sequence[SimulatedEngine], now_s: float) -> list[Sending]:
        sent = []
        for number, engine in enumerate(engines):
            name = f"w{number}"
            sample = LoadSample(
                waiting=len(engine.waiting), running=engine.running, memory_used=engine.used_share
            )
            sent += self._step(Probed(name, ProbeResult.ANSWERED), now_s)
            sent += self._step(Scraped(name, sample, int(now_s * NS_PER_S)), now_s)
        return sent


def _role(number: int, prefillers: int | None) -> WorkerRole:
    if prefillers is None:
        return WorkerRole.ANY
    if not prefillers:
        return WorkerRole.BOTH
    return WorkerRole.PREFILL if number < prefillers else WorkerRole.DECODE


class Simulation:
    """Engines, their steps in the order of time, and transfers between them."""

    def __init__(
        self, trace: RouterTrace, chooser: Chooser, model: EngineModel, workers: int
    ) -> None:
        self.engines = [SimulatedEngine(model) for _ in range(workers)]
        self.jobs = trace.fresh()
        self._chooser = chooser
        self._model = model
        self._queue: list[tuple[float, int, int, int]] = []
        """(time, order, engine, its version); engine −1: the job `version` reaches its decoder."""
        self._order = 0

    def run(self) -> None:
        """All requests, to their end."""
        at, tick_s, probe_s, queue = 0, 0.0, 0.0, self._queue
        while at < len(self.jobs) or queue:
            next_s = self.jobs[at].arrival_s if at < len(self.jobs) else float("inf")
            event_s = queue[0][0] if queue else float("inf")
            if probe_s <= min(next_s, event_s):
                self._send(self._chooser.probe(self.engines, probe_s), probe_s)
                probe_s += PROBE_S
            elif self._chooser.holds and tick_s <= min(next_s, event_s):
                self._send(self._chooser.tick(tick_s), tick_s)
                tick_s += TICK_S
            elif next_s <= event_s:
                tick_s = max(tick_s, next_s + TICK_S)
                self._send(self._chooser.arrived(self.jobs[at], self.engines, next_s), next_s)
                at += 1
            else:
                tick_s = max(tick_s, event_s)
                self._event(*heapq.heappop(queue))
        for engine in self.engines:
            engine.check()

    def _push(self, at_s: float, worker: int, version: int) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at_s, self._order, worker, version))

    def _submit(self, job: Job, worker: int, now_s: float) -> None:
        engine = self.engines[worker]
        version = engine.version
        engine.submit(job, now_s)
        if engine.version != version:
            self._push(engine.until_s, worker, engine.version)

    def _send(self, sendings: list[Sending], now_s: float) -> None:
        for number, worker, prefiller in sendings:
            job = self.jobs[number]
            job.worker = worker
            if worker < 0:
                job.status = 429
            elif prefiller < 0:
                self._submit(job, worker, now_s)
            else:
                leg = msgspec.structs.replace(job, output_tokens=1, parent=job)
                self._submit(leg, prefiller, now_s)

    def _event(self, now_s: float, _order: int, worker: int, version: int) -> None:
        if worker < 0:
            job = self.jobs[version]
            self._submit(job, job.worker, now_s)
            return
        engine = self.engines[worker]
        if engine.version != version:
            return
        firsts, ends = engine.advance(now_s)
        if engine.is_busy:
            self._push(engine.until_s, worker, engine.version)
        for job in firsts:
            if job.parent is None:
                self._send(self._chooser.first_token(job, now_s), now_s)
        for job in ends:
            if job.parent is None:
                self._send(self._chooser.ended(job, now_s), now_s)
            else:
                self._transfer(job.parent, now_s)

    def _transfer(self, job: Job, now_s: float) -> None:
        """Its KV goes to the decoder; pushed while it was computed, so the last chunk counts."""
        model = self._model
        job.arrived_tokens = job.prompt_tokens - 1
        last = min(job.prompt_tokens, model.chunk_tokens)
        self._push(now_s + model.link_s + last / model.link_tokens_per_s, -1, job.number)
        self._send(self._chooser.prefill_done(job, now_s), now_s)


def run(trace: RouterTrace, chooser: Chooser, model: EngineModel, *, workers: int) -> list[Job]:
    """All requests of a trace; returns them with their times."""
    simulation = Simulation(trace, chooser, model, workers)
    simulation.run()
    return simulation.jobs


def figures(jobs: Sequence[Job], *, ttft_s: float = TTFT_S, itl_s: float = ITL_S) -> dict[str, Any]:
    """Goodput and latencies; a rejected request is no good one and has no latency."""
    served = [job for job in jobs if job.status == 200]
    assert all(job.end_s >= 0 for job in served), "every request ends"
    ttft = np.array([job.ttft_s for job in served])
    itl = np.array([job.itl_s for job in served])
    good = int(((ttft <= ttft_s) & (itl <= itl_s)).sum())
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


def mean_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean of each figure over several runs of as many requests."""
    return {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in rows[0]}
