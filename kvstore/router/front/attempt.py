"""One attempt: a request at one worker, its answer streamed to the client.

    open ─▶ headers ─▶ first piece ─▶ client's headers ─▶ piece, piece, … ─▶ end
             └──────── LegFailure, the client has seen nothing ───┘   └─ broken: both ends cut off

Nothing reaches the client before the first piece of the body, so that up to there another worker
can take over. From there on pieces go as they come, from the engine's connection to the client's
without a task in between: a client that does not read stops the reading of the engine's answer, for
STALL_S at most. A client that leaves cancels the task, which closes the engine's connection, by
which the engine aborts the request.

No time limit ends an attempt: an engine that answers its probes is slow, not broken. `give_up`
does, where the core finds its engine silent. A connection that is not there within
CONNECT_TIMEOUT_S is looked for at another engine.

Covers: bytes. Does not cover: other workers, counts (`proxy`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, NamedTuple

from aiohttp import web
from aiohttp.http import HttpVersion11

from kvstore.router.engines.connections import (
    NO_BODY,
    EngineConnection,
    EngineHttp,
    NoConnection,
    request_head,
)
from kvstore.router.engines.workers import Worker
from kvstore.router.front import heads
from kvstore.routing.events import Failure, Lack, Leg

CONNECT_TIMEOUT_S: Final = 2.0
STALL_S: Final = 600.0
"""Longest time for which a client may not read."""
ERROR_BYTES_MAX: Final = 1 << 20
WHOLE_BYTES_MAX: Final = 256 << 10
"""An answer of a known length up to this goes in one piece."""
TAIL_BYTES: Final = 4096
LAST_CHUNK: Final = b"0\r\n\r\n"
_NO_ENTRY: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_NOT_HERE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED)
_READ: Final = (HTTPStatus.BAD_REQUEST, *_NOT_HERE)
"""Statuses whose body is read first, to find whether the answer concerns the engine or
the request.
"""
_LACKS: Final = {
    Lack.MEDIA: re.compile(rb"not a multi-?modal", re.IGNORECASE),
    # Of some requests only: nothing of these is remembered of the engine.
    Lack.CONTEXT: re.compile(
        rb"context (?:length|window)|max_model_len|maximum (?:input|sequence) length", re.IGNORECASE
    ),
    Lack.LIMIT: re.compile(
        rb"may be provided in one (?:prompt|request)|support (?:image|audio|video)", re.IGNORECASE
    ),
}
_COMPLETED: Final = b"event: response.completed"
_ENDS: Final = (b"data: [DONE]", b"event: message_stop", _COMPLETED)
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})\b')
_PROMPT: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})\b')
_MADE: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})\b')


class LegFailure(Exception):
    """The attempt failed. `answer`: the engine's error response, if it gave one."""

    def __init__(
        self,
        failure: Failure,
        why: str,
        *,
        answer: web.Response | None = None,
        has_streamed: bool = False,
        leg: Leg = Leg.DECODE,
        lack: Lack | None = None,
        is_gone: bool = False,
    ) -> None:
        """`leg`: the one that failed. `lack`: the thing that the engine lacks. `is_gone`: nothing
        listens at its address.
        """
        super().__init__(why)
        self.failure, self.answer, self.has_streamed = failure, answer, has_streamed
        self.leg, self.lack, self.is_gone = leg, lack, is_gone
        self.worker = ""
        """Name of the worker that it was sent to; empty: none."""


class Fault(NamedTuple):
    """Failure that an error response shows, and the thing that the engine lacks, if that
    is known.
    """

    failure: Failure
    lack: Lack | None = None


def fault_of(
    status: int, *, is_put_off: bool, has_client_key: bool, body: bytes = b""
) -> Fault | None:
    """Failure that an answer shows, for which another engine is asked; None: the answer is for the
    client. `is_put_off`: it has Retry-After; `has_client_key`: the engine got the client's API key,
    not the router's; `body`: of a 4xx, which may show what this engine lacks.
    """
    if status < 300:
        return None
    if status == 429 or (status == 503 and is_put_off):
        return Fault(Failure.BUSY)
    # 404, 501: of vLLM, where it does not serve that model, or its model does not have this path.
    if status in _NOT_HERE:
        return Fault(Failure.REFUSED, Lack.MODEL if status == 404 else None)
    if status == 400:
        lack = next((lack for lack, text in _LACKS.items() if text.search(body)), None)
        return Fault(Failure.REFUSED, lack) if lack is not None else None
    if status in _NO_ENTRY:
        return Fault(Failure.REFUSED if has_client_key else Failure.STATUS)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return Fault(Failure.ERROR)
    return Fault(Failure.STATUS) if status >= 500 or status < 400 else None


