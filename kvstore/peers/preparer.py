"""Blocks brought to dram ahead of time: `Preparer` serves such requests, and a node that leaves has
its hottest blocks brought to others by them (`drain_node`).

    router ──Prepare──▶ certificate? ─▶ place? ─▶ message ─▶ rate? ─▶ PrepareBlocks ──▶ engine
    router ◀──PrepareReply──────────────────────────────────────── BlocksPrepared ◀─┘

A caller is a client of the cluster by its certificate, which is served nothing else here, or a node
that leaves; indexes are refused. Calls are judged before their message is read. One caller has
CALLS_MAX calls at a time and KEYS_PER_S keys; any further call is refused with one sentence.

    SIGTERM ─▶ hottest runs ─▶ Prepare at a peer ─▶ the peer fetches them from here
                    ▲                    │
                    └── asked again ─────┘ until the peer has the run in dram, or will not take it

Each peer takes one run after the other, by the means and limits of any fetch; what one refuses,
since no engine of that space is attached to it, or since computing is quicker there, is offered to
the next. Meanwhile the node that leaves serves as before.

Does not cover: what is brought, and for whom (`engine.sessions.lookups`), which blocks are hottest
(`engine.why.report`), when the process ends (`supervisor`, `node.node`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

import grpc

from kvstore.client.index import aio_channel, channel_options, reason_of
from kvstore.engine.events import BlocksPrepared, PrepareBlocks
from kvstore.errors import ProtocolError
from kvstore.net.server import Context, RefusedCall, caller_identities, only_message
from kvstore.peers.peer_session import PeerContext
from kvstore.types import KEY_BYTES, Bucket
from kvstore.units import NS_PER_S
from kvstore.wire import peers as wire
from kvstore.wire.identity import Identity

CALLS_MAX: Final = 16
"""Calls of one caller at a time."""
CALLERS_MAX: Final = 64
KEYS_PER_S: Final = 65_536
"""Most keys per second of one caller; a look at a key takes about a microsecond of the node's
loop."""
READ_TIMEOUT_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 1.0
_EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED
ASK_AGAIN_S: Final = 0.05
CALL_TIMEOUT_S: Final = 2.0
PATIENCE_S: Final = 5.0
"""A peer without progress for this long is taken not to fetch a run. A fetch that failed is tried
again after a second or two."""
FAILURES_MAX: Final = 3
"""Failed calls in a row after which a peer is left out: one that hangs would hold up every run."""
Ask = Callable[[str, wire.PrepareRequest], Awaitable[wire.PrepareReply]]
"""Sends one Prepare to a peer, by its name; returns the reply."""

_log = logging.getLogger(__name__)


class _Caller:
    """One caller's calls under way, and the keys that its rate allows."""

    def __init__(self) -> None:
        self.calls, self.keys = 0, Bucket(KEYS_PER_S, NS_PER_S)


class Preparer:
    """The gRPC service `Ahead`. Runs on the asyncio loop."""

    def __init__(self, context: PeerContext) -> None:
        """With credentials in `context`, a caller must have a certificate of the cluster."""
        self._post, self._context = context.post, context
        self._callers: dict[str, _Caller] = {}
        self._asks = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.PrepareReply]] = {}
        self.refused_count = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """gRPC handler of Prepare. The call is served as a stream of one message, which is the same
        on the wire, so that the caller is checked before its message is read."""
        method = grpc.stream_unary_rpc_method_handler(self.prepare, bytes, wire.encode)
        return grpc.method_handlers_generic_handler(wire.AHEAD, {"Prepare": method})

    async def prepare(self, _messages: AsyncIterator[bytes], context: Context) -> wire.PrepareReply:
        """Answer one call, or refuse it."""
        try:
            name = self._name_of(context)
            caller = self._caller(name)
            caller.calls += 1
            try:
                return await self._answer(name, caller, context)
            finally:
                caller.calls -= 1
        except RefusedCall as error:
            self.refused_count += 1
            await context.abort(error.code, str(error))

    def _name_of(self, context: Context) -> str:
        """Name of the caller, from its certificate. Raises RefusedCall if it is neither a client
        nor a node."""
        if self._context.credentials is None:
            return str(context.peer())
        found = sorted(caller_identities(context))
        name = next((str(each) for each in found if each.role in {"client", "node"}), "")
        if not name:
            text = "only clients of the cluster, such as routers, and nodes prepare blocks"
            raise RefusedCall(grpc.StatusCode.PERMISSION_DENIED, text)
        return name

    def _caller(self, name: str) -> _Caller:
        """State of this caller. Raises RefusedCall if it has too many calls, or there are too many
        callers."""
        caller = self._callers.pop(name, None) or _Caller()
        self._callers[name] = caller
        if len(self._callers) > CALLERS_MAX:
            idle = next((key for key, each in self._callers.items() if not each.calls), name)
            del self._callers[idle]
            if idle == name and len(self._callers) >= CALLERS_MAX:
                raise RefusedCall(_EXHAUSTED, "too many callers prepare blocks here")
        if caller.calls >= CALLS_MAX:
            raise RefusedCall(_EXHAUSTED, f"{name} has {CALLS_MAX} calls open here already")
        return caller

    async def _answer(self, name: str, caller: _Caller, context: Context) -> wire.PrepareReply:
        """Read the request, have the engine begin, and return its reply. Raises RefusedCall."""
        message = await only_message(context, asyncio.timeout(READ_TIMEOUT_S))
        try:
            request = wire.decode_request(message)
        except ProtocolError as error:
            raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        count = len(request.keys) // KEY_BYTES
        if count > caller.keys.left(self._context.clock.now_ns()):
            raise RefusedCall(_EXHAUSTED, f"{name} prepares more than {KEYS_PER_S} blocks a second")
        caller.keys.take(count)
        ask = next(self._asks)
        answered: asyncio.Future[wire.PrepareReply] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = answered
        self._post(PrepareBlocks(ask, request))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answered
        except TimeoutError:
            text = "the node is busy"
            raise RefusedCall(grpc.StatusCode.DEADLINE_EXCEEDED, text) from None
        finally:
            del self._waiting[ask]

    def prepared(self, command: BlocksPrepared) -> None:
        """Pass the engine's answer to the call that waits for it."""
        answered = self._waiting.get(command.ask)
        if answered is not None and not answered.done():
            answered.set_result(command.its)


