"""gRPC servers of the router: Route, decisions for callers, and the endpoint picker for Envoy.

Both on the router's loop, bounded as the index's server is, with mutual TLS, or on loopback and
with --insecure without. The picker is registered under Envoy's own name; its health answers to
`liveness`, `readiness` and that name: all but the first serve while a worker takes requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
import msgspec

from kvstore.client.tls import Tls
from kvstore.net.server import HealthyServer, caller_identities, make_server
from kvstore.proto import picker_pb2, router_pb2 as pb
from kvstore.proto.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from kvstore.router.dispatch import Dispatcher, RoutedLife
from kvstore.router.engines.workers import WORKERS_MAX, Worker
from kvstore.router.exchange import LoadExchange
from kvstore.router.front.intake import NAME_BYTES_MAX, output_tokens, session_of
from kvstore.router.keys.prefixes import TOKENS_PER_PIECE, Prefixes, predicted_tokens
from kvstore.router.picker import SERVICE, Picker
from kvstore.routing.events import Ending, Failure, Fault, Leg, Rejected, Routed
from kvstore.routing.values import Prefix, RouteRequest
from kvstore.types import KEY_BYTES, Counts

# ── Route ─────────────────────────────────────────────────────────────────────────────────────────
# `kvstore.v1.Router/Route`: decisions for callers that send requests themselves.
#
#     Ask (keys or tokens, no text) ─▶ Decision ─▶ FirstPiece, Done           ─▶ end of the stream
#                                        ▲─ WorkerFailed ─┘ another Decision
#
# A stream is one request: it counts as load at its worker until it says Done or ends, or is silent
# for SILENCE_S. Nothing of a prompt but its keys is needed, so that tokens are made once, at the
# edge. Other routers of the same engines ask for loads at the same port (`exchange`).
#
# The word of a caller counts for its own requests only: a worker that failed by its word is not
# chosen for that request again, and is probed; numbers that no prompt has are refused. A
# certificate has STREAMS_PER_CALLER.

TOKENS_MAX: Final = 4 << 20
BLOCK_TOKENS_MAX: Final = 1 << 16
STREAMS_PER_CALLER: Final = 4096
FIRST_WORD_S: Final = 10.0
"""Time after which a stream that has not asked ends."""
SILENCE_S: Final = 900.0
"""Time after which a stream that has asked, and sends nothing, ends."""

Context = grpc.aio.ServicerContext[pb.RouteWord, pb.Decision]


class RouteService(RouterServicer):
    """The `Router` service; on the router's loop. See above."""

    def __init__(
        self, dispatcher: Dispatcher, prefixes: Prefixes, *, suspected: Callable[[Worker], None]
    ) -> None:
        """`suspected`: takes a worker that should be probed, as a caller reports a failure
        there.
        """
        self._suspected = suspected
        self._streams = Counts[str]()
        """Number of open streams by caller."""
        self._dispatcher, self._prefixes = dispatcher, prefixes

    async def Route(
        self, request_iterator: AsyncIterator[pb.RouteWord], context: Context
    ) -> AsyncIterator[pb.Decision]:
        # Callers without a certificate are one: others of this port need streams, too.
        caller = "+".join(sorted(map(str, caller_identities(context))))
        if self._streams[caller] >= STREAMS_PER_CALLER:
            text = f"{STREAMS_PER_CALLER} streams of this certificate are open already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._streams[caller] += 1
        life = RoutedLife(self._dispatcher)
        request: RouteRequest | None = None
        try:
            while True:
                word = await _next(request_iterator, FIRST_WORD_S if request is None else SILENCE_S)
                if word is None:
                    return
                match word.WhichOneof("kind"):
                    case "ask" if request is None:
                        if why := _fault(word.ask):
                            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
                        name, prefix = f"rpc-{secrets.token_hex(8)}", await self._prefix(word.ask)
                        request = _request(word.ask, name, prefix)
                        decision = await life.enter(request)
                    case "failed" if life.routed is not None:
                        if (worker := life.worker) is not None:
                            self._suspected(worker)
                        fault = Fault(Failure.BROKEN)  # costs nothing of the retries of all
                        has_streamed = word.failed.has_streamed
                        decision = await life.failed(
                            Leg.DECODE, fault, has_streamed=has_streamed, is_claim=True
                        )
                    case "first" if life.routed is not None:
                        life.first()
                        continue
                    case "done" if life.routed is not None:
                        done = word.done
                        cached = done.cached_tokens if done.HasField("cached_tokens") else None
                        ending = Ending.REFUSED if done.is_refused else Ending.DONE
                        life.end(ending, cached, done.output_tokens)
                        return
                    case _:
                        text = "a stream is Ask first, then about its request"
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
                assert request is not None
                yield self._decision(decision, life.worker, request)
        finally:
            life.end(Ending.ABORTED)
            self._streams.drop(caller)

    async def _prefix(self, ask: pb.Ask) -> Prefix:
        if ask.WhichOneof("prompt") == "tokens":
            return await self._prefixes.of_ids(ask.model, list(ask.tokens.ids), ask.tenant)
        block_tokens = ask.block_tokens or TOKENS_PER_PIECE
        count = max(ask.prompt_tokens, len(ask.keys) // KEY_BYTES * block_tokens, 1)
        return await self._prefixes.of_keys(ask.model, ask.keys, count, block_tokens)

    def _decision(
        self, routed: Routed | Rejected, worker: Worker | None, prefix: Prefix
    ) -> pb.Decision:
        if isinstance(routed, Rejected):
            return pb.Decision(
                status=routed.status,
                reason=routed.reason,
                retry_after_ms=round(1000 * (routed.retry_after_s or 0)),
            )
        return pb.Decision(
            worker=routed.worker,
            address=str(worker.url) if worker is not None else "",
            model=routed.model,
            fallbacks=routed.fallbacks,
            predicted_s=routed.draft.plain.predicted_s,
            cached_tokens=predicted_tokens(prefix, worker.address) if worker is not None else 0,
        )


def _fault(ask: pb.Ask) -> str:
    """Sentence about an invalid question; empty: it is valid."""
    if len(ask.keys) % KEY_BYTES:
        return f"keys have {KEY_BYTES} bytes each"
    if ask.block_tokens > BLOCK_TOKENS_MAX:
        return f"a block has at most {BLOCK_TOKENS_MAX} tokens"
    in_blocks = len(ask.keys) // KEY_BYTES * (ask.block_tokens or TOKENS_PER_PIECE)
    if max(len(ask.tokens.ids), ask.prompt_tokens, in_blocks) > TOKENS_MAX:
        return f"a prompt has at most {TOKENS_MAX} tokens"
    if len(ask.subset) > WORKERS_MAX:
        return f"a subset has at most {WORKERS_MAX} workers"
    if max(map(len, (ask.model, ask.tenant, ask.service, *ask.subset))) > NAME_BYTES_MAX:
        return f"a name has at most {NAME_BYTES_MAX} characters"
    return ""


async def _next(words: AsyncIterator[pb.RouteWord], timeout_s: float) -> pb.RouteWord | None:
    """The next message of a stream; None: it has ended, or none came in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(words, None)
    except TimeoutError:
        return None


def _request(ask: pb.Ask, request_id: str, prefix: Prefix) -> RouteRequest:
    return RouteRequest(
        **msgspec.structs.asdict(prefix),
        request_id=request_id,
        model=ask.model,
        output_tokens_max=output_tokens(ask.output_tokens_max),
        tenant=ask.tenant,
        service=ask.service,
        session=session_of(ask.session),
        subset=tuple(ask.subset) or None,
        must_be_local=True,
    )


# ── servers ───────────────────────────────────────────────────────────────────────────────────────

STREAMS_MAX: Final = 8192
STREAMS_PER_CONNECTION_MAX: Final = 1024
MESSAGE_BYTES_MAX: Final = 4 << 20
ALIVE: Final = "liveness"


def _server(name: str) -> HealthyServer:
    """A server for the service of this name."""
    server = make_server(
        ("grpc.max_metadata_size", 16 << 10),
        # Other routers ping twice as rarely; more often than this gRPC hangs up on them.
        ("grpc.http2.min_ping_interval_without_data_ms", 900),
        message_bytes_max=MESSAGE_BYTES_MAX,
        calls_max=STREAMS_PER_CONNECTION_MAX,
        maximum_concurrent_rpcs=STREAMS_MAX,
    )
    return HealthyServer(server, "", "readiness", name, alive=[ALIVE])


async def serve_route(
    place: tuple[str, int], tls: Tls | None, service: RouteService, exchange: LoadExchange
) -> HealthyServer:
    """Start the server for Route and loads. Raises ConfigError if it cannot listen."""
    its = _server(pb.DESCRIPTOR.services_by_name["Router"].full_name)
    add_RouterServicer_to_server(service, its.server)
    its.server.add_generic_rpc_handlers((exchange.handler(),))
    return await its.begun("--route-listen", place, tls)


async def serve_picker(place: tuple[str, int], tls: Tls | None, picker: Picker) -> HealthyServer:
    """Start the server for the endpoint picker. Raises ConfigError if it cannot listen."""
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=picker_pb2.ProcessingRequest.FromString,
        response_serializer=picker_pb2.ProcessingResponse.SerializeToString,
    )
    its = _server(SERVICE)
    its.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    return await its.begun("--picker-listen", place, tls)
