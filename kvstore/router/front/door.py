"""The listening end of the proxy: bounded in connections, heads, bodies and time.

    accept ─▶ room? else the oldest connection without a request gives way ─▶ head (bounded)
           ─▶ framing that one parser alone would accept: 400 ─▶ body (bounded, in time) ─▶ proxy

A connection without a request costs a descriptor for IDLE_S at most. Bodies of all requests
together have a budget: once it is used up, bodies that are stalled give way. Heads are parsed by
llhttp in its strict mode; a request with both kinds of framing, or with a transfer coding besides
chunked, is refused all the same. Compressed bodies are refused: their size would be known too late.
A client that expects 100-continue gets it after all checks that need no body.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from kvstore.client.tls import Tls
from kvstore.router.front import heads

HEAD_LINE_BYTES_MAX: Final = 8 << 10
HEADERS_MAX: Final = 100
IDLE_S: Final = 75.0
BODY_TIMEOUT_S: Final = 60.0
BODIES_SHARE: Final = 32
"""Bodies of the largest size that fit at a time."""
STALLED_S: Final = 2.0
"""A body that took longer for its last STEP_BYTES gives way where the memory is used up."""
STEP_BYTES: Final = 16 << 10
_BACKLOG: Final = 1024
_CONTINUE: Final = "100-continue"
_NO_MEMORY: Final = "the bodies under way use up their memory"

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_http_log = logging.getLogger(__name__ + ".http")


def _is_bug(record: logging.LogRecord) -> bool:
    """Every malformed head would otherwise be logged, with what the client wrote."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, HttpProcessingError)


_http_log.addFilter(_is_bug)


