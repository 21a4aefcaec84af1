"""Workers of the router: addresses, own counts, breakers; findings about them go to the core.

    discovery ─▶ replace ─▶ Joined, WorkerLeft            probes ─▶ health ─▶ Judged
    attempts  ─▶ succeeded, failed, neutral ─▶ breaker ─▶ Judged

A worker is down when its probes fail, or when its breaker is open. After the cool-down one request
is let through (half open): at its start the worker is down again, until it ended well. A 4xx
neither opens nor closes a breaker, and it frees the probe.

When a worker goes down, requests that wait for its first byte give it up and go elsewhere.

Covers: state on one loop. Does not cover: probes themselves (`probes`), where workers come from
(`discovery`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec
from yarl import URL

from kvstore.breaker import Breaker, BreakerState
from kvstore.routing.events import Joined, Judged, RouteEvent, WorkerLeft
from kvstore.routing.values import WorkerHealth, WorkerRole, WorkerSpec

FAILURES_MAX: Final = 3
COOLDOWN_MS: Final = 1000
PROBE_PATIENCE_MS: Final = 30_000
WORKERS_MAX: Final = 1024
UNASKED: Final = "its weights are not known yet"

_log = logging.getLogger(__name__)


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as its source describes it."""

    name: str
    url: str
    kind: str = "vllm"
    """Kind of engine: a row of `kinds.ENGINES`."""
    pool: str = "default"
    node: str = ""
    engine: str = ""
    tenant: str = ""
    space: str = ""
    """Hex; empty: from the registry of the index."""
    block_tokens: int = 0
    """0: as its metrics say."""
    hash_seed: str = "vllm-none-hash"
    models: tuple[str, ...] = ()
    role: str = "both"
    rank: int = 0


class WaitLimit(Protocol):
    """A time limit: `asyncio.Timeout`, or what an attempt has in its place."""

    def reschedule(self, when: float, /) -> None: ...


class WorkerAdapter:
    """A LoRA adapter that an engine lists. Its keys are made with the digest of its weights, which
    the engine says; nobody asks for that of an adapter without requests."""

    def __init__(self, base: str, path: str) -> None:
        self.base, self.path = base, path
        self.digest = b""
        self.trouble = UNASKED
        """Why requests for it are routed here by load; empty: its keys are equal, here …"""
        self.other = ""
        """… but not with those of most engines."""
        self.is_wanted = False
        self.due_s = 0.0
        self.drift = 0.0
        self.drift_count = 0


class Worker:
    """One worker and its state."""

    def __init__(self, address: WorkerAddress) -> None:
        self.address = address
        self.name = address.name
        self.url = URL(address.url)
        self.breaker = Breaker(
            failures_max=FAILURES_MAX, cooldown_ms=COOLDOWN_MS, patience_ms=PROBE_PATIENCE_MS
        )
        self.is_answering = True
        """By its probes: begins as true, so that a router without probes yet routes."""
        self.was_reached = False
        """Its engine has answered a probe or a request."""
        self.trouble = ""
        self.parity = ""
        """Why its keys are not used; empty: they are equal, or it has no node."""
        self.has_parity = False
        """Its keys were compared, and are equal."""
        self.drift = 0.0
        """Mean share of predicted cached tokens that its engine did not have …"""
        self.drift_count = 0
        """… over so many requests."""
        self.unread = ""
        """Why its own load is not known; empty: it is, or its kind publishes none."""
        self.models: tuple[str, ...] = address.models
        self.adapters: dict[str, WorkerAdapter] = {}
        """By name."""
        self.renders = True
        """Until it said that it does not."""
        self.block_tokens = address.block_tokens
        self.memory_tokens = 0
        self.waits: set[WaitLimit] = set()
        """Time-outs of attempts without a first byte."""
        self.in_flight = 0
        self.request_count = 0
        self.failure_count = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.cached_tokens = 0

    def spec(self) -> WorkerSpec:
        """As the core sees it."""
        a = self.address
        return WorkerSpec(
            worker=self.name,
            address=self.url.authority,
            pool=a.pool,
            models=self.models,
            adapters=tuple(self.adapters),
            role=WorkerRole(a.role),
            node=a.node,
            engine=a.engine,
            rank=a.rank,
            memory_tokens=self.memory_tokens,
        )

    @property
    def serves_requests(self) -> bool:
        """Whole ones, or their decode leg: false for a prefiller."""
        return self.address.role != WorkerRole.PREFILL

    def serves(self, model: str) -> bool:
        """Whether requests may name it so; a worker whose models are not known serves any."""
        return not self.models or model in self.models or model in self.adapters

    @property
    def state(self) -> str:
        """One word for pages: new, up, down, open, half-open, load-only."""
        if self.breaker.state is not BreakerState.CLOSED:
            return str(self.breaker.state.value)
        if not self.is_answering:
            return "down"
        if not self.was_reached:
            return "new"
        return "load-only" if self.parity else "up"


