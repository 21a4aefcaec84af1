"""Sessions between nodes, both ends: one stream, by which blocks are asked for and given back.

    PeerSession ──Ask──▶ BlockServer ──PeerAsked, PeerGone──▶ engine of the peer
    PeerSession ◀─Answer── BlockServer ◀─────AnswerPeer────── engine of the peer

A `PeerSession` ends with its first error, and everything that waits for it then raises
`SessionLost`; the next caller opens another session. The peer proves its name by its certificate;
its address comes from membership.

gRPC closes a connection only when nothing refers to its call any more. An exception refers to the
frames that it passed through, with their local variables, and may be kept until garbage is
collected, which takes for ever in an idle process. So no exception is raised in a frame that holds
the call, and a lost session holds none.

For `BlockServer` a session is one stream of one incarnation of a node, by the name in its
certificate. A peer with more than ASKS_MAX asks without an answer is hung up on; one that does not
take its answers is not read meanwhile. A session's servings end with it. A node has one session:
its next one ends the one before, and all end when this node's transfer worker is another, with
other memory that peers must learn of. A peer that does not take the rest of its answers within
HANG_UP_S is cut off.

A grant is passed to the engine only if its descriptor is on the machine where certificate and
membership (`fetcher`) say that the peer is; others are refused with PushOver. A revocation follows
its grant.

Does not cover: what is asked for (`fetcher`), what is served (`engine.moves.servings`), what is
written for a grant (`engine.moves.pushes`, `pushes`), the bytes (`kvstore.transport`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.client.index import aio_channel, pings, plain_reason
from kvstore.engine.events import PeerAsked, PeerEvent, PeerGone
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.net.aio import Tasks
from kvstore.net.server import RefusedCall, require_node
from kvstore.ports import Clock
from kvstore.transport.backends import is_at
from kvstore.types import KEY_BYTES, SpaceId
from kvstore.wire import peers as wire
from kvstore.wire.identity import Identity

if TYPE_CHECKING:
    from kvstore.peers.pushes import Stages
    from kvstore.peers.transfer_worker import TransferWorker


OPEN_TIMEOUT_S: Final = 2.0
ASKS_MAX: Final = 64
UNREAD_MAX: Final = 1024
"""Answers that wait for a peer to take them, from which on nothing more is read from it."""
SESSIONS_MAX: Final = 1024
HANG_UP_S: Final = 5.0
HELLO_TIMEOUT_S: Final = 5.0
GRANTS_MAX: Final = 256
"""Most grants of one peer for which no PushOver was sent."""
KEEPALIVE_MS: Final = 10_000
PINGS: Final = pings(KEEPALIVE_MS, 3_000)
"""Options of both ends of a session."""
_DENIED: Final = grpc.StatusCode.PERMISSION_DENIED

_log = logging.getLogger(__name__)
Dial = Callable[[str, str, grpc.ChannelCredentials | None], grpc.aio.Channel]
"""(name, address, credentials) of a peer → a channel to it."""
_Served = TypeVar("_Served", wire.ServeAnswer, wire.GivenBack)
_T = TypeVar("_T")
_LOST: Final = (TimeoutError, grpc.RpcError, asyncio.InvalidStateError)
"""Errors of gRPC when the other end is gone; the last one: of a write after the end."""
Run = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Begins a task and keeps it, as `aio.Tasks.run`."""


