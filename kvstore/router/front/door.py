"""The listening end of the proxy: bounded in connections, heads and time.

    accept ─▶ room? else the oldest connection without a request gives way ─▶ head ─▶ proxy
    no room, or no descriptor ─▶ the next connection waits in the kernel until there is

A connection without a request costs a descriptor for IDLE_S at most. Heads are parsed by llhttp in
its strict mode; a request with both kinds of framing, or with a transfer coding besides chunked, is
refused all the same, and bodies are bounded, too (`intake`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from itertools import chain, islice
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from kvstore.client.tls import Tls
from kvstore.router.engines.connections import CONNECTION, CONTENT_LENGTH, answer_head
from kvstore.router.front.answers import error_response
from kvstore.router.front.intake import BODIES_SHARE, NO_MEMORY, Bodies

HEAD_BYTES_MAX: Final = 4 << 20
"""Longest head: vLLM's bound where it parses them with h11. With httptools it has none."""
FREE_BYTES: Final = 32 << 10
"""Bytes of a head that cost nothing; further ones count against the memory for bodies."""
HEADERS_MAX: Final = 1 << 14
"""uvicorn has no such bound; more would hold the loop for too long."""
IDLE_S: Final = 75.0
GIVES_WAY_S: Final = 2.0
"""Time without a request after which a connection gives way to a new one, whose request is on its
way.
"""
PAUSE_S: Final = 0.05
LOG_EVERY_S: Final = 60.0
_BACKLOG: Final = 1024
NEEDS_TLS: Final = "this port speaks TLS: use https://"
FIRST_BYTE_S: Final = 60.0
LONG_HEAD: Final = f"the head is longer than {HEAD_BYTES_MAX} bytes"

Answer = Callable[[web.BaseRequest, bytes | None], Awaitable[web.StreamResponse]]
"""Takes a request, and its body if all of it came together with the head."""
_log = logging.getLogger(__name__)
_http_log = logging.getLogger(__name__ + ".http")


