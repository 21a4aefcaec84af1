"""One attempt: a request at one worker, its answer streamed to the client.

    open ─▶ headers ─▶ first piece ─▶ client's headers ─▶ piece, piece, … ─▶ end
             └──────── LegFailure, the client has seen nothing ───┘   └─ broken: both ends cut off

Nothing reaches the client before the first piece of the body, so that up to there another worker
can take over. From there on pieces go as they come: a client that does not read stops the reading
of the engine's answer, for STALL_S at most. A client that leaves cancels the task, and leaving the
`with` closes the engine's connection, by which the engine aborts the request.

Covers: bytes and their times. Does not cover: other workers, counts (`proxy`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvstore.router.engines.probes import why_no_answer
from kvstore.router.engines.workers import Worker
from kvstore.router.front import heads
from kvstore.routing.events import Failure, Leg

RETRIED: Final = frozenset({500, 502, 503, 504, 508})
"""Statuses of an engine after which another one is asked."""
CONNECT_TIMEOUT_S: Final = 2.0
STALL_S: Final = 60.0
"""Longest silence of a client that does not read …"""
SILENCE_S: Final = 600.0
"""… and of an engine in the middle of its answer."""
ERROR_BYTES_MAX: Final = 64 << 10
WHOLE_BYTES_MAX: Final = 256 << 10
"""An answer of a known length up to this goes in one piece."""
TAIL_BYTES: Final = 4096
KEEPALIVE_S: Final = 3.0
"""Less than the 5 s after which engines close idle connections."""
_FREE_BYTES: Final = 16 << 10
"""A write never waits while less is unread: asyncio's own limit is 64 KiB."""
_SILENT_S: Final = 1.0
"""A time-out is moved once in so long."""
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_MADE: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')


class LegFailure(Exception):
    """The attempt failed. `answer`: of the engine, where it gave one."""

    def __init__(
        self,
        failure: Failure,
        why: str,
        *,
        answer: web.Response | None = None,
        has_streamed: bool = False,
        leg: Leg = Leg.DECODE,
        status: int = 0,
    ) -> None:
        super().__init__(why)
        self.failure, self.answer, self.has_streamed = failure, answer, has_streamed
        self.leg = leg
        self.is_suspect = status == HTTPStatus.INTERNAL_SERVER_ERROR
        """The request may be the cause, and not the engine."""


class ClientStalled(Exception):
    """The client did not read for STALL_S."""


