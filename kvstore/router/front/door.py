"""The listening end of the proxy: bounded in connections, heads, bodies and time.

    accept ─▶ room? else the oldest connection without a request gives way ─▶ head (bounded)
           ─▶ framing that one parser alone would accept: 400 ─▶ body (bounded, in time) ─▶ proxy

A connection without a request costs a descriptor for IDLE_S at most. Bodies of all requests
together have a budget. Heads are parsed by llhttp in its strict mode; a request with both kinds of
framing, or with a transfer coding besides chunked, is refused all the same. Compressed bodies are
refused: their size would be known too late.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from kvstore.client.tls import Tls

HEAD_LINE_BYTES_MAX: Final = 8 << 10
HEADERS_MAX: Final = 100
IDLE_S: Final = 75.0
BODY_TIMEOUT_S: Final = 60.0
BODIES_SHARE: Final = 32
"""Bodies of the largest size that fit at a time."""
_BACKLOG: Final = 1024

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


class Bodies:
    """Reads bodies, within a budget for all of them."""

    def __init__(self, *, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._left = bytes_max * BODIES_SHARE

    async def read(self, request: web.BaseRequest) -> bytes:
        """The body; its owner calls `release` with its length.

        Raises:
            BodyRefused: framing, coding, size or time.
        """
        _refuse_framing(request)
        announced = request.content_length
        if announced is not None and announced > self.bytes_max:
            raise BodyRefused(413, f"the body has {announced} bytes: at most {self.bytes_max}")
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while piece := await request.content.readany():
                    size += len(piece)
                    self._left -= len(piece)
                    pieces.append(piece)
                    if size > self.bytes_max:
                        raise BodyRefused(413, f"the body is larger than {self.bytes_max} bytes")
                    if self._left < 0:
                        raise BodyRefused(503, "the bodies under way use up their memory")
        except TimeoutError:
            self.release(size)
            raise BodyRefused(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        except BaseException:
            self.release(size)
            raise
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self, size: int) -> None:
        self._left += size


def _refuse_framing(request: web.BaseRequest) -> None:
    headers = request.headers
    codings = headers.getall("Transfer-Encoding", [])
    lengths = headers.getall("Content-Length", [])
    if len(codings) + len(lengths) > 1 or any(
        each.strip().lower() != "chunked" for each in codings
    ):
        raise BodyRefused(400, "give one Content-Length, or one Transfer-Encoding: chunked")
    if headers.get("Content-Encoding", "identity").lower() != "identity":
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
