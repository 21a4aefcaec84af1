"""A client of the global prefix index, for routers and scripts; and gRPC channels of all clients.

    files = TlsFiles(ca=…, cert=…, key=…)
    with IndexClient(["10.0.0.1:9470", "10.0.0.2:9470"], tls=files) as index:
        answer = index.match("tenant", space, keys)
        best = max(answer.matches, key=lambda match: match.dram_blocks, default=None)

Every replica has all locations, so any of them answers: the replica that answered last is asked
first, and when it refuses, breaks or is silent, the next, all within one deadline; when all refuse
because this client has too many calls, the client retries after a back-off. A call either answers
or raises `IndexUnavailable`, within `timeout_s`. An invalid question is a ValueError or TypeError.
Any number of threads.

`reason_of` says why a call of an index, a peer, a node or another router failed, in a clause that
names a flag: gRPC has only its TLS library's text.

Covers: Match, Nodes, Watch. Does not cover: decisions by an answer; its trust is part of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Self, TypeVar

import grpc

from kvstore.client.tls import ANY_INDEX, Tls, TlsFiles, address_parts
from kvstore.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.index.feed import Trust
from kvstore.index.index import Answer, Member
from kvstore.proto import forms, index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub

DEFAULT_TIMEOUT_S: Final = 1.0
RECONNECT_MIN_MS: Final = 100
RECONNECT_MAX_MS: Final = 1000
CONNECT_TIMEOUT_MS: Final = 2000
"""Time allowed for an attempt to connect: a handshake with a busy machine takes half a second."""
PING_MS: Final = 2000
"""Silence of a replica before a ping; a replica allows one a second."""
PING_TIMEOUT_MS: Final = 2000
"""A replica that leaves a ping unanswered this long is unreachable: watchers and feeds leave it."""
PAUSE_MIN_S: Final = 0.01
"""First back-off after every replica has refused, since this client has too many calls at a time;
each further one is twice as long."""
PAUSE_MAX_S: Final = 0.2
"""Longest of these back-offs."""
_ELSEWHERE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Errors after which another replica is asked. All others are about the question."""

_R = TypeVar("_R")


class IndexUnavailable(KVStoreError):
    """No replica answered in time, or all refused. The text has the last one's reason."""


class Members(NamedTuple):
    """The nodes that a replica knows."""

    trust: Trust
    """Trust of the list; CATCHING_UP: there may be more nodes."""
    nodes: list[Member]


class News(NamedTuple):
    """Changes since the previous news; the first has the whole state."""

    nodes: list[Member]
    """New or changed."""
    gone: list[str]
    """Names of nodes that the replica forgot."""
    answer: Answer | None
    """About the prefix, if that changed."""


class Tokens(NamedTuple):
    """A prompt of plain text, from which the replica makes keys."""

    ids: Sequence[int]
    block_tokens: int
    hash_seed: str
    cache_salt: str = ""


