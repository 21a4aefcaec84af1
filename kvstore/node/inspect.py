"""The inspect service: what `kvstore inspect`, `clear` and `explain` ask, on a unix socket.

Only the node's own user can open the socket (0600), which may be the engines' as well: who says
nothing costs no thread (`net.server`). Every answer is made on the node's loop, between two steps,
so every list has a limit. Does not cover: what the rows mean (`kvstore.engine.why`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from kvstore.config import defaults
from kvstore.engine.engine import Engine
from kvstore.errors import ConfigError, NodeBusy
from kvstore.net.aio import LoopThread
from kvstore.net.http import Page
from kvstore.net.server import Calls, RefusedCall, make_server
from kvstore.node.driver import Driver, NotDurable
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectServicer, add_InspectServicer_to_server
from kvstore.proto.rows import TOPICS, Row, encode_rows
from kvstore.supervisor.sockets import INSPECT_SUFFIX
from kvstore.types import KEY_BYTES, SpaceId

if TYPE_CHECKING:
    from kvstore.peers.member import ClusterMember

THREAD_COUNT: Final = 2
CALL_COUNT_MAX: Final = 8
"""Most calls that are being answered, or wait for a thread."""
IDLE_MS: Final = 10_000
START_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 0.5
REQUEST_BYTES_MAX: Final = 64 << 10
QUERY_TIMEOUT_S: Final = 2.0
_T = TypeVar("_T")


class InspectService(InspectServicer):
    """Answers calls by asking the node's loop; has no state of its own."""

    def __init__(self, driver: Driver, state: Callable[[], Page]) -> None:
        self._driver = driver
        self._state = state

    def Rows(self, request: pb.RowsRequest, context: grpc.ServicerContext) -> pb.RowsReply:
        topic, asked = request.topic, request.filter
        _check_keys(asked.prompt.keys)
        if topic in _OF_CLUSTER:
            member = self._driver.executor.member
            rows = _OF_CLUSTER[topic](member, asked) if member is not None else ()
        elif topic in _OF_ENGINE:
            rows = self._ask(lambda engine: _OF_ENGINE[topic](engine, asked))
        elif topic in TOPICS:  # `Snapshots` has a method for each other one
            rows = self._ask(methodcaller(topic))
        else:
            text = f"no topic is called {topic[:40]!r}: there are {', '.join(TOPICS)}"
            raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, text)
        return pb.RowsReply(rows=encode_rows(rows))

    def State(self, request: pb.StateRequest, context: grpc.ServicerContext) -> pb.StateReply:
        page = self._state()
        if page.status != HTTPStatus.OK:
            raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, page.body.decode().strip())
        return pb.StateReply(state=page.body.decode())

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearReply:
        prefix = request.space.lower()
        space = self._ask(lambda engine: find_space(engine, prefix)) if prefix else None
        with _refusing():
            blocks = self._driver.clear(space=space, tenant=None, timeout_s=QUERY_TIMEOUT_S)
        return pb.ClearReply(blocks=blocks)

    def _ask(self, ask: Callable[[Engine], _T]) -> _T:
        with _refusing():
            return self._driver.query(ask, timeout_s=QUERY_TIMEOUT_S)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except NodeBusy as error:
        raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
    except NotDurable as error:
        raise RefusedCall(grpc.StatusCode.DATA_LOSS, str(error)) from None


def _blocks(engine: Engine, asked: pb.Filter) -> Sequence[Row]:
    space = asked.space.lower()
    if space:
        find_spaces(engine, space)
    # One more tells that there are more.
    limit = min(asked.limit or defaults.BLOCK_ROWS_MAX, defaults.BLOCK_ROWS_MAX + 1)
    return engine.blocks(limit=limit, space=space)


def _requests(engine: Engine, asked: pb.Filter) -> Sequence[Row]:
    limit = min(asked.limit or defaults.REQUEST_ROWS_MAX, defaults.REQUEST_ROWS_MAX)
    return engine.explain.requests(asked.request, limit=limit)