class Workers:
    """All of them, by name."""

    def __init__(self, note: Callable[[RouteEvent], None]) -> None:
        """`note`: takes events for the core."""
        self._note = note
        self._workers: dict[str, Worker] = {}
        self.version = 0
        """Counts changes of descriptions and of parity."""
        self.serve_a_model = True
        """Whether they serve one of the policy."""

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def take_requests(self) -> bool:
        """Whether one of them does, as far as is known: one that was never reached does not count,
        though requests may go there."""
        fit = ("up", "load-only", "half-open")
        is_fit = any(each.serves_requests and each.state in fit for each in self)
        return is_fit and self.serve_a_model

    def replace(self, found: Iterable[WorkerAddress]) -> list[Worker]:
        """The workers that there are now, by discovery; those that are new. An address that changed
        is a new worker. One that left finishes what it has."""
        wanted = {each.name: each for each in list(found)[:WORKERS_MAX]}
        for worker in self:
            if wanted.get(worker.name) != worker.address:
                del self._workers[worker.name]
                self.version += 1
                self._note(WorkerLeft(worker.name))
                _log.info("worker %s at %s left", worker.name, worker.url)
        added = [Worker(each) for name, each in wanted.items() if name not in self._workers]
        for worker in added:
            self._workers[worker.name] = worker
            self.describe(worker)
            _log.info("worker %s at %s is new, and not reached yet", worker.name, worker.url)
        return added

    def compared(self, adapter: WorkerAdapter, trouble: str) -> None:
        """A result about the keys of an adapter. `trouble`: why they are not used."""
        adapter.trouble, adapter.drift, adapter.drift_count = trouble, 0.0, 0
        self.version += 1

    def describe(self, worker: Worker) -> None:
        """Its description, new or changed, to the core."""
        self._note(Joined(worker.spec()))
        self.judge(worker)

    def judge(self, worker: Worker) -> None:
        """Its health, to the core."""
        self.version += 1
        is_up = worker.is_answering and not worker.breaker.is_open
        if not worker.is_answering:
            self._give_up_waits(worker)
        self._note(
            Judged(
                worker.name,
                WorkerHealth.UP if is_up else WorkerHealth.DOWN,
                is_parity_red=bool(worker.parity),
                reason=worker.trouble or worker.parity,
            )
        )

    @staticmethod
    def _give_up_waits(worker: Worker) -> None:
        now_s = asyncio.get_running_loop().time()
        for wait in worker.waits:
            wait.reschedule(now_s)

    # ── results of probes and attempts ───────────────────────────────────────────────────────────

    def answered(self, worker: Worker, trouble: str) -> None:
        """A probe's result. `trouble`: why it failed; empty: it did not."""
        was_answering, worker.is_answering = worker.is_answering, not trouble
        if trouble or not worker.breaker.is_open:  # whose reason is that of its requests
            worker.trouble = trouble
        is_first, worker.was_reached = not worker.was_reached, worker.was_reached or not trouble
        if was_answering != worker.is_answering:
            _log.warning("worker %s %s", worker.name, f"is down: {trouble}" if trouble else "is up")
            self.judge(worker)
        elif is_first and not trouble:
            _log.info("worker %s is up", worker.name)

    def begun(self, worker: Worker) -> None:
        """A request goes to it; the probe of an open breaker closes the door behind itself."""
        worker.in_flight += 1
        worker.request_count += 1
        if worker.breaker.is_open:
            self.judge(worker)

    def ended(self, worker: Worker) -> None:
        worker.in_flight -= 1

    def succeeded(self, worker: Worker) -> None:
        worker.was_reached = True
        if worker.breaker.succeeded():
            worker.trouble = ""
            _log.info("worker %s: breaker closed", worker.name)
            self.judge(worker)

    def neutral(self, worker: Worker) -> None:
        """Neither: a 4xx, or the client left."""
        worker.breaker.unused()

    def failed(self, worker: Worker, why: str) -> None:
        worker.failure_count += 1
        if worker.breaker.failed(time.monotonic_ns()):
            worker.trouble = why
            _log.warning("worker %s: breaker open after %s", worker.name, why)
            self.judge(worker)

    def half_open(self) -> None:
        """Let one request through to each worker whose cool-down is over. Called regularly."""
        for worker in self:
            if worker.breaker.is_open and worker.breaker.allows(time.monotonic_ns()):
                self._note(Judged(worker.name, WorkerHealth.UP, reason="half-open"))