class IndexClient:
    """Asks replicas of the index. Use as a context."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: TlsFiles | Tls | None = None,
        insecure: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Connects when first asked.

        Args:
            endpoints: HOST:PORT of each replica.
            tls: this client's certificate and key, and the CA of all components.
            insecure: without TLS, for labs; instead of `tls`.
            timeout_s: of a call, all replicas together.

        Raises:
            ConfigError: an endpoint or a file is invalid.
        """
        if isinstance(endpoints, str):
            raise ConfigError(f"endpoints are a list, such as [{endpoints!r}], not one string")
        if not endpoints:
            raise ConfigError("name at least one replica of the index, as HOST:PORT")
        if (tls is None) != insecure:
            raise ConfigError("give tls, or insecure=True: no encryption and no authentication")
        if isinstance(tls, TlsFiles):
            from kvstore.client.certificates import load  # only here: others have loaded them

            tls = load(tls)
        credentials = tls.channel_credentials() if tls is not None else None
        self._timeout_s = timeout_s
        self._channels = [channel(endpoint, credentials) for endpoint in endpoints]
        self._stubs = [IndexStub(each) for each in self._channels]
        self._first = 0
        """Number of the replica to ask first."""
        self._closed = threading.Event()

    def match(
        self, tenant: str, space: bytes, prompt: bytes | Tokens, *, timeout_s: float | None = None
    ) -> Answer:
        """Locations of the first block of a prompt, each with its prefix length.

        `prompt`: keys of 32 bytes each in chain order, or the tokens that they are made from.

        Raises:
            IndexUnavailable: no replica answered.
            TypeError, ValueError: the question is invalid, or the client is closed.
        """
        request = _match_request(tenant, space, prompt)
        reply = self._ask(lambda stub: stub.Match, request, timeout_s)
        return forms.answer_of(reply)

    def nodes(self, *, engines: bool = False, timeout_s: float | None = None) -> Members:
        """All nodes, with the engines that they serve if wanted. Raises IndexUnavailable."""
        request = pb.NodesRequest(engines=engines)
        reply = self._ask(lambda stub: stub.Nodes, request, timeout_s)
        return Members(forms.trust_of(reply.trust), [*map(forms.member_of, reply.nodes)])

    def watch(
        self,
        *,
        nodes: bool = True,
        engines: bool = False,
        prefix: tuple[str, bytes, bytes | Tokens] | None = None,
    ) -> Iterator[News]:
        """News of the nodes, with their engines if wanted, of a prefix (tenant, space, prompt), or
        both, until the iterator is closed.

        Read it steadily: a replica disconnects slow readers. After a fail-over the first news has
        the whole state again, and the nodes that went meanwhile.

        Raises:
            IndexUnavailable: no replica would begin, or the last one ended the stream.
            TypeError, ValueError: the question is invalid, or the client is closed.
        """
        self._check_open()
        request = pb.WatchRequest(
            nodes=nodes,
            engines=engines,
            prefix=_match_request(*prefix) if prefix is not None else None,
        )
        return self._news(request)

    def _news(self, request: pb.WatchRequest) -> Iterator[News]:
        failures = 0
        known: set[str] = set()
        while True:
            self._check_open()
            number = self._first
            call = self._stubs[number].Watch(request)
            is_first = True
            try:
                for reply in call:
                    failures = 0
                    named = {row.node for row in reply.nodes}
                    # The first of a stream names all nodes: another replica may have named more.
                    gone = known - named if is_first else set(reply.gone)
                    known, is_first = (known | named) - gone, False
                    yield News(
                        [*map(forms.member_of, reply.nodes)],
                        sorted(gone),
                        forms.answer_of(reply.prefix) if reply.HasField("prefix") else None,
                    )
            except grpc.RpcError as error:
                _check_understood(error)
                failures += 1
                self._first = (number + 1) % len(self._stubs)
                if failures >= len(self._stubs) or error.code() not in _ELSEWHERE:
                    raise IndexUnavailable(_sentence(error)) from None
            finally:
                call.cancel()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        for each in self._channels:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError("this IndexClient is closed")

    def _ask(
        self, call: Callable[[IndexStub], Callable[..., _R]], request: Any, timeout_s: float | None
    ) -> Any:
        self._check_open()
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        pause_s = PAUSE_MIN_S
        while True:
            try:
                return self._ask_each(call, request, deadline_s)
            except grpc.RpcError as error:
                # Too many calls at a time: back off.
                may_wait = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if not may_wait or time.monotonic() + pause_s >= deadline_s:
                    raise IndexUnavailable(_sentence(error)) from None
            self._closed.wait(pause_s)
            self._check_open()
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _ask_each(
        self, call: Callable[[IndexStub], Callable[..., _R]], request: Any, deadline_s: float
    ) -> _R:
        """Ask each replica once; returns the first answer. Raises grpc.RpcError without any: that
        of RESOURCE_EXHAUSTED if one replica refused for it."""
        first, count = self._first, len(self._stubs)
        told: grpc.RpcError | None = None
        for turn in range(count):
            left_s = max(0.0, deadline_s - time.monotonic())
            number = (first + turn) % count
            try:
                # Replicas share the time left, so that a silent one leaves time for the next.
                reply = call(self._stubs[number])(request, timeout=left_s / (count - turn))
            except grpc.RpcError as error:
                _check_understood(error)
                if error.code() not in _ELSEWHERE:
                    raise
                if told is None or told.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    told = error
                self._first = (number + 1) % count
            else:
                self._first = number
                return reply
        assert told is not None
        raise told


