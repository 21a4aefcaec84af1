"""gRPC servers of all components: who connects or calls and says nothing gives way, and there are
never too many of them.

Does not cover: calls over a socket (`tests/unit/node/test_inspect.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.config.cluster import IndexConfig
from kvstore.config.values import HostPort
from kvstore.errors import ConfigError
from kvstore.indexer.replica import Replica
from kvstore.net import server
from kvstore.net.aio import LoopThread
from kvstore.net.server import Calls, HealthyServer, make_server
from tests.kit.coroutines import on_loop

WAIT_S = 60


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("callers")
    yield loop
    loop.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def is_hung_up_on(silent: socket.socket) -> bool:
    """Within WAIT_S."""
    try:
        while silent.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.fixture
def replicas(loop: LoopThread) -> Iterator[Callable[[], Replica]]:
    """What starts one."""
    at = HostPort("127.0.0.1", 0)
    config = IndexConfig(listen=at, entries=100_000, plain=True, tls=None)
    with ExitStack() as stack:

        def start() -> Replica:
            replica = Replica(config, loop)
            stack.callback(replica.close)
            return replica

        yield start


def test_who_says_nothing_is_hung_up_on(
    replicas: Callable[[], Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_MS", 100)
    with connect(replicas().port) as silent:
        assert is_hung_up_on(silent)


def test_one_more_than_may_be_connected_is_hung_up_on_and_the_others_are_not(
    replicas: Callable[[], Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_MS", 1000 * WAIT_S)
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    replica = replicas()
    with connect(replica.port) as first, connect(replica.port) as second:
        with connect(replica.port) as third:
            assert is_hung_up_on(third)
        for silent in (first, second):
            silent.setblocking(False)
            # A server's first words of HTTP/2 at most, and no end.
            with contextlib.suppress(BlockingIOError):
                assert silent.recv(4096)


@pytest.mark.parametrize(
    ("descriptors", "count"), [(1024, 256), (3, 1), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_most_descriptors_are_left_to_the_node(
    descriptors: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    assert server.connections_max(server.CONNECTIONS_MAX) == count


# ── calls of one message each ────────────────────────────────────────────────────────────────────


READ_TIMEOUT_S = 0.01


class Call:
    """A call; its message comes when `message` is set."""

    def __init__(self) -> None:
        self.message = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        return await self.message

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise ConnectionAbortedError(text)


def test_a_silent_call_whose_time_is_over_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_MAX", 1)
    monkeypatch.setattr(server, "READ_TIMEOUT_S", READ_TIMEOUT_S)

    async def answered(pool: ThreadPoolExecutor) -> object:
        loop, calls = asyncio.get_running_loop(), Calls(pool, count_max=1)

        async def own(_details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, _: request)

        handler = await calls.intercept_service(own, SimpleNamespace(method="/any"))
        silent = asyncio.create_task(handler.stream_unary(None, Call()))
        await asyncio.sleep(0)
        threading.Event().wait(2 * READ_TIMEOUT_S)
        # The next turn of the loop ends the silent call's time, and only the one after that wakes
        # it; the new call is before it then.
        new, begun = Call(), loop.create_future()
        new.message.set_result("a question")
        loop.call_soon(lambda: begun.set_result(loop.create_task(handler.stream_unary(None, new))))
        found = await (await begun)
        with pytest.raises(ConnectionAbortedError, match="no message came in time"):
            await silent
        return found

    with ThreadPoolExecutor(1) as pool:
        assert asyncio.run(answered(pool)) == "a question"


# ── a port for one alone, and an end that is said first ──────────────────────────────────────────


HEALTH = health_pb2.HealthCheckResponse


def healthy() -> HealthyServer:
    return HealthyServer(make_server(message_bytes_max=1024, calls_max=8), "its name")


@on_loop
async def test_a_port_belongs_to_one_server() -> None:
    first = await healthy().begun("--a-listen", ("127.0.0.1", 0), None)
    with pytest.raises(ConfigError, match="--b-listen"):
        await healthy().begun("--b-listen", ("127.0.0.1", first.port), None)
    await first.close()


@on_loop
async def test_a_server_that_ends_says_so_first() -> None:
    its = await healthy().begun("--a-listen", ("127.0.0.1", 0), None, is_ready=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{its.port}") as channel:
        request = health_pb2.HealthCheckRequest(service="its name")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watch.read()).status == HEALTH.SERVING
        closing = asyncio.create_task(its.close())
        assert (await watch.read()).status == HEALTH.NOT_SERVING
        watch.cancel()
        await closing