def _channel(
    name: str, address: str, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    options = [
        # Addresses are not in certificates; whose it is, is.
        ("grpc.ssl_target_name_override", str(Identity("node", name))),
        ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        *PINGS,
    ]
    return aio_channel(address, credentials, options)


class PeerContext(NamedTuple):
    """Common parts of a node's exchange with peers."""

    post: Callable[[PeerEvent], object]
    """Passes an event to the engine."""
    who: wire.PeerHello
    """This node."""
    transfer_worker: TransferWorker
    memory: NDArray[np.uint8]
    """The arena."""
    clock: Clock
    credentials: grpc.ChannelCredentials | None
    """None: nobody shows certificates, in labs."""
    stages: Stages
    """Durations of fetches and of pushes from others."""
    dial: Dial = _channel
    """Makes a channel to a peer."""


class SessionLost(KVStoreError):
    """The peer is gone, refuses, or sends what the protocol forbids; the text says which."""


class PeerSession:
    """A stream to a peer, from construction until it is lost. Runs on the asyncio loop."""

    def __init__(self, node: str, address: str, context: PeerContext, run: Run) -> None:
        """Begin to open it (`opened`)."""
        self.node = node
        self.descriptor = b""
        """The peer's descriptor, which our transfer worker needs to read there."""
        self.lost = ""
        """Why the session has ended; empty while it opens or is open."""
        self.heard: Callable[[wire.PushWord | None], object] = lambda _: None
        """Called with each message about pushes, and with None when the session ends."""
        self._channel = context.dial(node, address, context.credentials)
        self._call: Any = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.ServeAnswer | wire.GivenBack]] = {}
        self._writing = asyncio.Lock()
        """Held during a write: gRPC ends a stream that two tasks write to at a time."""
        self._opened = asyncio.Event()
        """Set once it is open or lost."""
        self._running = run(self._run(address, context.who))

    async def opened(self) -> str:
        """Wait until it is open; returns why it is lost, empty if it is not."""
        await self._opened.wait()
        return self.lost

    async def _run(self, address: str, who: wire.PeerHello) -> None:
        """Open the stream, and read until it ends."""
        reason = "it has hung up"
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._channel.channel_ready()
                path = f"/{wire.PEERS}/Session"
                self._call = self._channel.stream_stream(path, wire.encode, bytes)()
                await self._call.write(who)
                data = await self._call.read()
            welcome = None if data is grpc.aio.EOF else wire.decode_answer(data)
            if not isinstance(welcome, wire.PeerWelcome):
                raise SessionLost(f"node {self.node} does not welcome this one")
            if welcome.node != self.node:
                raise SessionLost(f"{address} is not node {self.node}")
            self.descriptor = welcome.descriptor
            self._opened.set()
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._take(wire.decode_answer(data))
        except (*_LOST, ProtocolError, SessionLost) as error:
            reason = _sentence(self.node, error)
        except asyncio.CancelledError:  # not raised: the task would keep it, and so the call
            reason = "this node has hung up"
        finally:
            self._end(reason)
            if self._call is not None:
                self._call.cancel()
            await self._channel.close()
            self._call = None

    def _take(self, answer: wire.Answer) -> None:
        if isinstance(answer, wire.Pushed | wire.PushOver):
            self.heard(answer)
        elif isinstance(answer, wire.ServeAnswer | wire.GivenBack):
            future = self._waiting.get(answer.serving)
            if future is not None and not future.done():
                future.set_result(answer)

    async def serve(
        self, tenant: str, space: SpaceId, keys: bytes, *, timeout_s: float
    ) -> wire.ServeAnswer:
        """Ask the peer for the longest run of these keys that it has in dram, pinned until
        `give_back`. Raises SessionLost."""
        serve = wire.ServeAsk(next(self._numbers), tenant, space, keys)
        check = partial(wire.check_served, asked=len(keys) // KEY_BYTES)
        return await self._ask(serve, wire.ServeAnswer, check, timeout_s)

    async def give_back(self, serving: int, *, count: int, timeout_s: float) -> NDArray[np.bool_]:
        """Release a serving. Returns flags of its `count` blocks: those that stayed unchanged until
        now. Raises SessionLost."""
        check = partial(wire.intact_of, count=count)
        return await self._ask(wire.GiveBack(serving), wire.GivenBack, check, timeout_s)

    async def tell(self, ask: wire.Ask, *, timeout_s: float) -> None:
        """Send a message that has no direct answer. Raises SessionLost."""
        try:
            async with asyncio.timeout(timeout_s), self._writing:
                if not self.lost:
                    await self._call.write(ask)
        except _LOST as error:
            self.hang_up(_sentence(self.node, error))
        if self.lost:
            raise SessionLost(self.lost)

    def hang_up(self, reason: str) -> None:
        """End the session for this reason, unless it has ended: the peer releases what it
        served."""
        if not self.lost:
            self._end(reason)
            self._running.cancel()

    async def _ask(
        self,
        ask: wire.ServeAsk | wire.GiveBack,
        kind: type[_Served],
        check: Callable[[_Served], _T],
        timeout_s: float,
    ) -> _T:
        """Send an ask and wait for its answer of this kind, which is passed through `check`. Raises
        SessionLost."""
        if self.lost:
            raise SessionLost(self.lost)
        future = self._waiting[ask.serving] = asyncio.get_running_loop().create_future()
        trouble = "it answers what was not asked"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._writing:
                    if not self.lost:
                        await self._call.write(ask)
                answer = await future
            if isinstance(answer, kind):
                return check(answer)
        except TimeoutError:
            trouble = "it does not answer"
        except (grpc.RpcError, asyncio.InvalidStateError, ProtocolError) as error:
            trouble = _sentence(self.node, error)
        finally:
            self._waiting.pop(ask.serving, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # whatever went wrong has been told already
        self.hang_up(trouble)
        raise SessionLost(self.lost)

    def _end(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        self._opened.set()
        self.heard(None)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLost(reason))


def _sentence(name: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"node {name} does not answer"
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.INTERNAL:  # gRPC's word for writing after the end
            return f"node {name} has hung up"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"node {name} speaks another peer protocol: run one version of kvstore on all"
        return f"node {name}: {plain_reason(error.details())}"
    return str(error) or f"node {name} is lost"


# ── serving others ────────────────────────────────────────────────────────────────────────────────


class _Session:
    def __init__(self, number: int, node: str) -> None:
        self.number = number
        self.node = node
        self.answers: asyncio.Queue[wire.Answer | None] = asyncio.Queue()
        """Answers for the peer, in order; None ends the session."""
        self.serving = asyncio.current_task()
        self.cut: asyncio.TimerHandle | None = None
        self.has_room = asyncio.Event()
        """Set while fewer than UNREAD_MAX answers wait for the peer."""
        self.has_room.set()
        self.unanswered = 0
        self.grants: dict[int, asyncio.Task[None]] = {}
        """Checks of the grants for which PushOver was not sent, by number."""
        self.objection = ""


class BlockServer:
    """The gRPC service `PEERS`, by which other nodes read blocks here. Runs on the asyncio loop."""

    def __init__(self, context: PeerContext, address_of: Callable[[str], Awaitable[str]]) -> None:
        """With credentials in `context`, a peer must have the certificate of the node that it says
        it is. `address_of`: peer address of a node, empty if it is no member."""
        self._pass_on, self._context, self._address_of = context.post, context, address_of
        self._numbers = itertools.count(1)
        self.sessions: dict[int, _Session] = {}
        """Session of each connected peer, by number."""
        self._checks = Tasks("a bug in what checks grants")

    def handler(self) -> grpc.GenericRpcHandler:
        """gRPC handler of sessions. Messages are decoded in `session`: if gRPC decoded them, it
        would end the stream without saying what is wrong."""
        method = grpc.stream_stream_rpc_method_handler(self.session, bytes, wire.encode)
        return grpc.method_handlers_generic_handler(wire.PEERS, {"Session": method})

    async def session(self, asks: AsyncIterator[bytes], context: Any) -> AsyncIterator[wire.Answer]:
        """Serve one peer until either side ends the stream. Yields Welcome, then the answers for
        the peer."""
        try:
            first = await asyncio.wait_for(anext(asks), HELLO_TIMEOUT_S)
            hello = wire.decode_ask(first)
            if not isinstance(hello, wire.PeerHello):
                raise RefusedCall(_DENIED, "the first word of a session is Hello")
            node = hello.node
            if self._context.credentials is not None:
                require_node(context, node)
        except StopAsyncIteration:
            return
        except TimeoutError:
            sentence = f"a session begins with Hello, within {HELLO_TIMEOUT_S:.0f} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RefusedCall as error:
            await context.abort(error.code, str(error))
        self._hang_up(session for session in self.sessions.values() if session.node == node)
        if len(self.sessions) >= SESSIONS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many nodes ask here")
        session = _Session(next(self._numbers), node)
        self.sessions[session.number] = session
        reading = asyncio.get_running_loop().create_task(self._read(session, asks))
        _log.info("node %s reads here", node)
        try:
            who, worker = self._context.who, self._context.transfer_worker
            yield wire.PeerWelcome(who.node, who.incarnation, worker.descriptor)
            while (answer := await session.answers.get()) is not None:
                session.unanswered -= isinstance(answer, wire.ServeAnswer | wire.GivenBack)
                if session.answers.qsize() < UNREAD_MAX:
                    session.has_room.set()
                yield answer
            if session.objection:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, session.objection)
        finally:
            for task in (reading, *session.grants.values()):
                task.cancel()
            if session.cut is not None:
                session.cut.cancel()
            del self.sessions[session.number]
            self._pass_on(PeerGone(session.number))

    def transfer_worker_changed(self) -> None:
        """End all sessions: their descriptors of this node's memory are void."""
        self._hang_up(self.sessions.values())

    def _hang_up(self, sessions: Iterable[_Session]) -> None:
        for session in sessions:
            session.answers.put_nowait(None)
            if session.cut is None and session.serving is not None:
                session.cut = asyncio.get_running_loop().call_later(
                    HANG_UP_S, session.serving.cancel
                )

    async def _read(self, session: _Session, asks: AsyncIterator[bytes]) -> None:
        try:
            async for ask in asks:
                await session.has_room.wait()
                self._hear(session, wire.decode_ask(ask))
        except ProtocolError as error:
            session.objection = str(error)
        finally:
            self._hang_up([session])

    def _hear(self, session: _Session, ask: wire.Ask) -> None:
        """Handle one message of a peer. Raises ProtocolError if it is none, or too many of the peer
        are unanswered."""
        grants = session.grants
        match ask:
            case wire.PushGrant(grant=grant):
                if grant in grants or len(grants) >= GRANTS_MAX:
                    raise ProtocolError("a grant that was given before, or too many of them")
                grants[grant] = self._checks.run(self._check(session, ask))
            case wire.PushRevoke(grant=grant):
                if grant in grants:  # after the grant itself, which may be looked at still
                    grants[grant].add_done_callback(lambda _: self._post(session, ask))
            case wire.ServeAsk() | wire.GiveBack():
                session.unanswered += 1
                if session.unanswered > ASKS_MAX:
                    raise ProtocolError(f"more than {ASKS_MAX} asks at a time")
                self._post(session, ask)
            case _:
                raise ProtocolError("an ask that is none")

    async def _check(self, session: _Session, its: wire.PushGrant) -> None:
        """Pass a grant to the engine, or refuse it."""
        node, reason = session.node, ""
        address = await self._address_of(node)
        if not address:
            reason = f"node {node} is no member that the prefill node knows"
        elif not is_at(its.descriptor, address):
            reason = f"node {node} describes no transfer worker on its own machine"
        if reason:
            over = wire.PushOver(its.grant, its.epoch, reason, is_quiet=True)
            self.answer(session.number, over)
        else:
            self._post(session, its)

    def _post(self, session: _Session, ask: wire.OpenAsk) -> None:
        if session.number in self.sessions:  # a check of a grant may end behind its session
            self._pass_on(PeerAsked(session.number, session.node, ask))

    def answer(self, peer: int, answer: wire.Answer) -> None:
        """Queue an answer for a peer; dropped if the peer is not connected any more, or is about a
        grant that has ended."""
        session = self.sessions.get(peer)
        if session is None:
            return
        if isinstance(answer, wire.Pushed | wire.PushOver) and answer.grant not in session.grants:
            return
        if isinstance(answer, wire.PushOver):
            del session.grants[answer.grant]
            if answer.reason:
                text = "no more of a request's blocks are pushed to node %s: %s"
                _log.info(text, session.node, answer.reason)
        session.answers.put_nowait(answer)
        if session.answers.qsize() >= UNREAD_MAX:
            session.has_room.clear()