def _prefix(engine: Engine, asked: pb.Filter) -> Sequence[Row]:
    prompt = asked.prompt
    return engine.explain.prefix(prompt.tenant, SpaceId(prompt.space), prompt.keys)


def _memories(member: ClusterMember, asked: pb.Filter) -> Sequence[Row]:
    """Blocks in the engines' own memory: all, or those of a prompt."""
    prompt = asked.prompt
    space = SpaceId(prompt.space) if asked.HasField("prompt") else None
    memory = member.memory
    return memory.reports(tenant=prompt.tenant, space=space, keys=prompt.keys) if memory else []


_OF_ENGINE: Final[dict[str, Callable[[Engine, pb.Filter], Sequence[Row]]]] = {
    "blocks": _blocks,
    "requests": _requests,
    "ranges": lambda engine, asked: engine.explain.request(asked.number)[1],
    "hashings": lambda engine, _: engine.explain.hashings(),
    "prefix": _prefix,
}
_OF_CLUSTER: Final[dict[str, Callable[[ClusterMember, pb.Filter], Sequence[Row]]]] = {
    "members": lambda member, _: member.members(),
    "transfers": lambda member, _: member.transfers(),
    "engines": _memories,
}


def _check_keys(keys: bytes) -> None:
    if len(keys) % KEY_BYTES or len(keys) > defaults.PREFIX_KEYS_MAX * KEY_BYTES:
        text = f"keys are {KEY_BYTES} bytes each, {defaults.PREFIX_KEYS_MAX} at most"
        raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, text)


def find_spaces(engine: Engine, prefix: str) -> list[SpaceId]:
    """Spaces whose hex form begins with `prefix`, at least one. Raises RefusedCall."""
    found = [space for space in engine.space_ids() if space.hex().startswith(prefix)]
    if not found:
        raise RefusedCall(
            grpc.StatusCode.NOT_FOUND,
            f"no space begins with {prefix!r}: see kvstore inspect spaces",
        )
    return found


def find_space(engine: Engine, prefix: str) -> SpaceId:
    """The one space whose hex form begins with `prefix`. Raises RefusedCall."""
    found = find_spaces(engine, prefix)
    if len(found) > 1:
        raise RefusedCall(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{len(found)} spaces begin with {prefix!r}: give more digits",
        )
    return found[0]


class InspectServer:
    """The service on its socket, from construction until `close`."""

    def __init__(
        self, socket: Path, loop: LoopThread, driver: Driver, state: Callable[[], Page]
    ) -> None:
        """Listen beside the attach socket `socket`, whose lock the caller holds. `state`: the page
        /state.json.

        Raises:
            ConfigError: the socket cannot be made.
        """
        self.path = socket.with_name(socket.name + INSPECT_SUFFIX)
        self._pool = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="inspect")
        self._loop = loop
        try:
            service = InspectService(driver, state)
            loop.call(self._listen(service), timeout_s=START_TIMEOUT_S)
        except RuntimeError:
            self._pool.shutdown()
            raise ConfigError(
                f"socket {self.path} cannot be made: choose another --socket"
            ) from None

    async def _listen(self, service: InspectService) -> None:
        # Never undone: gRPC's poller would end with its last server, while the loop still reads it.
        grpc.aio.init_grpc_aio()
        self._server = make_server(
            ("grpc.max_send_message_length", defaults.REPLY_BYTES_MAX),
            ("grpc.max_metadata_size", 8 << 10),
            # Or connections that ask nothing would be all that there may be.
            ("grpc.max_connection_idle_ms", IDLE_MS),
            message_bytes_max=REQUEST_BYTES_MAX,
            calls_max=CALL_COUNT_MAX,
            interceptors=[Calls(self._pool, count_max=CALL_COUNT_MAX)],
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