def _match_request(tenant: str, space: bytes, prompt: bytes | Tokens) -> pb.MatchRequest:
    if not isinstance(space, bytes):
        raise TypeError(
            f"a space is 32 bytes, not {_kind(space)}: bytes.fromhex() reads hex digits"
        )
    if isinstance(prompt, Tokens):
        tokens = pb.Tokens(**prompt._asdict())
        request = pb.MatchRequest(tenant=tenant, space=space, tokens=tokens)
    elif isinstance(prompt, bytes):
        request = pb.MatchRequest(tenant=tenant, space=space, keys=prompt)
    else:
        raise TypeError(
            f"a prompt is Tokens, or keys as bytes, not {_kind(prompt)}: b''.join() makes one of"
            " many, bytes.fromhex() reads hex digits"
        )
    try:
        forms.check_match(request)
    except ProtocolError as error:
        raise ValueError(str(error)) from None
    return request


def _kind(value: object) -> str:
    return type(value).__name__


def _check_understood(error: grpc.RpcError) -> None:
    """Raises ValueError: a replica answered that the question is invalid."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        raise ValueError(error.details()) from None


def _sentence(error: grpc.RpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the index did not answer in time"
    return f"the index did not answer: {plain_reason(error.details())}"


# ── channels, and why their calls fail ────────────────────────────────────────────────────────────

_CAUSES: Final = (
    (
        "CERTIFICATE_VERIFY_FAILED: certificate has expired",
        "its certificate has expired: issue a new one",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate was not issued by the CA of --ca: all components need one CA",
    ),
    ("UNKNOWN_CA", "it does not accept this certificate: all components need one CA"),
    (
        "WRONG_VERSION_NUMBER",
        "it serves without TLS (--insecure), but certificates are set here: use the same on both",
    ),
    ("is not in peer certificate", "its certificate is of another component"),
    ("Hostname Verification Check failed", "its certificate is of another component"),
    (
        "Socket closed",
        "it closed the connection: it may require (other) certificates: --ca, --cert, --key",
    ),
    ("Connection refused", "nothing listens there (connection refused)"),
    ("No route to host", "no route to host"),
)
"""Parts of gRPC's texts, specific ones before general ones."""
_OF_TLS: Final = ("handshake failed", "verification check failed")
_FAILED: Final = "failed to connect to all addresses; last error: "


def channel(endpoint: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel to one replica. Raises ConfigError."""
    address_parts(endpoint)
    if credentials is None:
        return grpc.insecure_channel(endpoint, options=channel_options())
    return grpc.secure_channel(endpoint, credentials, options=channel_options())


def aio_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, Any]] | None = None,
) -> grpc.aio.Channel:
    """A channel on an asyncio loop. `credentials` None: without TLS; `options` None: those of a
    channel to the index."""
    options = channel_options() if options is None else options
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def pings(every_ms: int, timeout_ms: int) -> tuple[tuple[str, int], ...]:
    """Options by which an end of a connection without news, for hours even, notices within
    `every_ms + timeout_ms` that the other one has vanished, which closes no connection."""
    return (
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # The keepalive time-out is for pings that the kernel of the other end does not take. The
        # kernel of a stopped process does, and without this it has a minute (gRPC 1.85).
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def channel_options(name: str = ANY_INDEX, ping_ms: int = PING_MS) -> list[tuple[str, Any]]:
    """Options of every channel to the index. `name`: name in the server's certificate, if it is
    another kind of server. `ping_ms`: time between two pings."""
    return [
        # Addresses are not in certificates; that it is an index is.
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", forms.REPLY_BYTES_MAX),
        # A pool that others share would share how long they waited before they try again, too.
        ("grpc.use_local_subchannel_pool", 1),
        # By its name a pause; what gRPC makes of it is the least time that a connection may take.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MIN_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
        *pings(ping_ms, PING_TIMEOUT_MS),
        # Nothing here goes through a proxy that the environment names.
        ("grpc.enable_http_proxy", 0),
    ]


def reason_of(error: Exception, *, unimplemented: str = "") -> str:
    """One clause for an error of a call. `unimplemented`: the clause for a server that does not
    have the call; empty: what gRPC says."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return "no answer in time" if isinstance(error, TimeoutError) else plain_reason(str(error))
    if unimplemented and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return unimplemented
    return plain_reason(error.details())


def plain_reason(details: str | None) -> str:
    """One clause for gRPC's details of an error."""
    text = details or "no reason is known"
    if not (text.startswith(_FAILED) or any(part in text for part in _OF_TLS)):
        return text
    for part, cause in _CAUSES:
        if part in text:
            return cause
    return text.removeprefix(_FAILED)
