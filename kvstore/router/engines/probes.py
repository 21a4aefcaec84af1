"""Probes of engines: their metrics page shows that they live, and their load; models served.

    every period: GET metrics, or where there is none health ─▶ Probed(answered), Scraped
                  of a worker in trouble both
                  nothing listens ─▶ refused     not 2xx ─▶ unwell     no answer yet ─▶ late
                  neither an answer nor a byte of any response for `silence_s` ─▶ silent
    every MODELS_S, and when a model is missing: GET /v1/models ─▶ names, contexts, Joined

A probe has no time limit but that of silence: a late answer is an answer, and lowers preference
only. PROBES_PER_S bounds what probes cost: with more engines the period is longer.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
from collections.abc import Callable
from typing import Final

import msgspec
import xxhash

from kvstore.router.engines.calls import EngineHttp, HttpAnswer
from kvstore.router.engines.failures import NoAnswer, NoConnection
from kvstore.router.engines.kinds import ENGINES, EngineKind, findings_of
from kvstore.router.engines.workers import Worker, WorkerAdapter, Workers
from kvstore.routing.events import Probed, RouteEvent, Scraped
from kvstore.routing.policy import PolicyProbes
from kvstore.routing.values import ProbeResult, WorkerWord

TICK_S: Final = 0.2
PROBES_PER_S: Final = 50
"""Most probes per second, of all engines together."""
STALL_S: Final = 1.0
UNREAD_MAX: Final = 4
MODELS_S: Final = 10.0
MODELS_PER_S: Final = 5
TROUBLED: Final = (WorkerWord.DOWN, WorkerWord.OPEN, WorkerWord.HALF_OPEN)
"""States of workers whose health endpoint is asked as well: an engine may publish metrics and be
unwell.
"""
ROUND_S: Final = 1.0
"""Time between two rounds of reading all models, and the most that a request waits for one."""
PAGE_BYTES_MAX: Final = 4 << 20
MODELS_MAX: Final = 1 << 14
CONTEXT_MAX: Final = 1 << 32
"""Longer contexts are ignored: no model has one."""


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    """Base model of an adapter, as vLLM gives it."""
    root: str | None = None
    """Path of an adapter, as vLLM gives it."""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_log = logging.getLogger(__name__)
_models: Final = msgspec.json.Decoder(_Models)


class Probes:
    """See the module; `once` is repeated by its owner."""

    pause_s: Final = TICK_S

    def __init__(
        self,
        engines: EngineHttp,
        workers: Workers,
        note: Callable[[RouteEvent], None],
        *,
        settings: Callable[[], PolicyProbes],
        clock: Callable[[], int],
    ) -> None:
        """`note`: takes events for the core. `settings`: the current settings of the policy.
        `clock`: nanoseconds, of the core.
        """
        self._engines, self._workers, self._note = engines, workers, note
        self._settings, self._clock = settings, clock
        self._due: list[tuple[float, int, Worker]] = []
        """Heap of (time of the next probe, number, worker)."""
        self._budget: float = PROBES_PER_S
        """Probes that may begin now. Bounds also those that callers cause by reporting failures."""
        self._known: dict[Worker, None] = {}
        self._version = -1
        self._open: dict[Worker, tuple[float, asyncio.Task[None]]] = {}
        """Probes without an answer: worker → (when it began, its task)."""
        self._numbers = itertools.count()
        self._readings: dict[Worker, asyncio.Task[None]] = {}
        """Reads of models under way."""
        self._looked_s = self._awake_s = asyncio.get_running_loop().time()
        """When `once` ran last, and when it last ran after a stall of this process."""
        self._round: asyncio.Task[None] | None = None
        self._round_due_s = 0.0
        workers.read_again = self.read_again

    async def once(self) -> None:
        """Begin the probes that are due, and look at those without an answer."""
        loop = asyncio.get_running_loop()
        now_s, settings = loop.time(), self._settings()
        if now_s - self._looked_s > STALL_S:  # what came meanwhile is not read yet
            self._awake_s = now_s
        self._looked_s = now_s
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._follow(now_s)
        for worker, (since_s, task) in list(self._open.items()):
            self._look(worker, since_s, task, now_s, settings)
        period_s = max(settings.period_s, len(self._known) / PROBES_PER_S)
        self._budget = min(PROBES_PER_S, self._budget + PROBES_PER_S * TICK_S)
        while self._due and self._due[0][0] <= now_s and self._budget >= 1:
            due_s, _, worker = heapq.heappop(self._due)
            if worker not in self._known or due_s != worker.probe_due_s:
                continue  # it has left, or was put before others
            if worker not in self._open:
                self._budget -= 1
                task = loop.create_task(self._probe(worker, settings))
                self._open[worker] = now_s, task
                task.add_done_callback(functools.partial(self._over, worker))
            share = 1.0
            if not worker.probe_count:  # the second one at a moment of its own: not all at once
                share = xxhash.xxh32_intdigest(worker.name.encode()) / 2**32
            self._put(worker, now_s + period_s * share)
            worker.probe_count += 1

    def _follow(self, now_s: float) -> None:
        """Begin to probe workers that joined, and end probes of those that left."""
        present = dict.fromkeys(self._workers)
        for gone in self._known.keys() - present.keys():
            if gone in self._open:
                self._open[gone][1].cancel()
            if (reading := self._readings.pop(gone, None)) is not None:
                reading.cancel()
        for worker in present:
            if worker not in self._known:
                self._put(worker, now_s)
        self._known = present

    def _put(self, worker: Worker, due_s: float) -> None:
        worker.probe_due_s = due_s
        heapq.heappush(self._due, (due_s, next(self._numbers), worker))

    def _over(self, worker: Worker, task: asyncio.Task[None]) -> None:
        del self._open[worker]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a bug: a probe failed", exc_info=error)

    def look_now(self, worker: Worker) -> None:
        """A request failed at this worker: it is probed next, behind those that are due."""
        now_s = asyncio.get_running_loop().time()
        if now_s < worker.probe_due_s:
            self._put(worker, now_s)

    def _look(
        self,
        worker: Worker,
        since_s: float,
        task: asyncio.Task[None],
        now_s: float,
        settings: PolicyProbes,
    ) -> None:
        """Look at a probe that has no answer yet: report it as late, or end it as silent."""
        # Not the router's own silence.
        heard_s = max(since_s, worker.heard_s, self._engines.trouble_s, self._awake_s)
        late_s = now_s - heard_s - max(settings.late_s, 2 * worker.probe_s)  # slow pages are usual
        if now_s - heard_s >= settings.silence_s:
            task.cancel()
            why = f"it has not answered for {settings.silence_s:g} s"
            self._note(Probed(worker.name, ProbeResult.SILENT, why))
        elif late_s > 0 or worker.word is WorkerWord.LATE:
            self._note(Probed(worker.name, ProbeResult.LATE, late_s=max(0.0, late_s)))

    async def _probe(self, worker: Worker, settings: PolicyProbes) -> None:
        kind, loop = ENGINES[worker.address.kind], asyncio.get_running_loop()
        since_s, asked_ns = loop.time(), self._clock()
        page: bytes | None = None
        try:
            if kind.metrics:
                page = await self._metrics(worker, kind)
            if page is None or worker.word in TROUBLED:
                found = await self._get(worker, kind.health)
                if not 200 <= found.status < 300:
                    why = f"{kind.health}: status {found.status}"
                    self._note(Probed(worker.name, ProbeResult.UNWELL, why))
                    return
        except (NoConnection, NoAnswer) as error:
            self._note(Probed(worker.name, ProbeResult.REFUSED, str(error)))
            return
        worker.heard_s = loop.time()
        worker.probe_s = worker.heard_s - since_s
        self._note(Probed(worker.name, ProbeResult.ANSWERED))
        if worker.heard_s >= worker.models_due_s:
            self.read_models(worker)
        if page is not None:
            self._read(worker, kind, page, asked_ns)

    async def _metrics(self, worker: Worker, kind: EngineKind) -> bytes | None:
        """The worker's metrics page; None: it has none that can be read, which is logged from the
        UNREAD_MAX-th time in a row on. Raises NoConnection: nothing listens at the engine's own
        port.
        """
        try:
            found = await self._get(worker, kind.metrics, kind.port)
            if 200 <= found.status < 300:
                worker.unread_count = 0
                return found.body
            why = f"status {found.status}"
        except NoAnswer as error:
            why = str(error)
        except NoConnection as error:
            if not kind.port:
                raise
            why = str(error)
        worker.unread_count += 1
        if worker.unread_count >= UNREAD_MAX:
            advice = f": {kind.advice}" if kind.advice else ""
            _say_unread(worker, f"{kind.metrics}: {why}{advice}")
        return None

    def _read(self, worker: Worker, kind: EngineKind, page: bytes, asked_ns: int) -> None:
        found = findings_of(kind, page)
        missing = " and ".join(dict.fromkeys(found.missing)) if worker.has_served else ""
        _say_unread(worker, f"{kind.metrics} does not have {missing}" if missing else "")
        block_tokens = worker.address.block_tokens or found.block_tokens
        known = (worker.memory_tokens, worker.block_tokens)
        worker.memory_tokens, worker.block_tokens = found.memory_tokens, block_tokens
        self._note(Scraped(worker.name, found.load, asked_ns))
        if known != (found.memory_tokens, block_tokens):
            self._describe(worker)

    def _describe(self, worker: Worker) -> None:
        if self._workers.get(worker.name) is worker:
            self._workers.describe(worker)

    def read_models(self, worker: Worker) -> None:
        """Begin to read the worker's models: they may have changed."""
        reading = self._readings.get(worker)
        if reading is None or reading.done():
            loop = asyncio.get_running_loop()
            pause_s = max(MODELS_S, len(self._workers) / MODELS_PER_S)
            worker.models_due_s = loop.time() + pause_s
            self._readings[worker] = loop.create_task(self._read_models(worker))

    async def read_again(self) -> None:
        """Read the models of all engines now, because a request names an unknown one; joins a round
        that is under way. Ends after ROUND_S, read or not.
        """
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._read_all())
        await asyncio.wait([self._round])

    async def _read_all(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._round_due_s - loop.time()))
        self._round_due_s = loop.time() + max(ROUND_S, len(self._workers) / PROBES_PER_S)
        for worker in self._workers:
            if worker.is_answering:
                self.read_models(worker)
        if under_way := [each for each in self._readings.values() if not each.done()]:
            await asyncio.wait(under_way, timeout=ROUND_S)

    async def _read_models(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(MODELS_S):
                found = await self._get(worker, "/v1/models")
            rows = _models.decode(found.body).data[:MODELS_MAX]
        except (NoConnection, NoAnswer, TimeoutError, msgspec.MsgspecError):
            return  # healthy all the same, or known by its probes
        bases = {row.id for row in rows}
        adapters = {r.id: (r.parent, r.root or "") for r in rows if r.parent in bases}
        known = {name: (each.base, each.path) for name, each in worker.adapters.items()}
        names = tuple(bases.difference(adapters)) or worker.address.models
        lengths = ((row.id, row.max_model_len or 0) for row in rows)
        contexts = {name: tokens for name, tokens in lengths if 0 < tokens <= CONTEXT_MAX}
        if (set(names), adapters, contexts) == (set(worker.models), known, worker.contexts):
            return
        worker.models, worker.contexts = tuple(sorted(names)), contexts
        worker.adapters = {
            name: worker.adapters[name]
            if known.get(name) == (base, path)
            else WorkerAdapter(base or "", path)
            for name, (base, path) in adapters.items()
        }
        self._describe(worker)

    async def _get(self, worker: Worker, path: str, port: int = 0) -> HttpAnswer:
        """GET of a path at a worker. Raises NoConnection, NoAnswer."""
        url = worker.url.with_path(path)
        url = url.with_port(port) if port else url
        return await self._engines.fetch(url, bytes_max=PAGE_BYTES_MAX)

    async def close(self) -> None:
        """End the probes and reads that are under way."""
        tasks = [*(task for _, task in self._open.values()), *self._readings.values()]
        tasks += [self._round] if self._round is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _say_unread(worker: Worker, why: str) -> None:
    if why and worker.unread != why:
        _log.warning("load of worker %s is not known: %s", worker.name, why)
    worker.unread = why
