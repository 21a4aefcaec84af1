"""One stream to another node: ask to be served blocks, give them back.

A session ends with its first error, and everything that waits for it then raises `SessionLost`; the
next caller opens another session. The peer proves its name by its certificate; its address comes
from membership.

gRPC closes a connection only when nothing refers to its call any more. An exception refers to the
frames that it passed through, with their local variables, and may be kept until garbage is
collected, which takes for ever in an idle process. So no exception is raised in a frame that holds
the call, and a closed session holds none.

Does not cover: serving others (`block_server`), what is asked for (`fetcher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.client.index import aio_channel
from kvstore.client.reasons import plain_reason
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.types import KEY_BYTES, SpaceId
from kvstore.wire import peers as wire
from kvstore.wire.identity import Identity

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
_Served = TypeVar("_Served", wire.ServeAnswer, wire.GivenBack)


class SessionLost(KVStoreError):
    """The peer is gone, refuses, or sends what the protocol forbids; the text says which."""


class PeerSession:
    """An open stream to a peer. Runs on the asyncio loop."""

    def __init__(self, channel: grpc.aio.Channel, call: Any, welcome: wire.PeerWelcome) -> None:
        self.node = welcome.node
        self.descriptor = welcome.descriptor
        """The peer's descriptor, which our transfer worker needs to read there."""
        self.lost = ""
        """Why the session has ended; empty while it is open."""
        self.heard: Callable[[wire.PushWord | None], object] = lambda _: None
        """Called with each message about pushes, and with None when the session ends."""
        self._channel = channel
        self._call = call
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.ServeAnswer | wire.GivenBack]] = {}
        self._writing = asyncio.Lock()
        """Held during a write: gRPC ends a stream that two tasks write to at a time."""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def open(
        cls,
        name: str,
        address: str,
        *,
        me: wire.PeerHello,
        credentials: grpc.ChannelCredentials | None,
        dial: Dial | None = None,
    ) -> Self:
        """Open a session with node `name` at `address`; `me`: this node. `dial`: makes the channel;
        None: gRPC. Raises SessionLost."""
        channel = (dial or _channel)(name, address, credentials)
        call: Any = None
        trouble = ""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await channel.channel_ready()
                call = channel.stream_stream(f"/{wire.PEERS}/Session", wire.encode, bytes)()
                await call.write(me)
                data = await call.read()
            welcome = None if data is grpc.aio.EOF else wire.decode_answer(data)
            if not isinstance(welcome, wire.PeerWelcome):
                raise SessionLost(f"node {name} does not welcome this one")
            session = cls(channel, call, welcome)
        except (TimeoutError, grpc.RpcError, ProtocolError, SessionLost) as error:
            trouble = _sentence(name, error)
        call = None
        if trouble:
            await channel.close()
            raise SessionLost(trouble)
        if session.node != name:
            await session.close()
            raise SessionLost(f"{address} is not node {name}")
        return session

    async def serve(
        self, tenant: str, space: SpaceId, keys: bytes, *, timeout_s: float
    ) -> wire.ServeAnswer:
        """Ask the peer for the longest run of these keys that it has in dram, pinned until
        `give_back`. Raises SessionLost."""
        serve = wire.ServeAsk(next(self._numbers), tenant, space, keys)
        answer = await self._ask(serve, wire.ServeAnswer, timeout_s)
        try:
            wire.check_served(answer, asked=len(keys) // KEY_BYTES)
        except ProtocolError as error:
            self._end(str(error))
            raise SessionLost(self.lost) from None
        return answer

    async def give_back(self, serving: int, *, count: int, timeout_s: float) -> NDArray[np.bool_]:
        """Release a serving. Returns flags of its `count` blocks: those that stayed unchanged until
        now. Raises SessionLost."""
        answer = await self._ask(wire.GiveBack(serving), wire.GivenBack, timeout_s)
        try:
            return wire.intact_of(answer, count=count)
        except ProtocolError as error:
            self._end(str(error))
            raise SessionLost(self.lost) from None

    async def tell(self, ask: wire.Ask, *, timeout_s: float) -> None:
        """Send a message that has no direct answer. Raises SessionLost."""
        trouble = ""
        try:
            async with asyncio.timeout(timeout_s), self._writing:
                if not self.lost:
                    await self._call.write(ask)
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
            trouble = _sentence(self.node, error)
        if trouble:
            self._end(trouble)
        if self.lost:
            raise SessionLost(self.lost)

    async def close(self) -> None:
        """End the session: the peer releases what it served."""
        self._end("this node has hung up")
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._channel.close()
        self._call = None

    async def _ask(
        self, ask: wire.ServeAsk | wire.GiveBack, kind: type[_Served], timeout_s: float
    ) -> _Served:
        if self.lost:
            raise SessionLost(self.lost)
        future = self._waiting[ask.serving] = asyncio.get_running_loop().create_future()
        answer, trouble = None, "it answers what was not asked"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._writing:
                    if not self.lost:
                        await self._call.write(ask)
                answer = await future
        except TimeoutError:
            trouble = "it does not answer"
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            trouble = _sentence(self.node, error)
        finally:
            self._waiting.pop(ask.serving, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # whatever went wrong has been told already
        if not isinstance(answer, kind):
            self._end(trouble)
            raise SessionLost(self.lost)
        return answer

    async def _read(self) -> None:
        reason = "it has hung up"
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                answer = wire.decode_answer(data)
                if isinstance(answer, wire.Pushed | wire.PushOver):
                    self.heard(answer)
                elif isinstance(answer, wire.ServeAnswer | wire.GivenBack):
                    future = self._waiting.get(answer.serving)
                    if future is not None and not future.done():
                        future.set_result(answer)
        except (grpc.RpcError, ProtocolError) as error:
            reason = _sentence(self.node, error)
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
        ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        *PINGS,
    ]
    return aio_channel(address, credentials, options)


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
