"""Workers of the router: addresses, what is known of their engines, requests under way there.

    discovery ─▶ replace ─▶ Joined, WorkerLeft            probes, parity ─▶ describe ─▶ core
    core ─▶ StateChange ─▶ `changed`: word, log           core ─▶ AbandonWorker ─▶ `give_up`

Health is judged by the core (`kvstore.routing.rows`); here is its last word, for pages and for
those who choose an engine to ask something.

Covers: state on one loop; models of the policy that no worker serves. Does not cover: probes
themselves (`probes`), where workers come from (`discovery`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, Final

import msgspec
from yarl import URL

from kvstore.config.router import WorkerAddress
from kvstore.routing.events import AbandonWorker, Joined, RouteEvent, WorkerLeft
from kvstore.routing.policy import ModelPool, RoutingPolicy
from kvstore.routing.rows import StateChange
from kvstore.routing.values import WorkerFacts, WorkerRole, WorkerSpec, WorkerWord

WORKERS_MAX: Final = 1024
UNASKED: Final = "its weights are not known yet"
STRICT_KINDS: Final = frozenset({"vllm", "triton", "ollama"})
"""Kinds of engines that refuse names of models that they do not list."""
SERVING: Final = (WorkerWord.UP, WorkerWord.LATE, WorkerWord.HALF_OPEN, WorkerWord.OPEN)
"""States of workers whose engine has answered, and that get requests."""

_log = logging.getLogger(__name__)


class ComparedKeys:
    """Comparison of the router's keys with those of an engine: of its base models (`Worker`), or of
    an adapter.
    """

    def __init__(self, parity: str = "") -> None:
        self.parity = parity
        """Why the keys are not used, so that requests are routed by load; empty: they are equal, or
        the worker has no node.
        """
        self.has_parity = False
        """The keys were compared, and are equal to the router's."""
        self.compared_again_s = 0.0
        """When they are compared next, on the monotonic clock."""
        self.drift = 0.0
        """Mean share of predicted cached tokens that the engine did not have."""
        self.drift_count = 0
        """Number of requests in `drift`."""


class WorkerAdapter(ComparedKeys):
    """A LoRA adapter that an engine lists. Its keys include the digest of its weights, which the
    engine reports; only adapters with requests are asked for theirs.
    """

    def __init__(self, base: str, path: str) -> None:
        super().__init__(UNASKED)
        self.base, self.path = base, path
        self.digest = b""
        self.other = ""
        """Reason if its keys differ from those of most engines; else empty."""
        self.is_wanted = False


