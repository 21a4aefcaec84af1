"""HTTP/1.1 to engines: connections that are kept, and answers as they come, without a task a piece.

    idle ─▶ ask(head + body) ─▶ listener.heard(piece, …) … heard(…, is_over=True) ─▶ idle
                                         └─▶ listener.broke(why)      abort ─▶ closed, engine aborts

Chunks of one read are joined into one call, and the end of the answer comes with the last of them.
An answer is bounded by who listens: `pause` holds the engine back, heads have HEAD_BYTES_MAX. A
kept connection that ends before the first byte of an answer is stale: the request goes once over a
new one, and nothing is said of the engine. A router without descriptors waits for one (`trouble`):
that is no fault of an engine, either. Kernels find hosts that are gone (keep-alive of TCP).

Covers: bytes to and from one engine; whole answers for the router itself (`fetch`). Does not cover:
time limits, retries at other engines (`front.attempt`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import ssl
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol, cast

import httptools
from yarl import URL

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
_OWN: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_GONE: Final = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_INFORMATIONAL: Final = 200
NO_BODY: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_LENGTH_CHARACTERS: Final = len("content-length")


class NoConnection(Exception):
    """The engine cannot be reached; says why in one clause. `is_gone`: nothing listens there."""

    def __init__(self, why: str, *, is_gone: bool) -> None:
        super().__init__(why)
        self.is_gone = is_gone


class NoAnswer(Exception):
    """The answer broke off, or is no HTTP; says why in one clause."""


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


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
        self.idle_since_s = 0.0
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
        if exc is None and self._is_headed and self._ends_with_connection:
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

    @property
    def _ends_with_connection(self) -> bool:
        return self.length is None and all(
            name.lower() != b"transfer-encoding" for name, _ in self.headers
        )

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


class _Whole:
    """Collects a whole answer of at most `bytes_max` bytes, as an AnswerTaker."""

    def __init__(self, connection: EngineConnection, bytes_max: int) -> None:
        self._connection, self._bytes_max = connection, bytes_max
        self._pieces: list[bytes] = []
        self._size = 0
        self.done: asyncio.Future[HttpAnswer | None] = asyncio.get_running_loop().create_future()
        """Result: the answer, or NoAnswer; None: the connection was stale."""

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self.done.done():
            return
        if self._size > self._bytes_max:
            self.done.set_exception(NoAnswer("the answer is too large"))
        elif is_over:
            headers = self._connection.headers
            whole = HttpAnswer(self._connection.status, headers, b"".join(self._pieces))
            self.done.set_result(whole)

    def broke(self, why: str, *, is_stale: bool) -> None:
        if not self.done.done():
            if is_stale:
                self.done.set_result(None)
            else:
                self.done.set_exception(NoAnswer(why))


class EngineHttp:
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

    async def fetch(
        self,
        url: URL,
        *,
        headers: list[tuple[str, str]] | None = None,
        body: bytes = b"",
        bytes_max: int,
    ) -> HttpAnswer:
        """A whole answer, whatever its status, without a time limit. `headers`: all of them; None:
        those of the router's own requests. `body`: JSON to POST; empty: GET.

        Raises:
            NoConnection: the engine cannot be reached.
            NoAnswer: its answer broke off, or is too large.
        """
        place = self.place(url)
        if headers is None:
            headers = [(ROUTERS, self.name)]
            headers += [("Authorization", self.authorization)] * bool(self.authorization)
            headers += [("Content-Type", "application/json")] * bool(body)
        method = "POST" if body else "GET"
        head = request_head(method, url.raw_path_qs, place.host, headers, len(body))
        connection = place.idle()
        while True:
            connection = connection or await place.connected()
            whole = _Whole(connection, bytes_max)
            connection.ask(head, body, whole)
            try:
                found = await whole.done
            except (NoAnswer, asyncio.CancelledError):
                connection.abort()
                raise
            if found is not None:
                return found
            connection = None

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

    def __init__(self, engines: EngineHttp, url: URL, context: ssl.SSLContext | None) -> None:
        self._engines, self._url, self._context = engines, url, context
        self.host = url.host_port_subcomponent or ""
        """Value of the `Host` header."""
        self._idle: list[EngineConnection] = []
        self._sweep: asyncio.TimerHandle | None = None

    def idle(self) -> EngineConnection | None:
        """The idle connection that was used last; None: there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing:
                return connection
        return None

    async def connected(self) -> EngineConnection:
        """A new connection. Raises NoConnection."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self),
                    self._url.host or "",
                    self._url.port or 0,
                    ssl=self._context,
                )
            except OSError as error:
                why = why_no_connection(error)
                if error.errno not in _OWN:
                    is_gone = error.errno in _GONE or isinstance(error, socket.gaierror)
                    raise NoConnection(why, is_gone=is_gone) from None
                self._engines.trouble = f"no connection to an engine can be opened: {why}"
                self._engines.trouble_s = loop.time()
                await asyncio.sleep(OWN_WAIT_S)
            else:
                self._engines.trouble = ""
                return connection

    def keep(self, connection: EngineConnection) -> None:
        """Keep a connection that is idle now."""
        if self._engines.is_closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEPALIVE_S, self._close_old)

    def forget(self, connection: EngineConnection) -> None:
        """Drop a connection that is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = None
        now_s = loop.time()
        # Those in front were not needed for longest.
        while self._idle and self._idle[0].idle_since_s + KEEPALIVE_S <= now_s:
            self._idle.pop(0).abort()
        if self._idle:
            due_s = self._idle[0].idle_since_s + KEEPALIVE_S
            self._sweep = loop.call_at(due_s, self._close_old)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()
        if self._sweep is not None:
            self._sweep.cancel()


def why_no_connection(error: OSError) -> str:
    """Reason for a failed connection, in one clause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message or error}"[:200]
    is_system = error.errno in errno.errorcode and not isinstance(error, ssl.SSLError)
    return os.strerror(error.errno or 0).lower() if is_system else str(error)[:200]
