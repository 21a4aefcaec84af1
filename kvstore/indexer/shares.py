"""Limits of one caller of an index at a time: share of the loop, of memory, of calls.

    call ─▶ a place? ─▶ its turn ─▶ read and decoded ─▶ room for its keys? ─▶ answered
              └─ RESOURCE_EXHAUSTED, nothing read

The names in its certificate identify a caller; without one, its connection. One caller has at most
CALLS_MAX calls, of which WATCHES_MAX watch; a call beyond is refused before its message is read.
Refusals of one caller come one after the other with a pause, on however many connections it asks: a
caller that asks again at once would have the loop do nothing else.
Its questions are read one at a time, in the order of their arrival, and are answered side by side
up to KEYS_AT_ONCE keys together: waiting questions are neither read nor decoded, and between two
large questions of one caller all others have their turn.

Covers: every service of the server. Does not cover: number of connections (`net.server`), size of
one question (`wire.feed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

import grpc

from kvstore.indexer.service import IndexCounters
from kvstore.net.server import (
    READ_TIMEOUT_S,
    Context,
    Guard,
    RefusedCall,
    caller_name,
    only_message,
)
from kvstore.proto import index_pb2 as pb
from kvstore.types import KEY_BYTES

CALLS_MAX: Final = 64
"""Most calls of one caller at a time: as many as one connection has."""
WATCHES_MAX: Final = 8
KEYS_AT_ONCE: Final = 16_384
"""Most keys of one caller's queries that are answered at the same time: one query of the largest
size."""
SMALL_KEYS: Final = 1024
"""A query of at most this many keys stops the loop for no longer than a few calls do."""
REST_MAX_S: Final = 0.2
REFUSAL_S: Final = 0.05
"""Pause between two refusals of a caller."""
REFUSALS_WAITING_MAX: Final = 1024
"""Calls that wait to be refused; gRPC keeps up to 64 KiB of each. More are refused at once."""
TOKENS_PER_KEY: Final = 16
"""In a query by tokens, this many tokens count as one key."""

_log = logging.getLogger(__name__)
Behavior = Callable[[Any, Any], Any]


class _Share:
    """Share of one caller; exists while the caller has calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.watches = 0
        self.is_told = False
        """Whether a warning that the caller exceeds its share was logged."""
        self.turn = asyncio.Lock()
        self.refusals = 0
        """Calls that wait to be refused."""
        self.refusal = asyncio.Lock()
        self._keys = 0
        self._has_room = asyncio.Event()
        self._rest_s = 0.0

    async def rest(self) -> None:
        """Pause as long as the caller's large queries took: these stop the loop, which handles
        other callers' calls in the pause. Call it while holding `turn`."""
        rest_s, self._rest_s = self._rest_s, 0.0
        if rest_s:
            await asyncio.sleep(min(rest_s, REST_MAX_S))

    async def take(self, keys: int) -> None:
        """Wait until the caller's queries being answered leave room for this many keys. Call it
        while holding `turn`."""
        while self._keys and self._keys + keys > KEYS_AT_ONCE:
            self._has_room.clear()
            await self._has_room.wait()
        self._keys += keys

    def give_back(self, keys: int, rest_s: float) -> None:
        self._keys -= keys
        self._rest_s += rest_s
        self._has_room.set()


class Shares(Guard):
    """Interceptor that applies the limits to all calls of one server. Runs on the server's loop."""

    def __init__(self, counters: IndexCounters) -> None:
        """`counters`: of the service, for calls that are refused."""
        self._counters = counters
        self._shares: dict[str, _Share] = {}
        super().__init__(self._guarded)

    def _guarded(self, handler: Any) -> Any:
        forms = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming:
            stream = partial(self._stream, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(stream, *forms)
        if handler.response_streaming:
            watch = partial(self._watch, handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(watch, *forms)
        question = partial(self._question, handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(question, forms[0], _encoder(forms[1]))

    async def _question(self, behavior: Behavior, _: AsyncIterator[Any], context: Context) -> Any:
        async with self._place(context) as share:
            async with share.turn:
                await share.rest()
                request = await only_message(context, asyncio.timeout(READ_TIMEOUT_S))
                keys = _keys_of(request)
                await share.take(keys)
            begin_s = asyncio.get_running_loop().time()
            try:
                return await behavior(request, context)
            finally:
                took_s = asyncio.get_running_loop().time() - begin_s
                share.give_back(keys, took_s if keys > SMALL_KEYS else 0.0)

    async def _watch(self, behavior: Behavior, _: AsyncIterator[Any], context: Context) -> None:
        async with self._place(context, watches=1) as share:
            async with share.turn:
                request = await only_message(context, asyncio.timeout(READ_TIMEOUT_S))
            await behavior(request, context)

    async def _stream(
        self, behavior: Behavior, messages: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        async with (
            self._place(context),
            contextlib.aclosing(behavior(messages, context)) as replies,
        ):
            async for reply in replies:
                yield reply

    @contextlib.asynccontextmanager
    async def _place(self, context: Context, *, watches: int = 0) -> AsyncIterator[_Share]:
        who = caller_name(context)
        share = self._shares.setdefault(who, _Share())
        if share.calls >= CALLS_MAX:
            await self._refuse(context, share, f"{who} has {CALLS_MAX} calls open here already")
        if share.watches + watches > WATCHES_MAX:
            await self._refuse(context, share, f"{who} has {WATCHES_MAX} watchers here already")
        share.calls += 1
        share.watches += watches
        try:
            yield share
        except RefusedCall as error:
            await context.abort(error.code, str(error))
        finally:
            share.calls -= 1
            share.watches -= watches
            if not share.calls:
                del self._shares[who]

    async def _refuse(self, context: Context, share: _Share, why: str) -> None:
        self._counters.calls_refused += 1
        if not share.is_told:
            share.is_told = True
            _log.warning("%s: more of its calls are refused", why)
        if share.refusals < REFUSALS_WAITING_MAX:
            share.refusals += 1
            try:
                async with share.refusal:
                    await asyncio.sleep(REFUSAL_S)
            finally:
                share.refusals -= 1
        text = f"{why}: end some of them, or ask another replica"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)


def _encoder(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Encoder of replies. One that is encoded already, as the list of the nodes is for many
    callers, goes as it is."""
    return lambda reply: reply if isinstance(reply, bytes) else encode(reply)


def _keys_of(request: Any) -> int:
    """Cost of answering a request, in keys."""
    if not isinstance(request, pb.MatchRequest):
        return 1
    return max(1, len(request.keys) // KEY_BYTES, len(request.tokens.ids) // TOKENS_PER_KEY)
