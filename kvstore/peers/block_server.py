"""Serving fetches of other nodes: their sessions, and the engine's answers to their asks.

    peer ──Ask──▶ Session ──Serve, ServingReturned, PeerGone──▶ engine
    peer ◀──Answer── Session ◀───────────AnswerPeer──────────── engine

A session is one stream of one incarnation of a node, by the name in its certificate. A peer with
more than ASKS_MAX asks without an answer is hung up on; one that does not take its answers is not
read meanwhile. A session's servings end with it. A node has one session: its next one ends the one
before, and all end when this node's transfer worker is another, with other memory that peers must
learn of. A peer that does not take the rest of its answers within HANG_UP_S is cut off.

Does not cover: what is served (`engine.moves.servings`), reading from others (`fetcher`), the bytes
(`kvstore.transport`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

import grpc

from kvstore.engine.events import PeerEvent, PeerGone, Serve, ServingReturned
from kvstore.errors import ProtocolError
from kvstore.net.calls import RefusedCall
from kvstore.net.tls import peer_identities
from kvstore.peers.pusher import Pusher
from kvstore.wire import peers as wire
from kvstore.wire.identity import Identity

ASKS_MAX: Final = 64
UNREAD_MAX: Final = 1024
"""Answers that wait for a peer to take them, from which on nothing more is read from it."""
SESSIONS_MAX: Final = 1024
HANG_UP_S: Final = 5.0
HELLO_TIMEOUT_S: Final = 5.0

_DENIED: Final = grpc.StatusCode.PERMISSION_DENIED

_log = logging.getLogger(__name__)


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
        self.objection = ""


class BlockServer:
    """The gRPC service `PEERS`, by which other nodes read blocks here. Runs on the asyncio loop."""

    def __init__(
        self,
        post: Callable[[PeerEvent], None],
        *,
        who: wire.PeerHello,
        descriptor: Callable[[], bytes],
        demands_certificates: bool,
    ) -> None:
        """`post`: passes an event to the engine. `who`: this node. `descriptor`: returns that of
        the present transfer worker, empty while there is none. `demands_certificates`: a peer must
        have the certificate of the node that it says it is."""
        self._pass_on = post
        self._who = who
        self._descriptor = descriptor
        self._demands_certificates = demands_certificates
        self.pusher: Pusher | None = None
        """Handles grants of peers; None: a grant ends the peer's session."""
        self._numbers = itertools.count(1)
        self.sessions: dict[int, _Session] = {}
        """Session of each connected peer, by number."""

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
        except StopAsyncIteration:
            return
        except TimeoutError:
            sentence = f"a session begins with Hello, within {HELLO_TIMEOUT_S:.0f} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence)
        try:
            node = self._caller(wire.decode_ask(first), context)
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
            yield wire.PeerWelcome(self._who.node, self._who.incarnation, self._descriptor())
            while (answer := await session.answers.get()) is not None:
                session.unanswered -= isinstance(answer, wire.ServeAnswer | wire.GivenBack)
                if session.answers.qsize() < UNREAD_MAX:
                    session.has_room.set()
                yield answer
            if session.objection:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, session.objection)
        finally:
            reading.cancel()
            if session.cut is not None:
                session.cut.cancel()
            del self.sessions[session.number]
            if self.pusher is not None:
                self.pusher.gone(session.number)
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

    def _caller(self, first: wire.Ask, context: Any) -> str:
        """Name of the calling node, from its Hello. Raises RefusedCall if the first message is no
        Hello, or the certificate is another node's."""
        if not isinstance(first, wire.PeerHello):
            raise RefusedCall(_DENIED, "the first word of a session is Hello")
        if self._demands_certificates and Identity("node", first.node) not in peer_identities(
            context.auth_context()
        ):
            raise RefusedCall(_DENIED, f"this certificate is not of node {first.node}")
        return first.node

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
        """Handle one message of a peer. Raises ProtocolError."""
        peer = session.number
        match ask:
            case wire.PushGrant() if self.pusher is not None:
                self.pusher.asked(peer, session.node, ask)
            case wire.PushRevoke() if self.pusher is not None:
                self.pusher.revoked(peer, ask.grant)
            case wire.ServeAsk():
                self._post(session, Serve(peer, ask.serving, ask.tenant, ask.space, ask.keys))
            case wire.GiveBack():
                self._post(session, ServingReturned(peer, ask.serving))
            case _:
                raise ProtocolError("an ask that is none")

    def _post(self, session: _Session, event: Serve | ServingReturned) -> None:
        """Pass an ask to the engine. Raises ProtocolError if too many of the peer are
        unanswered."""
        session.unanswered += 1
        if session.unanswered > ASKS_MAX:
            raise ProtocolError(f"more than {ASKS_MAX} asks at a time")
        self._pass_on(event)

    def answer(self, peer: int, answer: wire.Answer) -> None:
        """Queue an answer for a peer; dropped if the peer is not connected any more."""
        session = self.sessions.get(peer)
        if session is not None:
            session.answers.put_nowait(answer)
            if session.answers.qsize() >= UNREAD_MAX:
                session.has_room.clear()