class Attempt:
    """See the module. `tail` and `status` are there after `run`,
    `has_answered` from the answer's first piece on, `is_whole` when all of it was sent."""

    def __init__(
        self, session: aiohttp.ClientSession, worker: Worker, request: web.BaseRequest
    ) -> None:
        self._session, self.worker, self.request = session, worker, request
        self.status = 0
        self.tail = b""
        """The end of the answer's body."""
        self.has_answered = False
        self.is_whole = False
        self._is_reading = True
        self._has_begun = False

    async def run(
        self,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        deadline_s: float,
        on_first: Callable[[], None],
        more: dict[str, str],
    ) -> web.StreamResponse:
        """The answer, wholly sent.

        Args:
            headers: for the engine.
            body: for the engine.
            deadline_s: to the first piece of the answer.
            on_first: called with it.
            more: headers for the client.

        Raises:
            LegFailure: the engine failed.
            ClientStalled, ConnectionError: the client did.
        """
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(deadline_s)
        waits = self.worker.waits
        try:
            async with limit:
                waits.add(limit)
                async with self._open(headers, body) as answer:
                    self.status = answer.status
                    if answer.status in RETRIED:
                        raise await self._refused(answer)
                    piece = await answer.content.readany()
                    waits.discard(limit)
                    self.has_answered = True
                    on_first()
                    sent = await self._pass_on(answer, piece, limit, loop, more)
                    self.is_whole = True
                    return sent
        except TimeoutError:
            if not self._is_reading:
                raise ClientStalled from None
            raise self._failure(Failure.TIMEOUT, "no answer in time") from None
        except aiohttp.ClientConnectorError as error:
            raise self._failure(Failure.CONNECT, f"no connection: {why_no_answer(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            if not self._is_reading:
                raise
            raise self._failure(
                Failure.BROKEN, f"the answer broke off: {why_no_answer(error)}"
            ) from None
        finally:
            waits.discard(limit)

    def _open(
        self, headers: CIMultiDict[str], body: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.request(
            self.request.method,
            self.worker.url.join(self.request.rel_url),
            headers=headers,
            data=body,
            allow_redirects=False,
        )

    def _failure(self, failure: Failure, why: str) -> LegFailure:
        return LegFailure(failure, why, has_streamed=self._has_begun)

    async def _refused(self, answer: aiohttp.ClientResponse) -> LegFailure:
        body = await answer.content.read(ERROR_BYTES_MAX)
        return LegFailure(
            Failure.STATUS,
            f"status {answer.status}",
            status=answer.status,
            answer=web.Response(
                status=answer.status, headers=heads.back(answer.headers), body=body
            ),
        )

    async def _pass_on(
        self,
        answer: aiohttp.ClientResponse,
        piece: bytes,
        limit: asyncio.Timeout,
        loop: asyncio.AbstractEventLoop,
        more: dict[str, str],
    ) -> web.StreamResponse:
        headers = heads.back(answer.headers)
        headers.update(more)
        length = answer.content_length
        if length is not None and length <= WHOLE_BYTES_MAX:
            limit.reschedule(loop.time() + SILENCE_S)
            while len(piece) < length and (next_piece := await answer.content.readany()):
                piece += next_piece
            self.tail = piece[-TAIL_BYTES:]
            whole = web.Response(status=answer.status, headers=headers, body=piece)
            await self._sent(whole, limit, loop)
            return whole
        out = web.StreamResponse(status=answer.status, headers=headers)
        if length is not None:
            out.content_length = length
        self._has_begun = True
        await self._sent(out, limit, loop)
        transport = self.request.transport
        limit.reschedule(loop.time() + SILENCE_S)
        begun_s = loop.time()
        while piece:
            unread = transport.get_write_buffer_size() if transport is not None else 0
            is_behind = unread + len(piece) > _FREE_BYTES
            now_s = loop.time()
            if is_behind:
                limit.reschedule(now_s + STALL_S)
            self._is_reading = False
            await out.write(piece)
            self._is_reading = True
            self.tail = (self.tail + piece)[-TAIL_BYTES:]
            if is_behind or now_s - begun_s > _SILENT_S:
                begun_s = loop.time()
                limit.reschedule(begun_s + SILENCE_S)
            piece = await answer.content.readany()
        limit.reschedule(loop.time() + STALL_S)
        self._is_reading = False
        await out.write_eof()
        return out

    async def _sent(
        self, out: web.StreamResponse, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._is_reading = False
        limit.reschedule(loop.time() + STALL_S)
        await out.prepare(self.request)
        if isinstance(out, web.Response):
            await out.write_eof()
        self._is_reading = True


def cached_tokens_of(tail: bytes) -> int | None:
    """By the engine's own word at the end of its answer; None: it gave none."""
    return _last(_CACHED, tail)


def output_tokens_of(tail: bytes) -> int:
    """By the engine's own word; 0: it gave none."""
    return _last(_MADE, tail) or 0


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None


def new_session(*, ssl_context: object = True) -> aiohttp.ClientSession:
    """The client's end: no limits of its own, since the router's counts are the limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEEPALIVE_S,
            ssl=ssl_context,  # type: ignore[arg-type]
            enable_cleanup_closed=False,
        ),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        trust_env=False,
        headers={heads.ROUTERS: secrets.token_hex(8)},
    )
