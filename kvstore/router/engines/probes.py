"""Probes of engines: health, metrics and served models, all workers at once.

    every PERIOD_S: GET health ─▶ Workers.answered        FAILURES_MAX in a row ─▶ down
                    GET metrics ─▶ Scraped                 (the core decays what grows old)
    every MODELS_S: GET /v1/models ─▶ names, Joined again where they changed

An engine that takes connections and answers nothing fails its probes: it is down after
FAILURES_MAX × TIMEOUT_S, and the requests that wait for it go elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from kvstore.router.engines.kinds import ENGINES, findings_of
from kvstore.router.engines.workers import Worker, Workers
from kvstore.routing.events import RouteEvent, Scraped

PERIOD_S: Final = 0.5
TIMEOUT_S: Final = 1.0
FAILURES_MAX: Final = 2
MODELS_S: Final = 10.0
PAGE_BYTES_MAX: Final = 4 << 20
MODELS_MAX: Final = 256


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    """Base model of an adapter, as vLLM says it."""


class _Models(msgspec.Struct):
    data: list[_Model]


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
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def once(self) -> None:
        """Begin a probe of each worker whose last one has ended."""
        present = set(self._workers)
        for table in (self._failures, self._models_due_s):
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
            adapters = tuple(row.id for row in rows if row.parent in bases)
            names = worker.address.models or tuple(bases.difference(adapters))
            changed = set(names) != set(worker.models) or adapters != worker.adapters
            worker.models, worker.adapters = tuple(sorted(names)), adapters
        if kind.metrics:
            text = (await self._get(worker, kind.metrics, kind.port)).decode("utf-8", "replace")
            found = findings_of(kind, text)
            changed |= found.memory_tokens != worker.memory_tokens
            worker.memory_tokens = found.memory_tokens
            block_tokens = worker.address.block_tokens or found.block_tokens
            changed |= block_tokens != worker.block_tokens
            worker.block_tokens = block_tokens
            self._note(Scraped(worker.name, found.load))
        if changed and self._workers.get(worker.name) is worker:
            self._workers.describe(worker)

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


def why_no_answer(error: BaseException) -> str:
    """One clause; aiohttp's own texts name settings of its sockets."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is refused: {error.certificate_error}"[:200]
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        is_system = number in errno.errorcode and not isinstance(error.os_error, ssl.SSLError)
        return os.strerror(number).lower() if is_system and number else str(error.os_error)[:200]
    return (str(error) or type(error).__name__)[:200]
