"""One attempt: a request at one worker, its answer streamed to the client.

    open ─▶ headers ─▶ first piece ─▶ client's headers ─▶ piece, piece, … ─▶ end
             └──────── LegFailure, the client has seen nothing ───┘   └─ broken: both ends cut off

Nothing reaches the client before the first piece of the body, so that up to there another worker
can take over. From there on pieces go as they come, from the engine's connection to the client's
without a task in between: a client that does not read stops the reading of the engine's answer, for
STALL_S at most. A client that leaves cancels the task, which closes the engine's connection, by
which the engine aborts the request.

Covers: bytes and their times. Does not cover: other workers, counts (`proxy`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion11

from kvstore.router.engines.connections import (
    KEEPALIVE_S,
    EngineConnection,
    EngineHttp,
    NoConnection,
)
from kvstore.router.engines.workers import Worker
from kvstore.router.front import heads
from kvstore.routing.events import Failure, Leg

CONNECT_TIMEOUT_S: Final = 2.0
STALL_S: Final = 60.0
"""Longest silence of a client that does not read …"""
SILENCE_S: Final = 600.0
"""… and of an engine in the middle of its answer."""
ERROR_BYTES_MAX: Final = 64 << 10
WHOLE_BYTES_MAX: Final = 256 << 10
"""An answer of a known length up to this goes in one piece."""
TAIL_BYTES: Final = 4096
LAST_CHUNK: Final = b"0\r\n\r\n"
_NO_ENTRY: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_NO_BODY: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})\b')
_PROMPT: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})\b')
_MADE: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})\b')


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
        self.worker = ""
        """Name, where the failure counts against it."""
        self.is_suspect = failure is Failure.REFUSED or status == HTTPStatus.INTERNAL_SERVER_ERROR
        """The request may be the cause, and not the engine."""


def fault_of(status: int, *, is_put_off: bool, has_client_key: bool) -> Failure | None:
    """The failure of an engine that a status shows: another one is asked. None: the answer is for
    the client. Args: `is_put_off`: with Retry-After; `has_client_key`: the engine got the API key
    of the client, and not the router's."""
    if status == 429 or (status == 503 and is_put_off):
        return Failure.BUSY
    # 501: of vLLM, where its model does not have this path.
    if status == 501 or (status in _NO_ENTRY and has_client_key):
        return Failure.REFUSED
    is_fault = status >= 500 or 300 <= status < 400 or status in _NO_ENTRY
    return Failure.STATUS if is_fault else None


class ClientStalled(Exception):
    """The client did not read for STALL_S."""


class Beaten(Exception):
    """Another attempt of the same request answers: this one has ended."""


