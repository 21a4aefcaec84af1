"""Workers of the router: addresses, what is known of their engines, requests under way there.

    discovery ─▶ replace ─▶ Joined, WorkerLeft            probes, parity ─▶ describe, judge ─▶ core
    core ─▶ StateChange ─▶ `changed`: word, log           core ─▶ AbandonWorker ─▶ `give_up`

Health is judged by the core (`kvstore.routing.workers.health`); here is its last word, for pages
and for those who choose an engine to ask something.

Covers: state on one loop. Does not cover: probes themselves (`probes`), where workers come from
(`discovery`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from yarl import URL

from kvstore.routing.events import AbandonWorker, Joined, Judged, RouteEvent, WorkerLeft
from kvstore.routing.values import WorkerRole, WorkerSpec, WorkerWord
from kvstore.routing.workers.rows import StateChange

WORKERS_MAX: Final = 1024
UNASKED: Final = "its weights are not known yet"
SERVING: Final = (WorkerWord.UP, WorkerWord.LATE, WorkerWord.HALF_OPEN, WorkerWord.OPEN)
"""Words of workers whose engine has answered, and that get requests."""

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
    is_terminating: bool = False
    """Its pod is; the worker stays the same one."""


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
        self.word = WorkerWord.NEW
        """The core's, with its reason."""
        self.why = ""
        self.heard_s = 0.0
        """When a byte of a response came from it last, on the clock of the loop."""
        self.probe_due_s = self.models_due_s = 0.0
        """When it is probed next, and asked for its models."""
        self.probe_count = 0
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
        self.unread_count = 0
        """Failed reads of its metrics in a row."""
        self.probe_s = 0.0
        """Duration of the last answer to a probe."""
        self.has_served = False
        """A request has ended there: some engines publish nothing before."""
        self.models: tuple[str, ...] = address.models
        self.contexts: dict[str, int] = {}
        """Model → longest prompt with its output."""
        self.adapters: dict[str, WorkerAdapter] = {}
        """By name."""
        self.renders_after_s = 0.0
        """When it may render again: it was late, or does not serve that."""
        self.render_pause_s = 0.0
        self.unrendered = ""
        """Why it tokenizes no prompts; empty: it does, or was not asked."""
        self.token_troubles: dict[str, str] = {}
        """Model → how its tokens differ from those of a tokenizer here; empty: they do not."""
        self.block_tokens = address.block_tokens
        self.memory_tokens = 0
        self.source: dict[str, Any] | None = None
        """Parameters of remote prefills common to its requests, from its last answer to one."""
        self.attempts: set[Callable[[], None]] = set()
        """Requests under way: each ends one, unless its response has begun."""
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
            context_tokens=self.contexts,
            is_terminating=a.is_terminating,
        )

    @property
    def is_answering(self) -> bool:
        """Whether its engine has answered its last probe."""
        return self.word in (*SERVING, WorkerWord.DRAINING)

    @property
    def takes_requests(self) -> bool:
        """Whether the core sends it requests, be it as the last resort."""
        is_last = self.word is WorkerWord.DRAINING and self.address.is_terminating
        return is_last or self.word in SERVING

    @property
    def serves_requests(self) -> bool:
        """Whole ones, or their decode leg: false for a prefiller."""
        return self.address.role != WorkerRole.PREFILL

    def serves(self, model: str) -> bool:
        """Whether requests may name it so; a worker whose models are not known serves any."""
        return not self.models or model in self.models or model in self.adapters

    @property
    def state(self) -> str:
        """One word for pages: that of the core, or load-only."""
        is_plain = self.word in (WorkerWord.UP, WorkerWord.LATE)
        return "load-only" if is_plain and self.parity else self.word.value


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
        self.read_again: Callable[[], Awaitable[None]] = _not_read
        """Read the models of all engines now (`probes`)."""

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
        is_fit = any(each.serves_requests and each.takes_requests for each in self)
        return is_fit and self.serve_a_model

    def replace(self, found: Iterable[WorkerAddress]) -> list[Worker]:
        """The workers that there are now, by discovery; those that are new. An address that changed
        is a new worker. One that left finishes what it has."""
        wanted = {each.name: each for each in list(found)[:WORKERS_MAX]}
        for worker in self:
            now, before = wanted.get(worker.name), worker.address
            if now == before:
                continue
            if now == msgspec.structs.replace(before, is_terminating=not before.is_terminating):
                worker.address = now
                self.describe(worker)
            else:
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
        """Whether its keys are used, to the core."""
        self.version += 1
        self._note(Judged(worker.name, is_parity_red=bool(worker.parity)))

    # ── from the core ────────────────────────────────────────────────────────────────────────────

    def changed(self, change: StateChange) -> None:
        """Another word for a worker."""
        worker = self._workers.get(change.worker)
        if worker is None:
            return
        before, worker.word, worker.why = worker.word, change.word, change.why
        if before is change.word:
            return
        self.version += 1
        if change.word is WorkerWord.DOWN:
            worker.renders_after_s = worker.render_pause_s = 0.0  # what comes back may be another
            worker.unrendered = ""
            worker.token_troubles.clear()
            _log.warning("worker %s is down: %s", worker.name, change.why)
        elif change.word is WorkerWord.OPEN and before is not WorkerWord.HALF_OPEN:
            _log.warning("worker %s: breaker open after %s", worker.name, change.why)
        elif change.word is WorkerWord.DRAINING:
            _log.info("worker %s drains: it gets no new requests", worker.name)
        elif change.word is WorkerWord.UP and before is not WorkerWord.LATE:
            _log.info("worker %s is up", worker.name)

    def give_up(self, command: AbandonWorker) -> None:
        """End attempts that wait for the first byte of a worker."""
        worker = self._workers.get(command.worker)
        for give_up in list(worker.attempts) if worker is not None else ():
            give_up()


async def _not_read() -> None:
    return
