"""Who connects and says nothing is hung up on, and there are never too many of them."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore.config.cluster import IndexConfig
from kvstore.config.values import HostPort
from kvstore.indexer.replica import Replica
from kvstore.net import server
from kvstore.net.aio import LoopThread

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
