"""A gRPC server in the network: its TLS, limits of its connections, calls of one message each.

    call ─▶ its message, within READ_TIMEOUT_S ─▶ room? ─▶ a thread of the pool ─▶ answered
              └─ beyond SILENT_MAX the oldest      └─ RESOURCE_EXHAUSTED
                 silent one gives way

gRPC's threaded server reads in the thread that will answer: as many half-open calls as there are
threads, and no call is answered any more. Here a silent call costs no thread.

Both ends show certificates of one CA (mTLS), or, with --insecure, neither does and nothing is
authenticated. gRPC speaks TLS 1.2 or later.

Covers: credentials, names of callers, end of the certificate; limits of connections; health; the
interceptor of calls. Does not cover: certificate files, and the meaning of names
(`kvstore.client.tls`); limits of one caller (the servers; an index has `shares`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Self, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.client.tls import Tls
from kvstore.config.values import joined
from kvstore.errors import ConfigError
from kvstore.net.aio import end_now
from kvstore.net.http import listening
from kvstore.obs.metrics import Values
from kvstore.wire.identity import Identity, identities_of
from kvstore.wording import cannot_listen

# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────

INSECURE: Final = (
    "--insecure: every client that reaches %s can read and change its contents: no TLS, no"
    " authentication; for labs only"
)
INSECURE_NOTE: Final = "it serves without TLS (--insecure)"
WARNING_DAYS: Final = 30
"""A component warns at its start if fewer days of its certificate remain."""
_DAY_S: Final = 24 * 60 * 60
_DNS_NAMES: Final = "peer_dns"
"""Key of the DNS names of a certificate in gRPC's auth context, which has another list with
alternative names of all kinds.
"""

_log = logging.getLogger(__name__)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials of a server that demands a certificate of its own CA from every client."""
    return grpc.ssl_server_credentials(
        [(tls.key, tls.cert)], root_certificates=tls.ca, require_client_auth=True
    )


def refuse_taken(option: str, host: str, port: int) -> None:
    """Raises ConfigError if HOST:PORT cannot be listened on now. For starts that take long before
    they listen.
    """
    with contextlib.suppress(OSError):  # a kernel without IPv6: gRPC may fall back, or says so
        listening(option, host, port).close()


def listen(server: grpc.aio.Server, address: str, tls: Tls | None, option: str) -> int:
    """Have a server listen on HOST:PORT, without TLS if `tls` is None. Returns the port.

    Raises:
        ConfigError: the address, which is that of `option`, cannot be listened on.
    """
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, server_credentials(tls)))
    except RuntimeError:
        raise ConfigError(cannot_listen(option, address)) from None


# Whose certificate the caller of a gRPC call has. Readers of memory over tcp are judged by the same
# names (`transport.tcp`).


def caller_identities(context: Any) -> frozenset[Identity]:
    """Names of the caller in the certificate that the handshake has verified."""
    names = context.auth_context().get(_DNS_NAMES, ())
    return identities_of(("DNS", name.decode("ascii", "replace")) for name in names)


def caller_name(context: Any) -> str:
    """The caller's identities in one text, or else its connection."""
    return "+".join(sorted(map(str, caller_identities(context)))) or str(context.peer())


def require_node(context: Any, node: str) -> None:
    """Raises RefusedCall if the caller's certificate is not that of this node."""
    nodes = {each.name for each in caller_identities(context) if each.role == "node"}
    if node not in nodes:
        whose = f"node {min(nodes)}" if nodes else "no node"
        text = f"this certificate is of {whose}, not of node {node}"
        raise RefusedCall(grpc.StatusCode.PERMISSION_DENIED, text)


def certificate_ends(tls: Tls | None) -> Values:
    """Metric of the end of this component's certificate; without a value if there is none."""
    return {"certificate_expires_timestamp_seconds": tls.ends_s if tls else {}}