class Attempt:
    """See the module. `tail` and `status` are there after `run`,
    `has_answered` from the answer's first piece on, `is_whole` when all of it was sent."""

    def __init__(
        self, engines: EngineHttp, worker: Worker, request: web.BaseRequest, deadline_s: float
    ) -> None:
        """`deadline_s`: to the first piece of the answer."""
        self._place, self.worker, self.request = engines.place(worker.url), worker, request
        self._deadline_s = deadline_s
        self.status = 0
        self.tail = b""
        """The end of the answer's body."""
        self.has_answered = False
        self.is_whole = False
        self._limit = Limit(self._late)
        self._has_begun = False
        """The client has got something: pieces go on to it as they come."""
        self._is_over = self._is_chunked = False
        self._is_behind = False
        """The client does not read as fast as the engine writes."""
        self._pieces: list[bytes] = []
        """Not sent yet, `_size` in all."""
        self._size = 0
        self._error: Exception | None = None
        self._is_woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._connection: EngineConnection
        self._headers: list[tuple[bytes, bytes]] = []
        """Headers of the answer: a connection may have another request before the task runs."""
        self._on_first: Callable[[], None]
        self._has_client_key = True

    async def run(
        self,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        on_first: Callable[[], None],
        more: dict[str, str],
        has_client_key: bool = True,
    ) -> web.StreamResponse:
        """The answer, wholly sent.

        Args:
            headers: for the engine.
            body: for the engine.
            on_first: called with the first piece of the answer, before it is sent.
            more: headers for the client.
            has_client_key: as of `fault_of`.

        Raises:
            LegFailure: the engine failed.
            Beaten: `on_first` did.
            ClientStalled, ConnectionError: the client did.
        """
        self._on_first, self._has_client_key = on_first, has_client_key
        self._error, self._is_woken, self._is_over = None, False, False
        self._pieces.clear()
        self._size = 0
        connection: EngineConnection | None = None
        try:
            connection = self._place.idle() or await self._connected()
            self._connection = connection
            self._limit.begin(self._deadline_s)
            self.worker.waits.add(self._limit)
            head = heads.request_head(
                self.request.method, self.request.rel_url.raw_path_qs, self._place.host, headers
            )
            connection.ask(b"%bContent-Length: %d\r\n\r\n" % (head, len(body)), body, self)
            await self._news()
            if (fault := self._fault()) is not None:
                raise self._refused(fault)
            sent = await self._pass_on(connection, more)
        except NoConnection as error:
            raise self._failure(Failure.CONNECT, f"no connection: {error}") from None
        except TimeoutError:
            raise self._failure(Failure.TIMEOUT, "no answer in time") from None
        else:
            self.is_whole = True
            return sent
        finally:
            self.worker.waits.discard(self._limit)
            self._limit.end()
            if connection is not None and not self._is_over:
                connection.abort()

    async def _connected(self) -> EngineConnection:
        limit = asyncio.timeout(min(CONNECT_TIMEOUT_S, self._deadline_s))
        try:
            async with limit:
                self.worker.waits.add(limit)
                return await self._place.connected()
        except TimeoutError:
            raise NoConnection("no answer in time") from None
        finally:
            self.worker.waits.discard(limit)

    def _failure(self, failure: Failure, why: str) -> LegFailure:
        return LegFailure(failure, why, has_streamed=self._has_begun)

    def _fault(self) -> Failure | None:
        return fault_of(
            self.status,
            is_put_off=any(name.lower() == b"retry-after" for name, _ in self._headers),
            has_client_key=self._has_client_key,
        )

    def _refused(self, fault: Failure) -> LegFailure:
        why = f"status {self.status}"
        answer: web.Response | None = None
        if self.status < HTTPStatus.BAD_REQUEST:
            why += ": it sends requests elsewhere: its address is that of another server"
        elif self.status in _NO_ENTRY and fault is Failure.STATUS:
            why += ": it does not take the router's key (--worker-key-file)"
        else:
            answer = web.Response(
                status=self.status,
                headers=heads.readable(heads.back(self._headers)),
                body=b"".join(self._pieces)[:ERROR_BYTES_MAX],
            )
        return LegFailure(fault, why, status=self.status, answer=answer)

    # ── what the engine's connection says ────────────────────────────────────────────────────────

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        """As `AnswerTaker`."""
        self._is_over, self._headers = is_over, self._connection.headers
        if self._error is not None:  # the task runs next, and ends by that
            return
        is_refusal = False
        if not self.has_answered:
            self.status = self._connection.status
            is_refusal = self.status != HTTPStatus.OK and self._fault() is not None
        if not (self.has_answered or is_refusal):
            try:
                self._on_first()
            except Beaten as error:
                self._error = error
                self._wake()
                return
            self.has_answered = True
            self.worker.waits.discard(self._limit)
            self._limit.move(SILENCE_S)
        if self._has_begun:
            self._relay(piece)
            return
        self._pieces.append(piece)
        self._size += len(piece)
        length = self._connection.length
        if is_refusal:
            is_enough = self._size >= ERROR_BYTES_MAX
        else:
            is_enough = length is None or length > WHOLE_BYTES_MAX
        if is_over or is_enough:
            self._wake()

    def broke(self, why: str) -> None:
        """As `AnswerTaker`."""
        self._error = self._failure(Failure.BROKEN, f"the answer broke off: {why}")
        self._wake()

    def _late(self) -> None:
        self._error = TimeoutError()
        self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        """Until `_wake`. Raises what went wrong."""
        if not self._is_woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_woken = False
        if self._error is not None:
            raise self._error

    # ── to the client ────────────────────────────────────────────────────────────────────────────

    async def _pass_on(
        self, connection: EngineConnection, more: dict[str, str]
    ) -> web.StreamResponse:
        request = self.request
        is_modern = request.version >= HttpVersion11
        out = Relayed(self.status, is_kept=is_modern and request.keep_alive)
        if not out.keep_alive:
            more[heads.CONNECTION] = "close"
        length = connection.length if not self._is_over else self._size
        if length is None and is_modern:
            self._is_chunked = True
            more[heads.TRANSFER_ENCODING] = "chunked"
        elif length is not None and self.status not in _NO_BODY:
            more[heads.CONTENT_LENGTH] = str(length)
        first = b"".join(self._pieces)
        self._pieces.clear()
        self._has_begun = not self._is_over
        self._relay(first, heads.answer_head(self.status, heads.back(self._headers), more))
        while not self._is_over:
            await self._news()
            if self._is_behind and not self._is_over:
                await self._drained()
                self._is_behind = False
                connection.resume()
        if self._error is not None:
            raise self._error
        if request.protocol.writing_paused:
            await self._drained()
        return out

    def _relay(self, piece: bytes, head: bytes = b"") -> None:
        """Write a piece, and what comes before and after it."""
        transport = self.request.transport
        if transport is None or transport.is_closing():
            self._error = ConnectionResetError("the client has left")
            self._wake()
            return
        self.tail = (self.tail + piece)[-TAIL_BYTES:]
        if not self._is_chunked:
            framed = head + piece
        else:
            framed = b"%b%x\r\n%b\r\n" % (head, len(piece), piece) if piece else head
            if self._is_over:
                framed += LAST_CHUNK
        if framed:
            transport.write(framed)
        if self._is_over:
            self._wake()
            return
        self._limit.move(SILENCE_S)
        if self.request.protocol.writing_paused and not self._is_behind:
            self._is_behind = True
            self._connection.pause()
            self._wake()

    async def _drained(self) -> None:
        """Until the client has read."""
        try:
            async with asyncio.timeout(STALL_S):
                await self.request.writer.drain()
        except TimeoutError:
            raise ClientStalled from None