class BodyRefused(Exception):
    """The body is not read on. Carries the status and one sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FrontDoor(web.Server):
    """Accepts connections for `answer`. Use `open_door`."""

    def __init__(self, answer: Answer, *, connections_max: int) -> None:
        super().__init__(
            self._one,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            max_line_size=HEAD_LINE_BYTES_MAX,
            max_field_size=HEAD_LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            access_log=None,
            auto_decompress=False,
            lingering_time=1.0,
            logger=_http_log,
        )
        self._answer, self._connections_max = answer, connections_max
        self._idle: dict[RequestHandler, asyncio.Transport] = {}
        """Connections without a request, longest silent first."""
        self.connection_count = 0
        self.refused_count = 0

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.connection_count += 1
        self._idle[handler] = transport
        if self.connection_count > self._connections_max:
            self.refused_count += 1
            self._idle.pop(next(iter(self._idle))).abort()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.connection_count -= 1
        self._idle.pop(handler, None)

    async def _one(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        transport = self._idle.pop(handler, None)
        try:
            return await self._answer(request)
        except ConnectionError:
            raise asyncio.CancelledError from None  # aiohttp would log a bug, and answer nobody
        finally:
            if transport is not None and not transport.is_closing():
                self._idle[handler] = transport


class _Coming:
    """A body that is being read."""

    def __init__(self, limit: asyncio.Timeout, now_s: float) -> None:
        self.limit = limit
        self.size = self.step_size = 0
        """Bytes in memory, and those of them at the last step …"""
        self.step_s = now_s
        """… and when that was."""
        self.gives_way = False


class Bodies:
    """Reads bodies, within a budget for all of them."""

    def __init__(self, *, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_max, self._clock = bytes_max, clock
        self._left = bytes_max * BODIES_SHARE
        self._coming: dict[_Coming, None] = {}
        """Longest without a step first."""

    async def read(self, request: web.BaseRequest) -> bytes:
        """The body; its owner calls `release` with its length.

        Raises:
            BodyRefused: framing, coding, size or time.
        """
        _refuse_framing(request)
        announced = request.content_length
        if announced is not None and announced > self.bytes_max:
            raise BodyRefused(413, f"the body has {announced} bytes: at most {self.bytes_max}")
        content = request.content
        if content.is_eof():  # it came together with its head
            body = content.read_nowait()
            if len(body) > self.bytes_max:
                raise BodyRefused(413, f"the body is larger than {self.bytes_max} bytes")
            if not self._takes(len(body)):
                self.release(len(body))
                raise BodyRefused(503, _NO_MEMORY)
            return body
        is_modern, transport = request.version >= HttpVersion11, request.transport
        if heads.EXPECT in request.headers and is_modern and transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        pieces: list[bytes] = []
        coming = _Coming(asyncio.timeout(BODY_TIMEOUT_S), self._clock())
        self._coming[coming] = None
        try:
            async with coming.limit:
                while piece := await content.readany():
                    pieces.append(piece)
                    self._came(coming, len(piece))
                if coming.gives_way:  # in the turn in which its end came
                    raise TimeoutError
        except TimeoutError:
            self.release(coming.size)
            late = f"did not arrive within {BODY_TIMEOUT_S:g} s"
            why = "came too slowly: others need its memory" if coming.gives_way else late
            raise BodyRefused(408, f"the body {why}") from None
        except BaseException:
            self.release(coming.size)
            raise
        finally:
            self._coming.pop(coming, None)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _came(self, coming: _Coming, size: int) -> None:
        if coming.size + size > self.bytes_max:
            raise BodyRefused(413, f"the body is larger than {self.bytes_max} bytes")
        coming.size += size
        if coming.size - coming.step_size >= STEP_BYTES:
            coming.step_size, coming.step_s = coming.size, self._clock()
            if not coming.gives_way:
                del self._coming[coming]
                self._coming[coming] = None
        if not self._takes(size):
            raise BodyRefused(503, _NO_MEMORY)

    def _takes(self, size: int) -> bool:
        """Whether there is room, for which bodies that are stalled give way."""
        self._left -= size
        while self._left < 0 and self._coming:
            slowest = next(iter(self._coming))
            if self._clock() - slowest.step_s < STALLED_S:
                break
            del self._coming[slowest]
            slowest.gives_way = True
            self.release(slowest.size)
            slowest.size = slowest.step_size = 0
            if not slowest.limit.expired():
                slowest.limit.reschedule(asyncio.get_running_loop().time())
        return self._left >= 0

    def release(self, size: int) -> None:
        self._left += size


def _refuse_framing(request: web.BaseRequest) -> None:
    headers = request.headers
    codings = headers.getall(heads.TRANSFER_ENCODING, ())
    lengths = headers.getall(heads.CONTENT_LENGTH, ())
    if len(codings) + len(lengths) > 1 or (codings and codings[0].strip().lower() != "chunked"):
        raise BodyRefused(400, "give one Content-Length, or one Transfer-Encoding: chunked")
    expected = headers.get(heads.EXPECT, _CONTINUE)
    if expected.lower() != _CONTINUE:
        raise BodyRefused(417, f"only {_CONTINUE} can be expected")
    if headers.get(heads.CONTENT_ENCODING, "identity").lower() != "identity":
        raise BodyRefused(415, "compressed bodies are refused: send it without Content-Encoding")


def server_context(tls: Tls, *, demands_certificates: bool) -> ssl.SSLContext:
    """TLS of the proxy. With API keys clients need no certificate, without them one of the CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, tls)
    if demands_certificates:
        context.load_verify_locations(cadata=tls.ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    """The ssl module takes files only; these were read and checked before."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder, "pair.pem")
        pair.touch(mode=0o600)
        pair.write_bytes(tls.key + b"\n" + tls.cert)
        context.load_cert_chain(pair)


async def open_door(
    door: FrontDoor, host: str, port: int, *, context: ssl.SSLContext | None, is_shared: bool
) -> asyncio.Server:
    """Listen. `is_shared`: other processes of this router have the same port. Raises OSError."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(
        door, host, port, ssl=context, backlog=_BACKLOG, reuse_port=is_shared or None
    )
