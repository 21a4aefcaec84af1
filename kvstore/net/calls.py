"""Calls of one message each, for a server that silent callers cannot block.

    call ─▶ its message, within READ_TIMEOUT_S ─▶ room? ─▶ a thread of the pool ─▶ answered
              └─ beyond SILENT_MAX the oldest      └─ RESOURCE_EXHAUSTED
                 silent one gives way

gRPC's threaded server reads in the thread that will answer: as many half-open calls as there are
threads, and no call is answered any more. Here a silent call costs no thread.

Covers: the interceptor. Does not cover: connections (`limits`), limits of one caller (an index has
`shares`).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

# ── callers ───────────────────────────────────────────────────────────────────────────────────────
# Limits of a gRPC server in the network: number of connections, and their silence.
#
# Any host that reaches the port can connect, before any certificate is shown. Without these limits
# each connection takes a descriptor for minutes, until the node has none left for its pages and
# files. Does not cover: authentication (`tls`); limits of one caller's requests (the servers).

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""Limit for the TLS handshake and the preface of HTTP/2, also between busy machines."""
CONNECTIONS_MAX: Final = 4096
DESCRIPTORS_SHARE: Final = 4
"""The share of the process's descriptors for connections of clients is one in this many, if that is
less than are wanted: a node may have two servers and needs the other descriptors, and a router's
requests need one or two at engines.
"""


def limits() -> list[tuple[str, int]]:
    """The limits as options of a server."""
    return [
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_allowed_incoming_connections", connections_max(CONNECTIONS_MAX)),
    ]


def connections_max(wanted: int) -> int:
    """Connections of clients that the process's descriptors allow, at most `wanted`."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, descriptors // DESCRIPTORS_SHARE))


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────

READ_TIMEOUT_S: Final = 5.0
"""Limit for the message of a call to come, once it may be read."""
SILENT_MAX: Final = 64

Context = grpc.aio.ServicerContext[Any, Any]
Details = grpc.HandlerCallDetails


class RefusedCall(Exception):
    """Raised where a call is answered with a status and one sentence."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


async def only_message(context: Context, limit: asyncio.Timeout) -> Any:
    """The message of a call, which must have one. Not read from the handler's iterator: that is
    part of a reference cycle with the messages read, which lasts until garbage is collected.

    Raises:
        RefusedCall: none came within `limit`, or the call has none.
    """
    try:
        async with limit:
            request = await context.read()
    except TimeoutError:
        raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, "no message came in time") from None
    if request is grpc.aio.EOF:
        raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, "a call has one message")
    return request


class Guard(grpc.aio.ServerInterceptor):
    """Intercepts all calls of one server, by handlers that begin before a call's message is there:
    on the wire a single message is a stream of one."""

    def __init__(self, guarded: Callable[[Any], Any]) -> None:
        """`guarded`: makes the handler to serve a method by of the server's own."""
        self._guarded_by = guarded
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Any]], handler_call_details: Details
    ) -> Any:
        """The handler of a call; None: there is no such method."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._handlers[method] = self._guarded_by(handler)
        return self._handlers[method]


class Calls(Guard):
    """For a server whose behaviors are plain functions. On its loop."""

    def __init__(self, pool: ThreadPoolExecutor, *, count_max: int) -> None:
        """`count_max`: calls that are answered, or wait for a thread of `pool`."""
        self._pool, self._count_max = pool, count_max
        self._silent: dict[asyncio.Timeout, None] = {}
        self._count = 0
        super().__init__(self._guarded)

    def _guarded(self, handler: Any) -> Any:
        return grpc.stream_unary_rpc_method_handler(
            self._answers(handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _answers(self, behavior: Callable[[Any, Any], Any]) -> Callable[[Any, Context], Any]:
        async def answer(_: object, context: Context) -> Any:
            try:
                request = await self._request(context)
                if self._count >= self._count_max:
                    text = f"{self._count_max} questions wait already: ask again later"
                    raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                self._count += 1
                loop = asyncio.get_running_loop()
                doing = loop.run_in_executor(self._pool, behavior, request, context)
                doing.add_done_callback(self._done)
                # A cancelled call would stay in the queue of the pool without being counted.
                return await asyncio.shield(doing)
            except RefusedCall as error:
                await context.abort(error.code, str(error))

        return answer

    def _done(self, doing: asyncio.Future[Any]) -> None:
        self._count -= 1
        if not doing.cancelled():
            doing.exception()  # its caller may be gone, and then nobody asks for it

    async def _request(self, context: Context) -> Any:
        if len(self._silent) >= SILENT_MAX:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        limit = asyncio.timeout(READ_TIMEOUT_S)
        self._silent[limit] = None
        try:
            return await only_message(context, limit)
        finally:
            self._silent.pop(limit, None)