class Limit:
    """A time limit that is moved with every piece: one timer, which looks again when it is over."""

    def __init__(self, late: Callable[[], None]) -> None:
        self._late = late
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def begin(self, seconds: float) -> None:
        """From now on."""
        self.reschedule(self._loop.time() + seconds)

    def move(self, seconds: float) -> None:
        """To so many seconds from now: later than before."""
        self._due_s = self._loop.time() + seconds

    def reschedule(self, when_s: float) -> None:
        """As that of `asyncio.Timeout`; also to an earlier time."""
        self.end()
        self._due_s = when_s
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._due_s:
            self._late()
        else:
            self.reschedule(self._due_s)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Relayed(web.StreamResponse):
    """An answer that is written already: aiohttp has nothing to add."""

    def __init__(self, status: int, *, is_kept: bool) -> None:
        super().__init__(status=status)
        self._is_kept = is_kept

    @property
    def keep_alive(self) -> bool:
        return self._is_kept

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


def cached_tokens_of(tail: bytes) -> int | None:
    """By the engine's own word at the end of its answer; None: it gave none, or a number that no
    request has."""
    return _last(_CACHED, tail)


def prompt_tokens_of(tail: bytes) -> int:
    """By the engine's own word; 0: it gave none."""
    return _last(_PROMPT, tail) or 0


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
