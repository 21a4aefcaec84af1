"""The inspect service: what `kvstore inspect`, `clear` and `explain` ask, on a unix socket.

Only the node's own user can open the socket (0600), which may be the engines' as well: who says
nothing costs no thread (`net.calls`). Every answer is made on the node's loop, between two steps,
so every list has a limit. Does not cover: what the rows mean (`kvstore.engine.why`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.config.defaults import (
    BLOCK_ROWS_MAX,
    PREFIX_KEYS_MAX,
    REPLY_BYTES_MAX,
    REQUEST_ROWS_MAX,
)
from kvstore.engine import Engine
from kvstore.errors import ConfigError, NodeBusy
from kvstore.net import callers
from kvstore.net.aio import LoopThread
from kvstore.net.calls import Calls, RefusedCall
from kvstore.node.driver import Driver, NotDurable
from kvstore.proto import feeds, inspect_pb2 as pb
from kvstore.proto.convert import Row, to_message
from kvstore.proto.inspect_pb2_grpc import InspectServicer, add_InspectServicer_to_server
from kvstore.supervisor.listener import INSPECT_SUFFIX
from kvstore.types import KEY_BYTES, SpaceId
from kvstore.wire.load import Load

THREAD_COUNT: Final = 2
CALL_COUNT_MAX: Final = 8
"""Answered, or waiting for a thread."""
IDLE_MS: Final = 10_000
START_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 0.5
REQUEST_BYTES_MAX: Final = 64 << 10
QUERY_TIMEOUT_S: Final = 2.0
_T = TypeVar("_T")


class SpaceUnknown(RefusedCall):
    """No space, or more than one, begins with these digits."""


class Cluster(Protocol):
    """What is needed of `member.ClusterMember`."""

    @property
    def node(self) -> str: ...

    def members(self) -> Sequence[Row]:
        """The nodes of the cluster, by the index; it may take a second."""
        ...

    def transfers(self) -> Sequence[Row]:
        """How long reading from them took."""
        ...

    def memories(self, tenant: str, space: SpaceId | None, keys: bytes) -> Sequence[Row]:
        """What engines hold in their own memory: all, or those that hold a prompt."""
        ...

    def with_peers(self, load: Load) -> Load:
        """What the node does, with what it does with them."""
        ...


class Alone:
    """A node that is in no cluster."""

    node = ""

    def members(self) -> Sequence[Row]:
        """None."""
        return ()

    transfers = members

    def memories(self, tenant: str, space: SpaceId | None, keys: bytes) -> Sequence[Row]:
        """None."""
        return ()

    def with_peers(self, load: Load) -> Load:
        """As it was."""
        return load


class InspectService(InspectServicer):
    """Asks the loop; knows nothing itself."""

    def __init__(
        self, driver: Driver, cluster: Cluster | None = None, incarnation: int = 0
    ) -> None:
        self._driver = driver
        self._cluster: Cluster = cluster or Alone()
        self._incarnation = incarnation

    def Nodes(self, request: pb.NodesRequest, context: grpc.ServicerContext) -> pb.NodesReply:
        return pb.NodesReply(rows=self._rows(lambda engine: engine.nodes()))

    def Unserved(
        self, request: pb.UnservedRequest, context: grpc.ServicerContext
    ) -> pb.UnservedReply:
        return pb.UnservedReply(rows=self._rows(lambda engine: engine.unserved()))

    def Members(self, request: pb.MembersRequest, context: grpc.ServicerContext) -> pb.MembersReply:
        rows: list[Any] = [to_message(row) for row in self._cluster.members()]
        return pb.MembersReply(rows=rows)

    def Transfers(
        self, request: pb.TransfersRequest, context: grpc.ServicerContext
    ) -> pb.TransfersReply:
        rows: list[Any] = [to_message(row) for row in self._cluster.transfers()]
        return pb.TransfersReply(rows=rows)

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadReply:
        load = self._cluster.with_peers(self._ask(lambda engine: engine.load()))
        return pb.LoadReply(
            node=self._cluster.node,
            incarnation=self._incarnation,
            load=feeds.load_message(load),
        )

    def Tiers(self, request: pb.TiersRequest, context: grpc.ServicerContext) -> pb.TiersReply:
        return pb.TiersReply(rows=self._rows(lambda engine: engine.tiers()))

    def Quotas(self, request: pb.QuotasRequest, context: grpc.ServicerContext) -> pb.QuotasReply:
        return pb.QuotasReply(rows=self._rows(lambda engine: engine.quotas()))

    def Spaces(self, request: pb.SpacesRequest, context: grpc.ServicerContext) -> pb.SpacesReply:
        return pb.SpacesReply(rows=self._rows(lambda engine: engine.spaces()))

    def Blocks(self, request: pb.BlocksRequest, context: grpc.ServicerContext) -> pb.BlocksReply:
        # One more tells that there are more.
        limit = min(request.limit or BLOCK_ROWS_MAX, BLOCK_ROWS_MAX + 1)
        space = request.space.lower()

        def ask(engine: Engine) -> Sequence[Row]:
            if space:
                find_spaces(engine, space)
            return engine.blocks(limit=limit, space=space)

        return pb.BlocksReply(rows=self._rows(ask))

    def Leases(self, request: pb.LeasesRequest, context: grpc.ServicerContext) -> pb.LeasesReply:
        return pb.LeasesReply(rows=self._rows(lambda engine: engine.leases()))

    def Jobs(self, request: pb.JobsRequest, context: grpc.ServicerContext) -> pb.JobsReply:
        return pb.JobsReply(rows=self._rows(lambda engine: engine.jobs()))

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearReply:
        prefix = request.space.lower()
        try:
            space = None
            if prefix:
                space = self._driver.query(
                    lambda engine: find_space(engine, prefix), timeout_s=QUERY_TIMEOUT_S
                )
            blocks = self._driver.clear(space=space, tenant=None, timeout_s=QUERY_TIMEOUT_S)
        except NodeBusy as error:
            raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        except NotDurable as error:
            raise RefusedCall(grpc.StatusCode.DATA_LOSS, str(error)) from None
        return pb.ClearReply(blocks=blocks)

    def Requests(
        self, request: pb.RequestsRequest, context: grpc.ServicerContext
    ) -> pb.RequestsReply:
        limit = min(request.limit or REQUEST_ROWS_MAX, REQUEST_ROWS_MAX)
        rows = self._rows(lambda engine: engine.explain.requests(request.request, limit=limit))
        return pb.RequestsReply(rows=rows)

    def Ranges(self, request: pb.RangesRequest, context: grpc.ServicerContext) -> pb.RangesReply:
        rows = self._rows(lambda engine: engine.explain.ranges(request.number))
        return pb.RangesReply(rows=rows)

    def Hashings(
        self, request: pb.HashingsRequest, context: grpc.ServicerContext
    ) -> pb.HashingsReply:
        return pb.HashingsReply(rows=self._rows(lambda engine: engine.explain.hashings()))

    def Memories(
        self, request: pb.MemoriesRequest, context: grpc.ServicerContext
    ) -> pb.MemoriesReply:
        prefix = request.prefix
        _check_keys(prefix.keys)
        space = SpaceId(prefix.space) if request.HasField("prefix") else None
        rows: list[Any] = [
            to_message(row) for row in self._cluster.memories(prefix.tenant, space, prefix.keys)
        ]
        return pb.MemoriesReply(rows=rows)

    def Prefix(self, request: pb.PrefixRequest, context: grpc.ServicerContext) -> pb.RangesReply:
        _check_keys(request.keys)
        space = SpaceId(request.space)
        rows = self._rows(lambda engine: engine.explain.prefix(request.tenant, space, request.keys))
        return pb.RangesReply(rows=rows)

    def _rows(self, ask: Callable[[Engine], Sequence[Row]]) -> Iterable[Any]:
        messages: list[Message] = [to_message(row) for row in self._ask(ask)]
        return messages

    def _ask(self, ask: Callable[[Engine], _T]) -> _T:
        try:
            return self._driver.query(ask, timeout_s=QUERY_TIMEOUT_S)
        except NodeBusy as error:
            raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None


def _check_keys(keys: bytes) -> None:
    if len(keys) % KEY_BYTES or len(keys) > PREFIX_KEYS_MAX * KEY_BYTES:
        text = f"keys are {KEY_BYTES} bytes each, {PREFIX_KEYS_MAX} at most"
        raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, text)


def find_spaces(engine: Engine, prefix: str) -> list[SpaceId]:
    """Spaces whose hex form begins with `prefix`, at least one. Raises SpaceUnknown."""
    found = [space for space in engine.space_ids() if space.hex().startswith(prefix)]
    if not found:
        raise SpaceUnknown(
            grpc.StatusCode.NOT_FOUND,
            f"no space begins with {prefix!r}: see kvstore inspect spaces",
        )
    return found


def find_space(engine: Engine, prefix: str) -> SpaceId:
    """The one space whose hex form begins with `prefix`. Raises SpaceUnknown."""
    found = find_spaces(engine, prefix)
    if len(found) > 1:
        raise SpaceUnknown(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{len(found)} spaces begin with {prefix!r}: give more digits",
        )
    return found[0]


class InspectServer:
    """The service on its socket, from construction until `close`."""

    def __init__(
        self,
        socket: Path,
        loop: LoopThread,
        driver: Driver,
        cluster: Cluster | None = None,
        incarnation: int = 0,
    ) -> None:
        """Listen beside the attach socket `socket`, whose lock the caller holds.

        Raises:
            ConfigError: the socket cannot be made.
        """
        self.path = socket.with_name(socket.name + INSPECT_SUFFIX)
        self._pool = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="inspect")
        self._loop = loop
        try:
            service = InspectService(driver, cluster, incarnation)
            loop.call(self._listen(service), timeout_s=START_TIMEOUT_S)
        except RuntimeError:
            self._pool.shutdown()
            raise ConfigError(
                f"socket {self.path} cannot be made: choose another --socket"
            ) from None

    async def _listen(self, service: InspectService) -> None:
        # Never undone: gRPC's poller would end with its last server, while the loop still reads it.
        grpc.aio.init_grpc_aio()
        self._server = grpc.aio.server(
            interceptors=[Calls(self._pool, count_max=CALL_COUNT_MAX)],
            options=[
                ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
                ("grpc.max_send_message_length", REPLY_BYTES_MAX),
                ("grpc.max_concurrent_streams", CALL_COUNT_MAX),
                ("grpc.max_metadata_size", 8 << 10),
                # Or connections that ask nothing would be all that there may be.
                ("grpc.max_connection_idle_ms", IDLE_MS),
                *callers.limits(),
            ],
        )
        add_InspectServicer_to_server(service, self._server)
        # gRPC makes the file itself: the mask keeps others out from the first moment.
        mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self.path}")
        finally:
            os.umask(mask)
        await self._server.start()

    def close(self) -> None:
        """Stop at once and remove the socket file."""
        with contextlib.suppress(TimeoutError):
            self._loop.call(self._server.stop(None), timeout_s=CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):
            self.path.unlink()
