"""`kvstore.v1.Router/Route`: decisions for callers that send requests themselves.

    Ask (keys or tokens, no text) ─▶ Decision ─▶ FirstPiece, Done           ─▶ end of the stream
                                       ▲─ WorkerFailed ─┘ another Decision

A stream is one request: it counts as load at its worker until it says Done or ends. Nothing of a
prompt but its keys is needed, so that tokens are made once, at the edge. Other routers of the same
engines ask for Loads (`exchange`).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

import grpc

from kvstore.errors import KVStoreError
from kvstore.proto import router_pb2 as pb
from kvstore.proto.router_pb2_grpc import RouterServicer
from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.exchange import LoadExchange
from kvstore.router.front.intake import output_tokens, session_of
from kvstore.router.keys.prefixes import (
    KEY_BYTES,
    TOKENS_PER_PIECE,
    KeyPrefixes,
    Prefix,
    predicted_tokens,
)
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    FirstToken,
    Leg,
    LegFailed,
    Rejected,
    RequestEnded,
    Routed,
)
from kvstore.routing.values import RouteRequest

TOKENS_MAX: Final = 4 << 20


class RouteService(RouterServicer):
    """On the router's loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: Workers,
        prefixes: KeyPrefixes | None,
        exchange: LoadExchange,
    ) -> None:
        """`prefixes` None: this router asks no index."""
        self._exchange = exchange
        self._dispatcher, self._workers, self._prefixes = dispatcher, workers, prefixes

    async def Route(
        self,
        request_iterator: AsyncIterator[pb.RouteWord],
        context: grpc.aio.ServicerContext[pb.RouteWord, pb.Decision],
    ) -> AsyncIterator[pb.Decision]:
        request_id = f"rpc-{secrets.token_hex(8)}"
        routed: Routed | Rejected | None = None
        worker: Worker | None = None
        prefix = Prefix(1)
        done = RequestEnded(request_id, Ending.ABORTED)
        try:
            async for word in request_iterator:
                match word.WhichOneof("kind"):
                    case "ask" if routed is None:
                        if why := _fault(word.ask):
                            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
                        prefix = await self._prefix(word.ask)
                        asked = Arrived(_request(word.ask, request_id, prefix), prefix.answer)
                        routed = await self._dispatcher.arrive(asked)
                    case "failed" if isinstance(routed, Routed):
                        self._over(worker, "the caller said so")
                        failed = LegFailed(
                            request_id, Leg.DECODE, Failure.STATUS, word.failed.has_streamed
                        )
                        worker, routed = None, None
                        routed = await self._dispatcher.leg_failed(failed)
                    case "first" if isinstance(routed, Routed):
                        self._dispatcher.note(FirstToken(request_id))
                        continue
                    case "done" if isinstance(routed, Routed):
                        done = _ended(request_id, word.done)
                        return
                    case _:
                        text = "a stream is Ask first, then about its request"
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
                assert routed is not None
                if isinstance(routed, Routed) and (worker := self._workers.get(routed.worker)):
                    self._workers.begun(worker)
                yield self._decision(routed, worker, prefix)
        finally:
            if isinstance(routed, Routed):
                self._over(worker, "")
                self._dispatcher.note(done)

    async def Loads(
        self,
        request: pb.LoadsQuestion,
        context: grpc.aio.ServicerContext[pb.LoadsQuestion, pb.RouterLoads],
    ) -> AsyncIterator[pb.RouterLoads]:
        async with aclosing(self._exchange.reports()) as reports:
            try:
                async for report in reports:
                    yield report
            except KVStoreError as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _over(self, worker: Worker | None, why: str) -> None:
        if worker is not None:
            self._workers.ended(worker)
            if why:
                self._workers.failed(worker, why)
            else:
                self._workers.succeeded(worker)

    async def _prefix(self, ask: pb.Ask) -> Prefix:
        if ask.WhichOneof("prompt") == "tokens":
            ids = list(ask.tokens.ids)
            found = await self._prefixes.of_ids(ask.model, ids) if self._prefixes else None
            return found or Prefix(max(1, len(ids)))
        block_tokens = ask.block_tokens or TOKENS_PER_PIECE
        count = max(ask.prompt_tokens, len(ask.keys) // KEY_BYTES * block_tokens, 1)
        found = await self._prefixes.of_keys(ask.model, ask.keys, count) if self._prefixes else None
        return found or Prefix(count, ask.keys, block_tokens)

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
    """Fault of a question; empty: none."""
    if len(ask.keys) % KEY_BYTES:
        return f"keys have {KEY_BYTES} bytes each"
    if max(len(ask.tokens.ids), ask.prompt_tokens) > TOKENS_MAX:
        return f"a prompt has at most {TOKENS_MAX} tokens"
    return ""


def _request(ask: pb.Ask, request_id: str, prefix: Prefix) -> RouteRequest:
    return RouteRequest(
        request_id=request_id,
        model=ask.model,
        prompt_tokens=prefix.prompt_tokens,
        keys=prefix.keys,
        block_tokens=prefix.block_tokens,
        output_tokens_max=output_tokens(ask.output_tokens_max),
        tenant=ask.tenant,
        service=ask.service,
        session=session_of(ask.session),
        subset=tuple(ask.subset) or None,
        load_only=prefix.load_only,
        must_be_local=True,
    )


def _ended(request_id: str, done: pb.Done) -> RequestEnded:
    ending = Ending.REFUSED if done.is_refused else Ending.DONE
    cached = done.cached_tokens if done.HasField("cached_tokens") else None
    return RequestEnded(request_id, ending, cached, done.output_tokens)
