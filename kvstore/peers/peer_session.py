"""One stream to another node: ask to be lent blocks, give them back.

A session ends with the first thing that goes wrong, and everything that waits on it then raises
`SessionLost`; whoever needs the peer again opens another. The peer proves its name by its
certificate; its address comes from membership.

A call keeps its connection as long as anything knows it. Errors know the frames they came through,
and some are kept until garbage is collected, which takes for ever while nothing happens: so none is
raised where a call could be found, and a session that is closed has none.

Does not cover: serving others (`lender`), what is asked for (`borrower`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Final, Self

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.client.reasons import plain_reason
from kvstore.client.tls import Identity
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.proto import loans, peer_pb2 as pb
from kvstore.proto.peer_pb2_grpc import PeersStub
from kvstore.types import KEY_BYTES, SpaceId

OPEN_TIMEOUT_S: Final = 2.0
KEEPALIVE_MS: Final = 10_000
PINGS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 3_000),
    # That alone waits for a kernel, and one of a stopped process answers.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Pings of both ends while a session is quiet: a host that vanishes closes no connection."""


Dial = Callable[[str, str, grpc.ChannelCredentials | None], grpc.aio.Channel]
"""(name, address, credentials) of a peer → a channel to it."""


class SessionLost(KVStoreError):
    """The peer is gone, refuses, or talks nonsense. The text says which."""


class PeerSession:
    """A stream that is open. On the asyncio loop."""

    def __init__(self, channel: grpc.aio.Channel, call: Any, welcome: pb.Welcome) -> None:
        self.who = loans.who_of(welcome)
        self.descriptor = welcome.descriptor
        """The peer's descriptor, which our mover needs to read there."""
        self.lost = ""
        """Why it has ended."""
        self.heard: Callable[[pb.Answer | None], object] = lambda _: None
        """Called with words about pushes, and with None when the session has ended."""
        self._channel = channel
        self._call = call
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[pb.Answer]] = {}
        self._writing = asyncio.Lock()
        """A stream that two write to at a time is ended by gRPC."""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def open(
        cls,
        name: str,
        address: str,
        *,
        me: loans.Who,
        credentials: grpc.ChannelCredentials | None,
        dial: Dial | None = None,
    ) -> Self:
        """`dial`: what makes a channel; None: gRPC. Raises SessionLost."""
        channel = (dial or _channel)(name, address, credentials)
        call, trouble = None, ""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await channel.channel_ready()
                call = PeersStub(channel).Session()
                hello = pb.Hello(node=me.node, incarnation=me.incarnation)
                await call.write(pb.Ask(hello=hello))
                answer = await call.read()
            if answer is grpc.aio.EOF or answer.WhichOneof("kind") != "welcome":
                raise SessionLost(f"node {name} does not welcome this one")
            session = cls(channel, call, answer.welcome)
        except (TimeoutError, grpc.RpcError, ProtocolError, SessionLost) as error:
            trouble = _sentence(name, error)
        call = None
        if trouble:
            await channel.close()
            raise SessionLost(trouble)
        if session.who.node != name:
            await session.close()
            raise SessionLost(f"{address} is not node {name}")
        return session

    async def lend(
        self, tenant: str, space: SpaceId, keys: bytes, *, timeout_s: float
    ) -> tuple[int, loans.Borrowed]:
        """(loan, what is lent) of the longest run that the peer has in dram. Raises SessionLost."""
        loan = next(self._numbers)
        lend = pb.Lend(loan=loan, tenant=tenant, space=space, keys=keys)
        answer = await self._ask(loan, pb.Ask(lend=lend), "lent", timeout_s)
        try:
            return loan, loans.borrowed_of(answer.lent, asked=len(keys) // KEY_BYTES)
        except ProtocolError as error:
            self._end(str(error))
            raise SessionLost(self.lost) from None

    async def give_back(self, loan: int, *, count: int, timeout_s: float) -> NDArray[np.bool_]:
        """Which of the loan's blocks stayed as they were lent until now. Raises SessionLost."""
        ask = pb.Ask(give_back=pb.GiveBack(loan=loan))
        answer = await self._ask(loan, ask, "returned", timeout_s)
        try:
            return loans.intact_of(answer.returned, count=count)
        except ProtocolError as error:
            self._end(str(error))
            raise SessionLost(self.lost) from None

    async def tell(self, ask: pb.Ask, *, timeout_s: float) -> None:
        """Say what has no answer of its own. Raises SessionLost."""
        trouble = ""
        try:
            async with asyncio.timeout(timeout_s), self._writing:
                if not self.lost:
                    await self._call.write(ask)
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
            trouble = _sentence(self.who.node, error)
        if trouble:
            self._end(trouble)
        if self.lost:
            raise SessionLost(self.lost)

    async def close(self) -> None:
        """Hang up: the peer ends what it lent."""
        self._end("this node has hung up")
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._channel.close()
        self._call = None

    async def _ask(self, loan: int, ask: pb.Ask, kind: str, timeout_s: float) -> pb.Answer:
        if self.lost:
            raise SessionLost(self.lost)
        future = self._waiting[loan] = asyncio.get_running_loop().create_future()
        answer, trouble = pb.Answer(), "it answers what was not asked"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._writing:
                    if not self.lost:
                        await self._call.write(ask)
                answer = await future
        except TimeoutError:
            trouble = "it does not answer"
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            trouble = _sentence(self.who.node, error)
        finally:
            self._waiting.pop(loan, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # whatever went wrong has been told already
        if answer.WhichOneof("kind") != kind:
            self._end(trouble)
            raise SessionLost(self.lost)
        return answer

    async def _read(self) -> None:
        reason = "it has hung up"
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                kind = answer.WhichOneof("kind")
                if kind in ("pushed", "push_over"):
                    self.heard(answer)
                    continue
                loan = getattr(answer, kind).loan if kind in ("lent", "returned") else 0
                future = self._waiting.get(loan)
                if future is not None and not future.done():
                    future.set_result(answer)
        except grpc.RpcError as error:
            reason = _sentence(self.who.node, error)
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        self._call.cancel()
        self.heard(None)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLost(reason))


def _channel(
    name: str, address: str, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    options = [
        # Addresses are not in certificates; whose it is, is.
        ("grpc.ssl_target_name_override", str(Identity("node", name))),
        ("grpc.max_receive_message_length", loans.MESSAGE_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        *PINGS,
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


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
