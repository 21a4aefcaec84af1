"""Probes of engines: health, metrics and served models, all workers at once.

    every PERIOD_S: GET health ─▶ Workers.answered        FAILURES_MAX in a row ─▶ down
                    GET metrics ─▶ Scraped                 (the core decays what grows old)
    every MODELS_S: GET /v1/models ─▶ names, Joined again where they changed

An engine that takes connections and answers nothing fails its probes: it is down after
FAILURES_MAX × TIMEOUT_S, and the requests that wait for it go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from kvstore.router.engines.connections import why_no_connection
from kvstore.router.engines.kinds import ENGINES, EngineFigures, EngineKind, findings_of
from kvstore.router.engines.workers import Worker, WorkerAdapter, Workers
from kvstore.routing.events import RouteEvent, Scraped

PERIOD_S: Final = 0.5
TIMEOUT_S: Final = 1.0
FAILURES_MAX: Final = 2
UNREAD_MAX: Final = 4
MODELS_S: Final = 10.0
PAGE_BYTES_MAX: Final = 4 << 20
MODELS_MAX: Final = 256


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    """Base model of an adapter, as vLLM says it …"""
    root: str | None = None
    """… and its path."""


class _Models(msgspec.Struct):
    data: list[_Model]


_log = logging.getLogger(__name__)
_models: Final = msgspec.json.Decoder(_Models)


class Probes:
    """See the module; `once` is repeated by its owner."""

    pause_s: Final = PERIOD_S

    def __init__(
        self,
        session: aiohttp.ClientSession,
        workers: Workers,
        note: Callable[[RouteEvent], None],
        worker_key: str = "",
    ) -> None:
        self._session, self._workers, self._note = session, workers, note
        self._headers = {"Authorization": f"Bearer {worker_key}"} if worker_key else {}
        self._failures: dict[Worker, int] = {}
        self._models_due_s: dict[Worker, float] = {}
        self._unread: dict[Worker, int] = {}
        """Failed reads of metrics in a row."""
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def once(self) -> None:
        """Begin a probe of each worker whose last one has ended."""
        present = set(self._workers)
        for table in (self._failures, self._models_due_s, self._unread):
            for gone in table.keys() - present:
                del table[gone]
        self._running = {w: task for w, task in self._running.items() if not task.done()}
        for worker in present - self._running.keys():
            self._running[worker] = asyncio.create_task(self._probe(worker))

    async def _probe(self, worker: Worker) -> None:
        kind = ENGINES[worker.address.kind]
        try:
            await self._get(worker, kind.health)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            count = self._failures[worker] = self._failures.get(worker, 0) + 1
            if count >= FAILURES_MAX:
                self._workers.answered(worker, f"{kind.health}: {why_no_answer(error)}")
                self._models_due_s.pop(worker, None)
                worker.renders = True
            return
        self._failures.pop(worker, None)
        self._workers.answered(worker, "")
        try:
            await self._follow(worker)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return  # healthy all the same: what is not known grows old in the core

    async def _follow(self, worker: Worker) -> None:
        kind, now_s = ENGINES[worker.address.kind], time.monotonic()
        changed = False
        if now_s >= self._models_due_s.get(worker, 0.0):
            rows = _models.decode(await self._get(worker, "/v1/models")).data[:MODELS_MAX]
            self._models_due_s[worker] = now_s + MODELS_S
            bases = {row.id for row in rows}
            adapters = {r.id: (r.parent, r.root or "") for r in rows if r.parent in bases}
            known = {name: (each.base, each.path) for name, each in worker.adapters.items()}
            names = worker.address.models or tuple(bases.difference(adapters))
            changed = set(names) != set(worker.models) or adapters != known
            worker.models = tuple(sorted(names))
            if adapters != known:
                worker.adapters = {
                    name: worker.adapters[name]
                    if known.get(name) == (base, path)
                    else WorkerAdapter(base or "", path)
                    for name, (base, path) in adapters.items()
                }
        found = await self._scraped(worker, kind) if kind.metrics else None
        if found is not None:
            changed |= found.memory_tokens != worker.memory_tokens
            worker.memory_tokens = found.memory_tokens
            block_tokens = worker.address.block_tokens or found.block_tokens
            changed |= block_tokens != worker.block_tokens
            worker.block_tokens = block_tokens
            self._note(Scraped(worker.name, found.load))
        if changed and self._workers.get(worker.name) is worker:
            self._workers.describe(worker)

    async def _scraped(self, worker: Worker, kind: EngineKind) -> EngineFigures | None:
        """Its metrics; None: not read, which is said when it was so UNREAD_MAX times."""
        try:
            page = await self._get(worker, kind.metrics, kind.port)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._unread[worker] = self._unread.get(worker, 0) + 1
            if self._unread[worker] >= UNREAD_MAX:
                advice = f": {kind.advice}" if kind.advice else ""
                _say_unread(worker, f"{kind.metrics}: {why_no_answer(error)}{advice}")
            return None
        self._unread.pop(worker, None)
        found = findings_of(kind, page.decode("utf-8", "replace"))
        has_served = worker.request_count > worker.in_flight  # some publish nothing before
        missing = " and ".join(dict.fromkeys(found.missing)) if has_served else ""
        _say_unread(worker, f"{kind.metrics} does not have {missing}" if missing else "")
        return found

    async def _get(self, worker: Worker, path: str, port: int = 0) -> bytes:
        """Raises ClientError, OSError, TimeoutError; ValueError: not a 2xx, or too large."""
        url = worker.url.with_path(path)
        if port:
            url = url.with_port(port)
        async with (
            asyncio.timeout(TIMEOUT_S),
            self._session.get(url, headers=self._headers, allow_redirects=False) as answer,
        ):
            if not 200 <= answer.status < 300:
                raise ValueError(f"status {answer.status}")
            pieces, size = [], 0
            async for piece in answer.content.iter_any():
                size += len(piece)
                if size > PAGE_BYTES_MAX:
                    raise ValueError("the page is too large")
                pieces.append(piece)
            return b"".join(pieces)


def _say_unread(worker: Worker, why: str) -> None:
    if why and worker.unread != why:
        _log.warning("load of worker %s is not known: %s", worker.name, why)
    worker.unread = why


def why_no_answer(error: BaseException) -> str:
    """One clause; aiohttp's own texts name settings of its sockets."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is refused: {error.certificate_error}"[:200]
    if isinstance(error, aiohttp.ClientConnectorError):
        return why_no_connection(error.os_error)
    return (str(error) or type(error).__name__)[:200]