# ── a node that leaves ────────────────────────────────────────────────────────────────────────────


class Drain:
    """One departure: hands runs of blocks to peers through `ask`. Runs on the asyncio loop."""

    def __init__(self, runs: Sequence[wire.PrepareRequest], peers: Sequence[str], ask: Ask) -> None:
        self._runs, self._peers, self._ask = runs, peers, ask
        self._turns = {peer: asyncio.Semaphore() for peer in peers}
        self.block_count = sum(len(run.keys) for run in runs) // KEY_BYTES
        self._failures = dict.fromkeys(peers, 0)
        self._drained = [0] * len(runs)

    @property
    def drained_count(self) -> int:
        """Number of blocks that some peer has reported to be in its dram."""
        return sum(self._drained)

    async def run(self) -> None:
        """Offer all runs to the peers; returns when each is at a peer or was refused by all."""
        await asyncio.gather(*(self._place(number) for number in range(len(self._runs))))

    async def _place(self, number: int) -> None:
        first = number % max(1, len(self._peers))
        for peer in (*self._peers[first:], *self._peers[:first]):
            async with self._turns[peer]:
                is_lost = self._failures[peer] >= FAILURES_MAX
                if not is_lost and await self._is_taken(peer, number):
                    return

    async def _is_taken(self, peer: str, number: int) -> bool:
        run, best = self._runs[number], 0
        count, since_s = len(run.keys) // KEY_BYTES, time.monotonic()
        try:
            while time.monotonic() - since_s < PATIENCE_S:
                its = await self._ask(peer, run)
                if its.refused:
                    return False
                if min(its.dram, count) > best:
                    best, since_s = min(its.dram, count), time.monotonic()
                    self._drained[number] = max(best, self._drained[number])
                if best == count:
                    self._failures[peer] = 0
                    return True
                await asyncio.sleep(ASK_AGAIN_S)
        except (grpc.aio.AioRpcError, ProtocolError, TimeoutError) as error:
            self._failures[peer] += 1
            if self._failures[peer] == FAILURES_MAX:
                _log.warning("node %s is asked for no more: %s", peer, reason_of(error))
        return False


async def drain_node(
    runs: Sequence[wire.PrepareRequest],
    addresses: Mapping[str, str],
    credentials: grpc.ChannelCredentials | None,
    timeout_s: float,
) -> None:
    """Hand the runs to peers, within `timeout_s`, and log how far that went. `addresses`: peer
    address of each node."""
    channels = {
        name: aio_channel(address, credentials, channel_options(str(Identity("node", name))))
        for name, address in addresses.items()
    }

    async def ask(peer: str, request: wire.PrepareRequest) -> wire.PrepareReply:
        call = channels[peer].unary_unary(f"/{wire.AHEAD}/Prepare", wire.encode, bytes)
        return wire.decode_reply(await call(request, timeout=CALL_TIMEOUT_S))

    drain, begin_s = Drain(runs, sorted(addresses), ask), time.monotonic()
    _log.info("leaves: its %d hottest blocks go to %d nodes", drain.block_count, len(channels))
    try:
        async with asyncio.timeout(timeout_s):
            await drain.run()
    except TimeoutError:
        _log.warning("--drain-s is over before all was handed over")
    finally:
        _log.info(
            "drained: %d of the %d hottest blocks are in dram of %d other nodes, after %.1f s",
            *(drain.drained_count, drain.block_count, len(channels), time.monotonic() - begin_s),
        )
        await asyncio.gather(*(channel.close() for channel in channels.values()))