def warn_of_its_end(tls: Tls | None, *, renewal: str) -> None:
    """Log a warning at the start if the certificate ends within WARNING_DAYS. `renewal`: how to
    load another one.
    """
    if tls is None or (left_s := tls.ends_s - time.time()) >= WARNING_DAYS * _DAY_S:
        return
    _log.warning(
        "the certificate of %s ends at %s UTC, in %.1f days: replace it; %s",
        min(map(str, tls.identities), default="this component"),
        datetime.datetime.fromtimestamp(tls.ends_s, datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        left_s / _DAY_S,
        renewal,
    )


# ── connections ──────────────────────────────────────────────────────────────────────────────────
# Any host that reaches the port can connect, before any certificate is shown. Without these limits
# each connection takes a descriptor for minutes, until the node has none left for its pages and
# files.

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""Limit for the TLS handshake and the preface of HTTP/2, also between busy machines."""
CONNECTIONS_MAX: Final = 4096
DESCRIPTORS_SHARE: Final = 4
"""The share of the process's descriptors for connections of clients is one in this many, if that is
less than are wanted: a node may have two servers and needs the other descriptors, and a router's
requests need one or two at engines.
"""


def make_server(
    *options: tuple[str, Any], message_bytes_max: int, calls_max: int, **more: Any
) -> grpc.aio.Server:
    """A server with the limits that all need, and further `options`. `message_bytes_max`: of a
    message that it reads; `calls_max`: calls of one connection; `more`: of `grpc.aio.server`.
    """
    return grpc.aio.server(
        options=[
            # Or a second process could take the same port, and half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
            ("grpc.max_allowed_incoming_connections", connections_max(CONNECTIONS_MAX)),
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_concurrent_streams", calls_max),
            *options,
        ],
        **more,
    )


def connections_max(wanted: int) -> int:
    """Connections of clients that the process's descriptors allow, at most `wanted`."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, descriptors // DESCRIPTORS_SHARE))


# ── health ───────────────────────────────────────────────────────────────────────────────────────

DRAIN_S: Final = 1.0
"""Time for calls under way when a server ends."""
_HEALTH: Final = health_pb2.HealthCheckResponse


class HealthyServer:
    """A server, and its health by some names. On its loop."""

    def __init__(self, server: grpc.aio.Server, *names: str, alive: Sequence[str] = ()) -> None:
        """`names`: serve as `show` says; `alive`: serve as long as the server does."""
        self.server, self.port = server, 0
        self._health, self._names, self._alive = health.aio.HealthServicer(), names, alive
        self._is_ready: bool | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def begun(
        self, option: str, place: tuple[str, int], tls: Tls | None, *, is_ready: bool = False
    ) -> Self:
        """Listen, and report as serving if it `is_ready`. Raises ConfigError if it cannot
        listen."""
        for name in self._alive:
            await self._health.set(name, _HEALTH.SERVING)
        await self.show(is_ready=is_ready)
        self.port = listen(self.server, joined(*place), tls, option)
        await self.server.start()
        return self

    async def show(self, *, is_ready: bool) -> None:
        """Report as serving or not."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            status = _HEALTH.SERVING if is_ready else _HEALTH.NOT_SERVING
            for name in self._names:
                await self._health.set(name, status)

    async def close(self) -> None:
        """Report as not serving, let calls end for a moment, and stop."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(DRAIN_S)


# ── calls ────────────────────────────────────────────────────────────────────────────────────────

READ_TIMEOUT_S: Final = 5.0
"""Limit for the message of a call to come, once it may be read."""
SILENT_MAX: Final = 64

Context = grpc.aio.ServicerContext[Any, Any]
Details = grpc.HandlerCallDetails
_T = TypeVar("_T")


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


class Threads:
    """Threads that do the work of calls. On the loop of their server."""

    def __init__(self, pool: ThreadPoolExecutor, *, count_max: int, full: str) -> None:
        """`count_max`: calls whose work is done, or waits for a thread, those whose callers have
        disconnected included. `full`: sentence for a call beyond."""
        self._pool, self._count_max, self._full = pool, count_max, full
        self._count = 0

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Do the work of a call. Raises RefusedCall if too many wait."""
        if self._count >= self._count_max:
            raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, self._full)
        self._count += 1
        doing = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        doing.add_done_callback(self._done)
        # A cancelled call would stay in the queue of the pool without being counted.
        return await asyncio.shield(doing)

    def _done(self, doing: asyncio.Future[Any]) -> None:
        self._count -= 1
        if not doing.cancelled():
            doing.exception()  # its caller may be gone, and then nobody asks for it


class Calls(Guard):
    """For a server whose behaviors are plain functions. On its loop."""

    def __init__(self, pool: ThreadPoolExecutor, *, count_max: int) -> None:
        """`count_max`: calls that are answered, or wait for a thread of `pool`."""
        full = f"{count_max} questions wait already: ask again later"
        self._threads = Threads(pool, count_max=count_max, full=full)
        self._silent: dict[asyncio.Timeout, None] = {}
        super().__init__(self._guarded)

    def _guarded(self, handler: Any) -> Any:
        answer = partial(self._answer, handler.unary_unary)
        forms = (handler.request_deserializer, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, *forms)

    async def _answer(
        self, behavior: Callable[[Any, Context], Any], _: object, context: Context
    ) -> Any:
        try:
            request = await self._request(context)
            return await self._threads.run(behavior, request, context)
        except RefusedCall as error:
            await context.abort(error.code, str(error))

    async def _request(self, context: Context) -> Any:
        if len(self._silent) >= SILENT_MAX:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            end_now(oldest)
        limit = asyncio.timeout(READ_TIMEOUT_S)
        self._silent[limit] = None
        try:
            return await only_message(context, limit)
        finally:
            self._silent.pop(limit, None)
