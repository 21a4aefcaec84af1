"""HTTP/1.1 to engines: connections that are kept; whole answers, and those that go to a client.

    idle ─▶ ask(head + body) ─▶ listener.heard(piece, …) … heard(…, is_over=True) ─▶ idle
                                         └─▶ listener.broke(why)      abort ─▶ closed, engine aborts
    listeners: `calls`, for the router itself      `Attempt`, for a client

Chunks of one read are joined into one call, and the end of the answer comes with the last of them.
An answer is bounded by who listens: `pause` holds the engine back, heads have HEAD_BYTES_MAX. A
kept connection that ends before the first byte of an answer is stale: the request goes once over a
new one, and nothing is said of the engine. A router without descriptors waits for one (`trouble`):
that is no fault of an engine, either. Kernels find hosts that are gone (keep-alive of TCP).

Covers: bytes from and to one engine, and on to the client. Does not cover: other engines, counts
and headers for engines (`front.proxy`), whole answers (`calls`).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from http.client import responses
from typing import Final, NoReturn, Protocol, cast

import httptools
import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict, istr
from yarl import URL

from kvstore.net.aio import HostAddresses, end_now
from kvstore.router.engines.failures import (
    NO_ENTRY,
    READ,
    Beaten,
    LegFailure,
    NoConnection,
    fault_of,
    unreached,
    why_no_connection,
)
from kvstore.router.engines.workers import Worker
from kvstore.routing.events import Failure, Fault

KEEPALIVE_S: Final = 3.0
"""Time for which an idle connection is kept: less than the 5 s after which engines close them."""
HEAD_BYTES_MAX: Final = 64 << 10
JOINED_BYTES_MAX: Final = 64 << 10
"""Bodies up to this are sent in one write with their head."""
ROUTERS: Final = "X-Kvstore-Routers"
"""Header with the names of the routers that a request has passed, comma-separated, the sender's
last.
"""
OWN_WAIT_S: Final = 0.05
_OWN_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_GONE: Final = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_INFORMATIONAL: Final = 200
NO_BODY: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_LENGTH_CHARACTERS: Final = len("content-length")


class AnswerTaker(Protocol):
    """Listener that takes an answer, on the loop, in order."""

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        """Bytes of the body; the first call follows the head. `is_over`: these are the last."""

    def broke(self, why: str, *, is_stale: bool) -> None:
        """The connection has ended before the answer. Nothing follows. `is_stale`: it was kept from
        an earlier request, and no byte of an answer came."""


class EngineConnection(asyncio.Protocol):
    """One connection; one request at a time. `status`, `headers` and `length` are those of the
    answer, from the first `heard` on."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._listener: AnswerTaker | None = None
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._is_headed = self._is_over = self._is_kept = self._is_paused = False
        self._is_used = self._has_heard = False
        """An answer came over this connection before; a byte of the current one has come."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.length: int | None = None
        """Length of the answer's body by its head; None: not given."""

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed or closing, so that no request gets an answer here."""
        return self._transport is None or self._transport.is_closing()

    def ask(self, head: bytes, body: bytes, listener: AnswerTaker) -> None:
        """Send a request; its answer goes to the listener."""
        self._listener = listener
        self._is_headed = self._is_over = self._has_heard = False
        self._head_bytes = 0
        self.headers = []
        transport = self._transport
        if transport is None or transport.is_closing():
            self._listener = None
            listener.broke("the engine has closed the connection", is_stale=True)
        elif len(body) <= JOINED_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def pause(self) -> None:
        """Stop reading from the engine until `resume`."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read from the engine again."""
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once: an engine whose answer is not over aborts the request."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    # ── asyncio.Protocol ─────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._place.forget(self)
        listener, self._listener = self._listener, None
        if listener is None:
            return
        names = (name.lower() for name, _ in self.headers)
        is_framed = self.length is not None or b"transfer-encoding" in names
        if exc is None and self._is_headed and not is_framed:
            listener.heard(b"", is_over=True)
        else:
            why = str(exc) if exc is not None else "the engine closed the connection"
            listener.broke(why, is_stale=self._is_used and not self._has_heard)

    def data_received(self, data: bytes) -> None:
        if self._listener is None:  # an answer that nobody asked for
            self.abort()
            return
        self._has_heard = True
        try:
            self._parser.feed_data(data)
            if not self._is_headed:  # parts of a header are kept by the parser
                self._count_head(len(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            listener, self._listener = self._listener, None
            self.abort()
            listener.broke(f"no HTTP that fits: {error}"[:200], is_stale=False)
            return
        if self._is_headed and (self._pieces or self._is_over):
            self._tell()

    def _tell(self) -> None:
        pieces, self._pieces = self._pieces, []
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        listener, is_over = self._listener, self._is_over
        assert listener is not None
        if is_over:
            self._listener = None
            self.resume()
            self._keep()
        listener.heard(piece, is_over=is_over)

    def _keep(self) -> None:
        transport = self._transport
        assert transport is not None
        is_sent = not transport.get_write_buffer_size()  # it may answer before it has read
        if self._is_kept and is_sent:
            self._is_used = True
            self._place.keep(self)
        else:
            transport.abort()

    # ── callbacks of the parser ──────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self._is_over:
            raise httptools.HttpParserError("a second answer")

    def _count_head(self, more: int) -> None:
        self._head_bytes += more
        if self._head_bytes > HEAD_BYTES_MAX:
            raise httptools.HttpParserError("its head is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if self._is_headed:  # a trailer: it would change the head of an answer that came at once
            return
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _INFORMATIONAL:
            return
        self.status, self._is_headed = status, True
        self.length = None
        for name, value in self.headers:
            if len(name) == _LENGTH_CHARACTERS and name.lower() == b"content-length":
                self.length = int(value)
        if status in NO_BODY:
            self.length = 0

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_headed:
            self._is_over, self._is_kept = True, self._parser.should_keep_alive()
        else:
            self.headers = []


class EnginePlaces:
    """Connections to all engines of a router. `context`: TLS for https URLs; `worker_key`: API key
    that the engines take; empty: none.
    """

    def __init__(self, context: ssl.SSLContext | None, worker_key: str = "") -> None:
        self._context = context
        self.authorization = f"Bearer {worker_key}" if worker_key else ""
        self._places: dict[str, _Place] = {}
        self.name = secrets.token_hex(8)
        """Random name of this router in `ROUTERS`, by which a request that comes back is
        recognised.
        """
        self.is_closed = False
        self.trouble = ""
        """Reason why no connection can be opened at all; empty: connections can be opened."""
        self.trouble_s = 0.0
        """When `trouble` was last set, on the clock of the loop."""

    def place(self, url: URL) -> _Place:
        """Connections to the engine at a URL."""
        key = url.authority if url.scheme == "http" else str(url)
        found = self._places.get(key)
        if found is None:
            context = self._context if url.scheme == "https" else None
            found = self._places[key] = _Place(self, url, context)
        return found

    def close(self) -> None:
        """Close idle connections now, and each other one when it becomes idle."""
        self.is_closed = True
        for place in self._places.values():
            place.close()


def request_head(
    method: str, target: str, host: str, headers: list[tuple[str, str]], body_bytes: int
) -> bytes:
    """The head of a request to an engine."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    text = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{''.join(lines)}"
    head = f"{text}Content-Length: {body_bytes}\r\n".encode("utf-8", "surrogateescape")
    return whole_head(head, len(lines) + 3)


def whole_head(head: bytes, line_count: int) -> bytes:
    """The head with its final blank line. Raises ValueError if it does not have `line_count` lines:
    a header has a line break inside.
    """
    if head.count(b"\n") != line_count or head.count(b"\r") != line_count:
        raise ValueError("a header with a line break")  # no parser lets one through
    return head + b"\r\n"


class _Place:
    """One engine's address, and connections to it."""

    def __init__(self, engines: EnginePlaces, url: URL, context: ssl.SSLContext | None) -> None:
        self._engines, self._url, self._context = engines, url, context
        self.host = url.host_port_subcomponent or ""
        """Value of the `Host` header."""
        self._addresses = HostAddresses(url.host or "")
        self._idle: dict[EngineConnection, asyncio.TimerHandle] = {}
        """Idle connections, each with the timer that closes it; the one that was used last is the
        last.
        """

    def idle(self) -> EngineConnection | None:
        """The idle connection that was used last; None: there is none."""
        while self._idle:
            connection, closing = self._idle.popitem()
            closing.cancel()
            if not connection.is_closing:
                return connection
        return None

    async def connected(self, limit: asyncio.Timeout | None = None) -> EngineConnection:
        """A new connection. `limit`: of the caller, lifted before a TLS handshake: an engine whose
        machine answers is slow, not gone. Raises NoConnection.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                transport, connection = await self._reached()
                if self._context is not None:
                    if transport.is_closing():  # uvloop makes a connection of it all the same
                        raise ConnectionResetError("it closed the connection before TLS")
                    if limit is not None:
                        limit.reschedule(None)
                    tls = await loop.start_tls(
                        transport, connection, self._context, server_hostname=self._url.host
                    )
                    if tls is None or tls.is_closing():
                        raise ConnectionResetError("it closed the connection in the TLS handshake")
                    connection.connection_made(tls)
            except OSError as error:
                why = why_no_connection(error)
                if error.errno not in _OWN_ERRORS:
                    is_gone = error.errno in _GONE or isinstance(error, socket.gaierror)
                    raise NoConnection(why, is_gone=is_gone) from None
                self._engines.trouble = f"no connection to an engine can be opened: {why}"
                self._engines.trouble_s = loop.time()
                await asyncio.sleep(OWN_WAIT_S)
            else:
                self._engines.trouble = ""
                return connection

    async def _reached(self) -> tuple[asyncio.Transport, EngineConnection]:
        """A connection without TLS, to the first address that takes one. Raises OSError."""
        loop, refused = asyncio.get_running_loop(), self._addresses.unknown
        for address in await self._addresses.now():
            try:
                return await loop.create_connection(
                    lambda: EngineConnection(self), address, self._url.port or 0
                )
            except OSError as error:
                refused = error
        raise refused

    def keep(self, connection: EngineConnection) -> None:
        """Keep a connection that is idle now."""
        if self._engines.is_closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.call_later(KEEPALIVE_S, connection.abort)

    def forget(self, connection: EngineConnection) -> None:
        """Drop a connection that is closed."""
        if (closing := self._idle.pop(connection, None)) is not None:
            closing.cancel()

    def close(self) -> None:
        while (connection := self.idle()) is not None:
            connection.abort()
        self._addresses.close()


# ── heads of answers ──────────────────────────────────────────────────────────────────────────────
# Headers of an engine's answer on their way to the client. Framing is never copied: each side has
# its own.

SERVER: Final = istr("Server")
CONNECTION: Final = istr("Connection")
CONTENT_LENGTH: Final = istr("Content-Length")
TRANSFER_ENCODING: Final = istr("Transfer-Encoding")
REQUEST_ID: Final = istr("X-Request-Id")
WORKER: Final = istr("X-Kvstore-Worker")
HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "upgrade"),
        *("proxy-authorization", "te", "trailer", "trailers", "transfer-encoding"),
        *("content-length", "host", "expect"),
    }
)
_OWN: Final = ("x-kvstore-", "access-control-")
"""Prefixes of header names that only the router sets for clients."""


def back(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of an engine's answer that go to the client. The name and version of its server are
    replaced.
    """
    kept, named = [], set[bytes]()
    for pair in headers:
        if _comes_back(pair[0]):
            kept.append(pair)
        elif pair[0].lower() == b"connection":
            named.update(name.strip() for name in pair[1].lower().split(b","))
    if named:
        kept = [pair for pair in kept if pair[0].lower() not in named]
    kept.append((b"Server", b"kvstore"))
    return kept


def readable(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Headers of an engine as text, undecodable bytes escaped."""
    return CIMultiDict(
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        for name, value in headers
    )


def answer_head(status: int, headers: list[tuple[bytes, bytes]], more: Mapping[str, str]) -> bytes:
    """The whole head for a client. `more`: headers that are added, or replace the engine's."""
    replaced, has_date = _lows(tuple(more)), False
    lines = [_status_line(status)]
    for name, value in headers:
        low = name.lower()
        if low not in replaced:
            has_date = has_date or low == b"date"
            lines.append(b"%b: %b\r\n" % (name, value))
    if not has_date:
        lines.append(_date_line(int(time.time())))
    for key, text in more.items():
        lines.append(f"{key}: {text}\r\n".encode("utf-8", "surrogateescape"))
    return whole_head(b"".join(lines), len(lines))


@functools.lru_cache(maxsize=64)
def _lows(names: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(name.lower().encode("ascii") for name in names)


@functools.lru_cache(maxsize=1)
def _date_line(now_s: int) -> bytes:
    return f"Date: {formatdate(now_s, usegmt=True)}\r\n".encode("ascii")


@functools.lru_cache(maxsize=64)
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {responses.get(status, '')}\r\n".encode("ascii")


@functools.lru_cache(maxsize=512)
def _comes_back(name: bytes) -> bool:
    low = name.decode("latin-1").lower()
    return not (low in HOP_BY_HOP or low == "server" or low.startswith(_OWN))


def cut(request: web.BaseRequest, why: str) -> NoReturn:
    """Close the client's connection, so that it does not take half an answer for a whole one.
    Raises ConnectionResetError.
    """
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError(why)


# ── attempts ──────────────────────────────────────────────────────────────────────────────────────
# One attempt: a request at one worker, its answer streamed to the client.
#
#     run ─▶ headers ─▶ first piece ─▶ client's headers ─▶ piece, piece, … ─▶ end
#             └──────── LegFailure, the client has seen nothing ───┘   └─ broken: both ends cut off
#
# Nothing reaches the client before the first piece of the body, so that up to there another worker
# can take over. From there on pieces go as they come, from the engine's connection to the client's
# without a task in between: a client that does not read stops the reading of the engine's answer,
# for STALL_S at most. A client that leaves cancels the task, which closes the engine's connection,
# by which the engine aborts the request.
#
# No time limit ends an attempt: an engine that answers its probes is slow, not broken. `give_up`
# does, where the core finds its engine silent. A TCP connection that is not there within
# CONNECT_TIMEOUT_S is looked for at another engine.

CONNECT_TIMEOUT_S: Final = 2.0
STALL_S: Final = 600.0
"""Longest time for which a client may not read."""
ERROR_BYTES_MAX: Final = 1 << 20
WHOLE_BYTES_MAX: Final = 256 << 10
"""An answer of a known length up to this goes in one piece."""
TAIL_BYTES: Final = 4096
LAST_CHUNK: Final = b"0\r\n\r\n"
_COMPLETED: Final = b"event: response.completed"
_ENDS: Final = (b"data: [DONE]", b"event: message_stop", _COMPLETED)


class Attempt(msgspec.Struct, eq=False):
    """One attempt at one worker; see the module. `tail` and `status` are there after `run`,
    `has_answered` from the answer's first piece on, `is_whole` when all of it was sent.
    """

    engines: EnginePlaces
    worker: Worker
    request: web.BaseRequest
    status: int = 0
    tail: bytes = b""
    """Last TAIL_BYTES of the answer's body."""
    has_answered: bool = False
    is_whole: bool = False
    _is_completed: bool = False
    """The last event of `/v1/responses` has begun, which may be longer than the tail."""
    _connecting: asyncio.Timeout | None = None
    _has_begun: bool = False
    """The client has got a piece: further pieces go to it as they come."""
    _is_over: bool = False
    _is_chunked: bool = False
    _is_stale: bool = False
    _is_behind: bool = False
    """The client does not read as fast as the engine writes."""
    _pieces: list[bytes] = msgspec.field(default_factory=list)
    """Pieces that are not sent yet, of `_size` bytes in all."""
    _size: int = 0
    _error: Exception | None = None
    _woken: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when the task has something to do."""
    _connection: EngineConnection | None = None
    _headers: list[tuple[bytes, bytes]] = []
    """Headers of the answer, kept here since the connection may have another request before the
    task runs.
    """
    _on_first: Callable[[], None] = lambda: None
    _has_client_key: bool = True

    async def run(
        self,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        on_first: Callable[[], None],
        more: dict[str, str],
        has_client_key: bool = True,
    ) -> bool:
        """Send the request, and the answer to the client. Returns when all of it is sent: whether
        the client's connection is kept.

        Args:
            headers: for the engine.
            body: for the engine.
            on_first: called with the first piece of the answer, before it is sent.
            more: headers for the client.
            has_client_key: as of `fault_of`.

        Raises:
            LegFailure: the engine failed.
            Beaten: `on_first` raised it.
            ConnectionError: the client does not read, or has left.
        """
        self._on_first, self._has_client_key = on_first, has_client_key
        target, place = self.request.rel_url.raw_path_qs, self.engines.place(self.worker.url)
        head = request_head(self.request.method, target, place.host, headers, len(body))
        connection = place.idle()
        self.worker.attempts.add(self.give_up)
        try:
            while True:
                self._begin()
                connection = self._connection = connection or await self._connected(place)
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
            is_kept = await self._pass_on(connection, more)
        except NoConnection as error:
            raise unreached(error) from None
        else:
            self.is_whole = True
            return is_kept
        finally:
            self.worker.attempts.discard(self.give_up)
            if connection is not None and not self._is_over:
                connection.abort()

    def _begin(self) -> None:
        """Reset the state: the same object may have made an attempt before, on a stale connection
        or beside a prefill.
        """
        self._error = None
        self._woken.clear()
        self._is_over = self._is_stale = False
        self._pieces.clear()
        self._size = 0

    async def _connected(self, place: _Place) -> EngineConnection:
        """A new connection. Raises NoConnection, or LegFailure if there is none in
        CONNECT_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as self._connecting:
                return await place.connected(self._connecting)
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
                end_now(self._connecting)
            self._woken.set()

    def _fault(self) -> Fault | None:
        if self.status == HTTPStatus.OK:
            return None
        return fault_of(
            self.status,
            is_put_off=any(name.lower() == b"retry-after" for name, _ in self._headers),
            has_client_key=self._has_client_key,
            body=b"".join(self._pieces) if self.status in READ else b"",
        )

    def _refused(self, fault: Fault) -> LegFailure:
        why = f"status {self.status}"
        answer: web.Response | None = None
        if self.status < HTTPStatus.BAD_REQUEST:
            why += ": it sends requests elsewhere: its address is that of another server"
        elif self.status in NO_ENTRY and fault.failure is Failure.STATUS:
            why += ": it does not take the router's key (--worker-key-file)"
        else:
            answer = web.Response(
                status=self.status,
                headers=readable(back(self._headers)),
                body=b"".join(self._pieces)[:ERROR_BYTES_MAX],
            )
        return LegFailure(fault.failure, why, answer=answer, lack=fault.lack)

    # ── what the engine's connection says ────────────────────────────────────────────────────────

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        """As `AnswerTaker`: keep or relay a piece of the engine's answer."""
        connection = self._connection
        assert connection is not None
        self._is_over, self._headers = is_over, connection.headers
        if self._error is not None:  # the task runs next, and ends by that
            return
        self.worker.heard_s = asyncio.get_running_loop().time()
        is_refusal = False
        if not self.has_answered:
            self.status = connection.status
            is_refusal = self.status in READ or self._fault() is not None
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
        length = connection.length
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

    async def _pass_on(self, connection: EngineConnection, more: dict[str, str]) -> bool:
        request = self.request
        is_modern = request.version >= HttpVersion11
        is_kept = is_modern and request.keep_alive
        if not is_kept:
            more[CONNECTION] = "close"
        length = connection.length if not self._is_over else self._size
        if length is None and is_modern:
            self._is_chunked = True
            more[TRANSFER_ENCODING] = "chunked"
        elif length is not None and self.status not in NO_BODY:
            more[CONTENT_LENGTH] = str(length)
        first = b"".join(self._pieces)
        self._pieces.clear()
        self._has_begun = not self._is_over
        self._relay(first, answer_head(self.status, back(self._headers), more))
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
        return is_kept

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
            assert self._connection is not None
            self._connection.pause()
            self._woken.set()

    async def _drained(self) -> None:
        """Wait until the client has read. Cuts its connection after STALL_S."""
        try:
            async with asyncio.timeout(STALL_S):
                await self.request.writer.drain()
        except TimeoutError:
            cut(self.request, "the client did not read")