class Worker(ComparedKeys):
    """One worker and its state."""

    def __init__(self, address: WorkerAddress) -> None:
        super().__init__()
        self.address = address
        self.name = address.name
        self.url = URL(address.url)
        self.word = WorkerWord.NEW
        """State by the core; `why` is the reason for it."""
        self.why = ""
        self.heard_s = 0.0
        """When a byte of a response last came from it, on the clock of the loop."""
        self.probe_due_s = self.models_due_s = 0.0
        """When it is probed next, and when its models are read next, on the clock of the loop; 0:
        now.
        """
        self.probe_count = 0
        self.unread = ""
        """Why its own load is not known; empty: it is, or its kind publishes none."""
        self.unlisted = ""
        """Why its models are not known, so that it gets requests for any; empty: they are."""
        self.unread_count = 0
        """Failed reads of its metrics in a row."""
        self.probe_s = 0.0
        """Duration of the last probe that was answered, in seconds."""
        self.has_served = False
        """A request has ended there: before that, some engines publish no metrics."""
        self.models: tuple[str, ...] = address.models
        self.contexts: dict[str, int] = {}
        """Model → longest prompt with its output."""
        self.adapters: dict[str, WorkerAdapter] = {}
        """LoRA adapters by name."""
        self.renders_after_s = 0.0
        """Time from which it may render prompts again, after it was late or did not serve that."""
        self.render_pause_s = 0.0
        self.unrendered = ""
        """Why it tokenizes no prompts; empty: it does, or was not asked."""
        self.token_troubles: dict[str, str] = {}
        """Model → how its tokens differ from those of the local tokenizer; empty: they do not."""
        self.block_tokens = address.block_tokens
        self.memory_tokens = 0
        self.source: tuple[str, Any] | None = None
        """Its (node, engine) by the last answer to a remote prefill; None: not known."""
        self.attempts: set[Callable[[], None]] = set()
        """Functions that each end one request under way there, unless its response has begun."""
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.cached_tokens = 0

    def spec(self) -> WorkerSpec:
        """Description of the worker for the core."""
        a = self.address
        facts: dict[str, Any] = {name: getattr(a, name) for name in WorkerFacts.__struct_fields__}
        return WorkerSpec(
            worker=self.name,
            address=self.url.authority,
            takes_any_model=a.kind not in STRICT_KINDS,
            adapters=tuple(self.adapters),
            memory_tokens=self.memory_tokens,
            context_tokens=self.contexts,
            is_red=bool(self.parity),
            **facts | {"models": self.models},
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
        """Whether it serves whole requests, or their decode leg: false for a prefiller."""
        return self.address.role is not WorkerRole.PREFILL

    def serves(self, model: str) -> bool:
        """Whether requests may name this model or adapter there; true if its models are
        not known.
        """
        return not self.models or model in self.models or model in self.adapters

    @property
    def state(self) -> str:
        """State in one word for pages: the core's, or `load-only`."""
        is_plain = self.word in (WorkerWord.UP, WorkerWord.LATE)
        return "load-only" if is_plain and self.parity else self.word.value


class Workers:
    """All workers of the router, by name."""

    def __init__(self, note: Callable[[RouteEvent], None]) -> None:
        """`note`: takes events for the core."""
        self._note = note
        self._workers: dict[str, Worker] = {}
        self.get = self._workers.get
        """Worker of a name; None: there is none."""
        self.version = 0
        """Counts changes of workers, descriptions, parity and states."""
        self.serve_a_model = True
        """Whether the workers serve a model of the policy (`PoolWatch`)."""
        self.read_again: Callable[..., Awaitable[None]] = _not_read
        """Function that reads the models of all engines now (`Probes.read_again`)."""

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def take_requests(self) -> bool:
        """Whether a worker is known to take requests. One that was never reached does not count,
        though requests may go there.
        """
        is_fit = any(each.serves_requests and each.takes_requests for each in self)
        return is_fit and self.serve_a_model

    def by_load(self, in_flight: Callable[[str], int]) -> list[Worker]:
        """Workers for a request without a prompt: those that get requests first, then those that
        answer, each with the least busy ones first. `in_flight`: requests under way, by name.
        """
        able = [each for each in self if each.serves_requests]
        random.shuffle(able)
        return sorted(
            able, key=lambda w: (not w.takes_requests, not w.is_answering, in_flight(w.name))
        )

    def replace(self, found: Iterable[WorkerAddress]) -> list[Worker]:
        """Adopt the workers that discovery has now. Returns those that are new. An address that
        changed, in more than `is_terminating`, is a new worker. A worker that left finishes its
        requests.
        """
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

    def describe(self, worker: Worker) -> None:
        """Give the core a worker's new or changed description, of which its parity is a part;
        nothing if it has left.
        """
        if self._workers.get(worker.name) is worker:
            self.version += 1
            self._note(Joined(worker.spec()))

    # ── from the core ────────────────────────────────────────────────────────────────────────────

    def changed(self, change: StateChange) -> None:
        """A worker has another state by the core: keep it, and log it."""
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
        """End attempts at a silent worker that have no first byte yet."""
        worker = self._workers.get(command.worker)
        for give_up in list(worker.attempts) if worker is not None else ():
            give_up()


async def _not_read(*_: object, **__: object) -> None:
    return


# ── pools ─────────────────────────────────────────────────────────────────────────────────────────
# Models of the policy that no worker serves: their requests fail though every worker is up.
#
#     policy.models × workers ─▶ `faults` ─▶ PoolWatch ─▶ /healthz, readiness, the log
#
# A worker whose models are not known yet serves any. A pool without workers is no fault where the
# policy holds requests for one (`holds_without_workers`). The log names a fault when every worker
# has answered or failed, and again after a reload.


def faults(policy: RoutingPolicy, workers: Collection[Worker]) -> list[str]:
    """A sentence about each pool that gets requests of a model and does not serve it; empty: it
    does.
    """
    found = []
    for model, rule in policy.models.items():
        for pool in rule.pools or (ModelPool(pool=""),):  # without pools: sought in all
            crew = [w for w in workers if w.serves_requests and pool.pool in ("", w.address.pool)]
            if pool.weight:
                found.append(_fault(model, pool, crew, policy))
    return found


def _fault(model: str, pool: ModelPool, crew: Collection[Worker], policy: RoutingPolicy) -> str:
    name, served = pool.pool, pool.served or model
    if name and not crew and not policy.limits.holds_without_workers:
        return f"pool {name} of model {model} has no worker: add pool={name} to its workers"
    if not crew or any(served in worker.models or not worker.models for worker in crew):
        return ""
    serve = ", ".join(sorted({each for worker in crew for each in worker.models}))[:200]
    what = f"workers{' of pool ' * bool(name)}{name} serve {serve}, not {served}"
    return f"{what}: correct models.{model} of the policy, or the engines' --served-model-name"


class PoolWatch:
    """See above; `once` is repeated by its owner."""

    pause_s: Final = 0.5

    def __init__(self, policy: Callable[[], RoutingPolicy], workers: Workers) -> None:
        self._policy, self._workers = policy, workers
        self.notes: list[str] = []
        self.said: list[str] = []
        """Notes that are in the log already; cleared at a reload."""

    async def once(self) -> None:
        found = faults(self._policy(), list(self._workers))
        self._workers.serve_a_model = "" in found or not found
        self.notes = list(dict.fromkeys(filter(None, found)))
        states = {worker.state for worker in self._workers}
        if states and "new" not in states:
            for note in self.notes:
                if note not in self.said:
                    _log.warning("%s", note)
            self.said = self.notes