class ClientStalled(Exception):
    """The client did not read for STALL_S."""


class Beaten(Exception):
    """Another attempt of the same request answers: this one has ended."""


class Attempt:
    """One attempt at one worker; see the module. `tail` and `status` are there after `run`,
    `has_answered` from the answer's first piece on, `is_whole` when all of it was sent.
    """

    def __init__(self, engines: EngineHttp, worker: Worker, request: web.BaseRequest) -> None:
        self._place, self.worker, self.request = engines.place(worker.url), worker, request
        self.status = 0
        self.tail = b""
        """Last TAIL_BYTES of the answer's body."""
        self.has_answered = False
        self.is_whole = False
        self._is_completed = False
        """The last event of `/v1/responses` has begun, which may be longer than the tail."""
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Timeout | None = None
        self._has_begun = False
        """The client has got a piece: further pieces go to it as they come."""
        self._is_over = self._is_chunked = self._is_stale = False
        self._is_behind = False
        """The client does not read as fast as the engine writes."""
        self._pieces: list[bytes] = []
        """Pieces that are not sent yet, of `_size` bytes in all."""
        self._size = 0
        self._error: Exception | None = None
        self._woken = asyncio.Event()
        """Set when the task has something to do."""
        self._connection: EngineConnection
        self._headers: list[tuple[bytes, bytes]] = []
        """Headers of the answer, kept here since the connection may have another request before the
        task runs.
        """
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
        """Send the request, and the answer to the client. Returns when all of it is sent.

        Args:
            headers: for the engine.
            body: for the engine.
            on_first: called with the first piece of the answer, before it is sent.
            more: headers for the client.
            has_client_key: as of `fault_of`.

        Raises:
            LegFailure: the engine failed.
            Beaten: `on_first` raised it.
            ClientStalled, ConnectionError: the client does not read, or has left.
        """
        self._on_first, self._has_client_key = on_first, has_client_key
        target = self.request.rel_url.raw_path_qs
        head = request_head(self.request.method, target, self._place.host, headers, len(body))
        connection = self._place.idle()
        self.worker.attempts.add(self.give_up)
        try:
            while True:
                self._begin()
                connection = self._connection = connection or await self._connected()
                connection.ask(head, body, self)
                await self._news()
                if not self._is_stale:
                    break
                connection = None
            if (fault := self._fault()) is not None:
                raise self._refused(fault)
            if not self.has_answered:  # a refusal of the request, after all
                self._on_first()
                self.has_answered = True
            sent = await self._pass_on(connection, more)
        except NoConnection as error:
            why = f"no connection: {error}"
            raise LegFailure(Failure.CONNECT, why, is_gone=error.is_gone) from None
        else:
            self.is_whole = True
            return sent
        finally:
            self.worker.attempts.discard(self.give_up)
            if connection is not None and not self._is_over:
                connection.abort()

    def _begin(self) -> None:
        """Reset the state: the same object may have made an attempt before, on a stale
        connection.
        """
        self._error = None
        self._woken.clear()
        self._is_over = self._is_stale = False
        self._pieces.clear()
        self._size = 0

    async def _connected(self) -> EngineConnection:
        """A new connection. Raises NoConnection, or LegFailure if there is none in
        CONNECT_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as self._connecting:
                return await self._place.connected()
        except TimeoutError:
            raise self._error or LegFailure(Failure.SILENT, "no connection in time") from None
        finally:
            self._connecting = None

    def give_up(self) -> None:
        """End the attempt because its engine is silent; nothing if an answer has begun."""
        if not (self.has_answered or self._is_over):
            self.end(LegFailure(Failure.SILENT, "the engine is silent"))

    def end(self, error: Exception) -> None:
        """Make `run` raise this error, or an earlier one; for attempts whose answer has
        not begun.
        """
        if self._error is None:
            self._error = error
            if self._connecting is not None:
                self._connecting.reschedule(self._loop.time())
            self._woken.set()

    def _fault(self) -> Fault | None:
        return fault_of(
            self.status,
            is_put_off=any(name.lower() == b"retry-after" for name, _ in self._headers),
            has_client_key=self._has_client_key,
            body=b"".join(self._pieces) if self.status in _READ else b"",
        )

    def _refused(self, fault: Fault) -> LegFailure:
        why = f"status {self.status}"
        answer: web.Response | None = None
        if self.status < HTTPStatus.BAD_REQUEST:
            why += ": it sends requests elsewhere: its address is that of another server"
        elif self.status in _NO_ENTRY and fault.failure is Failure.STATUS:
            why += ": it does not take the router's key (--worker-key-file)"
        else:
            answer = web.Response(
                status=self.status,
                headers=heads.readable(heads.back(self._headers)),
                body=b"".join(self._pieces)[:ERROR_BYTES_MAX],
            )
        return LegFailure(fault.failure, why, answer=answer, lack=fault.lack)

    # ── what the engine's connection says ────────────────────────────────────────────────────────

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        """As `AnswerTaker`: keep or relay a piece of the engine's answer."""
        self._is_over, self._headers = is_over, self._connection.headers
        if self._error is not None:  # the task runs next, and ends by that
            return
        self.worker.heard_s = self._loop.time()
        is_refusal = False
        if not self.has_answered:
            self.status = self._connection.status
            is_odd = self.status != HTTPStatus.OK
            is_refusal = is_odd and (self.status in _READ or self._fault() is not None)
        if not (self.has_answered or is_refusal):
            try:
                self._on_first()
            except Beaten as error:
                self._error = error
                self._woken.set()
                return
            self.has_answered = True
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
            self._woken.set()

    def broke(self, why: str, *, is_stale: bool) -> None:
        """As `AnswerTaker`: `run` raises, or asks again over another connection if this one was
        stale.
        """
        self._is_stale = is_stale and self._error is None
        if not (self._is_stale or self._error):
            why = f"the answer broke off: {why}"
            self._error = LegFailure(Failure.BROKEN, why, has_streamed=self._has_begun)
        self._woken.set()

    @property
    def has_ended(self) -> bool:
        """Whether the stream has said that it is over: clients may leave then."""
        is_over = self._is_completed or any(end in self.tail for end in _ENDS)
        return self.has_answered and is_over

    async def _news(self) -> None:
        """Wait to be woken. Raises the error that ended the attempt, if there is one."""
        await self._woken.wait()
        self._woken.clear()
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
        elif length is not None and self.status not in NO_BODY:
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
        """Write a piece to the client, after `head`, with chunk framing where needed. Pauses the
        engine's connection if the client does not keep up.
        """
        transport = self.request.transport
        if transport is None or transport.is_closing():
            self._error = ConnectionResetError("the client has left")
            self._woken.set()
            return
        self._is_completed |= _COMPLETED in self.tail[-len(_COMPLETED) :] + piece
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
            self._woken.set()
            return
        if self.request.protocol.writing_paused and not self._is_behind:
            self._is_behind = True
            self._connection.pause()
            self._woken.set()

    async def _drained(self) -> None:
        """Wait until the client has read. Raises ClientStalled after STALL_S."""
        try:
            async with asyncio.timeout(STALL_S):
                await self.request.writer.drain()
        except TimeoutError:
            raise ClientStalled from None


class Relayed(web.StreamResponse):
    """An answer whose bytes are written already: aiohttp has nothing to add."""

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
    """Cached prompt tokens, as the engine reports them at the end of its answer; None: it reports
    none, or an impossible number.
    """
    return _last(_CACHED, tail)


def prompt_tokens_of(tail: bytes) -> int:
    """Prompt tokens, as the engine reports them at the end of its answer; 0: it reports none."""
    return _last(_PROMPT, tail) or 0


def output_tokens_of(tail: bytes) -> int:
    """Output tokens, as the engine reports them at the end of its answer; 0: it reports none."""
    return _last(_MADE, tail) or 0


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