def _is_bug(record: logging.LogRecord) -> bool:
    """Log filter: false for errors of malformed heads. Each would otherwise be logged, with bytes
    of the client.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, HttpProcessingError)


_http_log.addFilter(_is_bug)


class _Connection(RequestHandler):
    """One client's connection. Errors of the parser are answered in OpenAI's form, too."""

    __slots__ = ("_door", "_head_bytes")

    def __init__(self, door: FrontDoor, **settings: Any) -> None:
        super().__init__(door, **settings)
        self._door, self._head_bytes = door, 0

    def data_received(self, data: bytes) -> None:
        count, was_in_head = self._request_count, self._is_in_head
        super().data_received(data)
        if self._request_count != count or not (was_in_head and self._is_in_head):
            if not self._messages or self._head_bytes + len(data) <= FREE_BYTES:
                self._count(0)
                return
            self._pause_reading_for_buffer()  # a long head waits behind a request, and counts
        is_room = self._count(self._head_bytes + len(data))
        is_long = self._head_bytes > HEAD_BYTES_MAX
        if (is_long or not is_room) and self.transport is not None:
            if self._current_request is None:  # else its answer may be half sent
                self.transport.write(_refusal(LONG_HEAD) if is_long else _refusal(NO_MEMORY, 503))
            self.transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._count(0)
        super().connection_lost(exc)

    def _count(self, size: int) -> bool:
        """Set the length of the head that is coming, and its share of the memory, of which such
        heads get a half: they have shown no API key yet. Returns whether there is room.
        """
        before, self._head_bytes = self._head_bytes, size
        more = max(size, FREE_BYTES) - max(before, FREE_BYTES)
        self._door.head_bytes += more
        is_fair = self._door.head_bytes <= self._door.memory.bytes_max * BODIES_SHARE // 2
        return not more or (self._door.memory.take(more) and is_fair)

    @property
    def _is_in_head(self) -> bool:
        """Whether the next bytes belong to a head, which may be behind a request under way."""
        if self._messages:
            return self._messages[-1][1].is_eof()
        request = self._current_request
        return self._waiter is not None if request is None else request.content.is_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self.log_exception("Error handling request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        text, code = "the router failed at this request", "server_error"
        if status < 500:
            framing = f"the head is badly framed, or has more than {HEADERS_MAX} headers"
            text, code = LONG_HEAD if isinstance(exc, LineTooLong) else framing, "bad_request"
        answer = error_response(status, text, code)
        answer.force_close()
        return answer


def _refusal(sentence: str, status: int = 400) -> bytes:
    """A whole response, as bytes, for input that is read no further."""
    body = error_response(status, sentence, "bad_request").body
    assert isinstance(body, bytes)
    own = [(b"Server", b"kvstore"), (b"Content-Type", b"application/json")]
    more: dict[str, str] = {CONTENT_LENGTH: str(len(body)), CONNECTION: "close"}
    return answer_head(status, own, more) + body


class Relayed(web.StreamResponse):
    """An answer whose bytes are written already: aiohttp has nothing to add. `is_kept`: further
    requests may come over its connection.
    """

    is_kept = True

    @property
    def keep_alive(self) -> bool:
        return self.is_kept

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class FrontDoor(web.Server):
    """Serves connections with `answer`, at most `connections_max` of them. Use `open_door`."""

    def __init__(self, answer: Answer, *, connections_max: int, memory: Bodies) -> None:
        super().__init__(
            self._one,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            max_line_size=HEAD_BYTES_MAX,
            max_field_size=HEAD_BYTES_MAX,
            max_headers=HEADERS_MAX,
            access_log=None,
            auto_decompress=False,
            lingering_time=1.0,
            logger=_http_log,
        )
        self._answer, self.connections_max, self.memory = answer, connections_max, memory
        self._idle: dict[RequestHandler, tuple[asyncio.Transport, float]] = {}
        """Connections without a request → (transport, since when); the longest idle first."""
        self.connection_count = self.head_bytes = 0
        self.refused_count = 0
        """Number of idle connections that were closed to make room."""
        self.trouble = ""
        """Reason why no connection is accepted now; empty: connections are accepted."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def has_room(self, coming: int) -> bool:
        """Whether one more connection can be served, perhaps in the place of an idle one. `coming`:
        connections that are accepted and not counted yet.
        """
        excess = self.connection_count + coming - self.connections_max
        return excess < 0 or self._gives_way(excess)

    def _gives_way(self, place: int) -> bool:
        """Whether the idle connection at this place of `_idle` is idle for long enough to be
        closed.
        """
        _, since_s = next(islice(self._idle.values(), place, None), (None, math.inf))
        return since_s + GIVES_WAY_S <= self._loop.time()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.connection_count += 1
        if self.connection_count > self.connections_max and self._gives_way(0):
            self.refused_count += 1
            self._idle.pop(next(iter(self._idle)))[0].abort()
        self._idle[handler] = transport, self._loop.time()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.connection_count -= 1
        self._idle.pop(handler, None)

    def pre_shutdown(self) -> None:
        """Close connections after their requests, and those without one now: aiohttp would keep
        these open, and answer nothing over them."""
        super().pre_shutdown()
        for transport, _ in list(self._idle.values()):
            transport.close()

    async def _one(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        transport, _ = self._idle.pop(handler, (None, 0.0))
        taken = max(0, sum(map(len, chain([request.raw_path], *request.raw_headers))) - FREE_BYTES)
        try:
            if taken and not self.memory.take(taken):
                answer = error_response(503, NO_MEMORY, "bad_request")
                answer.force_close()
                return answer
            content, whole = request.content, None
            if content.is_eof() and content.exception() is None:
                whole = content.read_nowait()
            return await self._answer(request, whole)
        except ConnectionError:
            # The answer broke off: cuts the connection. aiohttp would log the error as a bug.
            raise asyncio.CancelledError from None
        finally:
            self.memory.left += taken
            if transport is not None and not transport.is_closing():
                self._idle[handler] = transport, self._loop.time()


def server_context(tls: Tls, *, demands_certificates: bool) -> ssl.SSLContext:
    """TLS of the proxy. With API keys clients need no certificate, without them one of the CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The ssl module takes files only, and a container may have no directory to write to.
    with open(os.memfd_create("pair.pem"), "wb", buffering=0) as pair:
        pair.write(tls.key + b"\n" + tls.cert)
        context.load_cert_chain(f"/proc/self/fd/{pair.fileno()}")
    if demands_certificates:
        context.load_verify_locations(cadata=tls.ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class OpenDoor:
    """A listening socket: connections are accepted while the door has room."""

    def __init__(
        self, door: FrontDoor, sock: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        self._door, self._sock, self._context = door, sock, context
        self._loop = asyncio.get_running_loop()
        self._coming: dict[asyncio.Task[None], float] = {}
        """Tasks of connections in their handshake → since when; longest first."""
        self._resuming: asyncio.TimerHandle | None = None
        self._silent_until_s = 0.0
        self.port: int = sock.getsockname()[1]
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        """Accept one connection per turn of the loop, so that a crowd does not hold up the answers
        under way.
        """
        if not (self._door.has_room(len(self._coming)) or self._gives_way()):
            self._pause("every connection of clients is in use (--connections)")
            return
        try:
            accepted, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(f"no connection can be accepted: {(error.strerror or '').lower()}")
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._serve(accepted))
        self._coming[task] = self._loop.time()
        task.add_done_callback(lambda task: self._coming.pop(task, None))

    def _gives_way(self) -> bool:
        """End the longest handshake, if it takes long enough. Returns whether it was ended."""
        task, since_s = next(iter(self._coming.items()), (None, math.inf))
        if task is None or since_s + GIVES_WAY_S > self._loop.time():
            return False
        del self._coming[task]
        return task.cancel()

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            if self._context is not None and await self._is_http(accepted):
                await self._loop.sock_sendall(accepted, _refusal(NEEDS_TLS))
                accepted.close()
                return
            await self._loop.connect_accepted_socket(self._door, accepted, ssl=self._context)
        except (OSError, asyncio.CancelledError):  # it left, speaks no TLS, or gave way
            accepted.close()

    async def _is_http(self, accepted: socket.socket) -> bool:
        """Whether the client sends an HTTP method in place of TLS. If so, reads it: closing with
        unread bytes would reset the connection, and lose the answer.
        """
        seen = asyncio.Event()
        self._loop.add_reader(accepted, seen.set)
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                await seen.wait()
        finally:
            self._loop.remove_reader(accepted)
        is_http = accepted.recv(1, socket.MSG_PEEK).isalpha()
        if is_http:
            accepted.recv(FREE_BYTES)
        return is_http

    def _pause(self, why: str) -> None:
        """Accept no connection for PAUSE_S; clients wait in the kernel meanwhile."""
        now_s = self._loop.time()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + LOG_EVERY_S
            _log.warning("connections wait: %s", why)
        self._door.trouble = why
        self._loop.remove_reader(self._sock)
        self._resuming = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        if self._door.has_room(0):
            self._door.trouble = ""
        self._loop.add_reader(self._sock, self._accept)
        self._accept()

    def close(self) -> None:
        """Close the listening socket."""
        if self._resuming is not None:
            self._resuming.cancel()
        else:
            self._loop.remove_reader(self._sock)
        self._sock.close()


def open_door(
    door: FrontDoor, host: str, port: int, *, context: ssl.SSLContext | None, is_shared: bool
) -> OpenDoor:
    """Listen. `is_shared`: other processes of this router have the same port. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=is_shared)
    sock.setblocking(False)
    return OpenDoor(door, sock, context)
