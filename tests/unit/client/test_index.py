"""A client of the index, as far as it gets without one: questions that make no sense."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.client import index
from kvstore.client.index import IndexClient, IndexUnavailable, Tokens, reason_of
from kvstore.errors import ConfigError
from kvstore.proto import index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexServicer, add_IndexServicer_to_server

SPACE = bytes(32)


@pytest.fixture
def client() -> Iterator[IndexClient]:
    with IndexClient(["127.0.0.1:1"], insecure=True, timeout_s=30) as made:
        yield made


def test_one_string_is_no_list_of_endpoints() -> None:
    with pytest.raises(ConfigError, match=r"a list, such as \['h:1'\], not one string"):
        IndexClient("h:1", insecure=True)


@pytest.mark.parametrize(
    ("space", "prompt", "kind", "sentence"),
    [
        (SPACE[:-1], b"", ValueError, "a space has 32 bytes"),
        (SPACE, bytes(33), ValueError, "keys are 32 bytes each"),
        (SPACE, Tokens([1, 2], 0, "seed"), ValueError, "a block has 1 token or more"),
        (SPACE.hex(), b"", TypeError, r"a space is 32 bytes, not str: bytes\.fromhex\(\)"),
        (SPACE, SPACE.hex(), TypeError, r"keys as bytes, not str: .*bytes\.fromhex\(\)"),
        (SPACE, [SPACE], TypeError, r"keys as bytes, not list: b''\.join\(\)"),
    ],
)
def test_a_question_that_is_none_is_no_outage(
    client: IndexClient, space: Any, prompt: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        client.match("t", space, prompt)
    with pytest.raises(kind, match=sentence):
        client.watch(prefix=("t", space, prompt))


def test_after_close_it_says_so(client: IndexClient) -> None:
    client.close()
    for ask in (lambda: client.match("t", SPACE, SPACE), client.nodes, client.watch):
        with pytest.raises(ValueError, match="is closed"):
            ask()


class Strict(IndexServicer):
    """Understands nothing."""

    def _refuse(self, request: object, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "name a prompt")

    Match = Nodes = Watch = _refuse


class Scripted(IndexServicer):
    """Tells a watcher these news and is gone."""

    def __init__(self, *replies: pb.WatchReply) -> None:
        self._replies = replies

    def Watch(self, request: object, context: grpc.ServicerContext) -> Iterator[pb.WatchReply]:
        yield from self._replies
        context.abort(grpc.StatusCode.UNAVAILABLE, "it stops")


@contextlib.contextmanager
def served(servicer: IndexServicer) -> Iterator[str]:
    """Its address."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        add_IndexServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def test_a_replica_that_refuses_a_question_did_answer() -> None:
    with (
        served(Strict()) as address,
        IndexClient([address], insecure=True, timeout_s=30) as client,
    ):
        for ask in (client.nodes, lambda: next(client.watch())):
            with pytest.raises(ValueError, match=r"^name a prompt$"):
                ask()


def relay_once(listener: socket.socket, address: str, delay_s: float) -> None:
    """Carry one connection; the server's first word comes late, as from a busy machine."""
    host, port = address.split(":")
    client, _ = listener.accept()
    with client, socket.create_connection((host, int(port))) as server:
        ends = {server: client, client: server}
        is_late = False
        while True:
            for end in select.select(list(ends), [], [])[0]:
                if end is server and not is_late:
                    threading.Event().wait(delay_s)
                    is_late = True
                data = end.recv(1 << 16)
                if not data:
                    return
                ends[end].sendall(data)


def test_a_replica_whose_handshake_is_slow_is_there() -> None:
    with (
        served(Busy(0)) as address,
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        name = "{}:{}".format(*listener.getsockname())
        relayed = pool.submit(relay_once, listener, address, 5 * index.RECONNECT_MIN_MS / 1000)
        with IndexClient([name], insecure=True, timeout_s=30) as client:
            assert [each.node for each in client.nodes().nodes] == ["n1"]
        relayed.result(timeout=30)


class Busy(IndexServicer):
    """Refuses so many questions, then answers."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.asked = refusals, 0

    def Nodes(self, request: object, context: grpc.ServicerContext) -> pb.NodesReply:
        self.asked += 1
        if self.asked <= self.refusals:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "64 calls are open here already")
        return pb.NodesReply(nodes=[pb.Node(node="n1")])


def test_a_replica_that_refuses_is_asked_again_after_all_others() -> None:
    one, two = Busy(3), Busy(2)
    with (
        served(one) as first,
        served(two) as second,
        IndexClient([first, second], insecure=True, timeout_s=60) as client,
    ):
        assert [each.node for each in client.nodes().nodes] == ["n1"]
        assert (one.asked, two.asked) == (3, 3)
        client.nodes()
        assert (one.asked, two.asked) == (3, 4), "the one that answered is asked first"


def test_a_replica_that_refuses_is_asked_again_though_the_last_one_is_not_there() -> None:
    busy = Busy(2)
    with (
        served(busy) as address,
        IndexClient([address, "127.0.0.1:1"], insecure=True, timeout_s=60) as client,
    ):
        assert [each.node for each in client.nodes().nodes] == ["n1"]
    assert busy.asked == 3


def test_a_replica_that_always_refuses_is_asked_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock(threading.Event):
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            self.now_s += timeout
            return False

    busy, clock = Busy(1 << 30), Clock()
    monkeypatch.setattr(index, "time", clock)
    monkeypatch.setattr(index, "PAUSE_MAX_S", 20.0)
    with (
        served(busy) as address,
        IndexClient([address], insecure=True, timeout_s=60) as client,
    ):
        client._closed = clock
        with pytest.raises(IndexUnavailable, match="64 calls are open here already"):
            client.nodes()
    assert busy.asked == 13, "after 10 ms, 20 ms, … 20 s, and not at the end of the minute"
    assert 40 < clock.now_s < 60


def test_a_watcher_is_told_who_went_while_it_went_from_one_replica_to_another() -> None:
    def reply(*names: str, gone: Sequence[str] = ()) -> pb.WatchReply:
        return pb.WatchReply(nodes=[pb.Node(node=name) for name in names], gone=gone)

    one = Scripted(reply("a", "b"), reply("c"), reply(gone=["b"]))
    two = Scripted(reply("d"), reply("e"))
    with (
        served(one) as first,
        served(two) as second,
        IndexClient([first, second], insecure=True, timeout_s=30) as client,
    ):
        news = list(itertools.islice(client.watch(), 6))
    assert [([node.node for node in each.nodes], each.gone) for each in news] == [
        (["a", "b"], []),
        (["c"], []),
        ([], ["b"]),
        (["d"], ["a", "c"]),
        (["e"], []),
        (["a", "b"], ["d", "e"]),
    ]


# ── clauses about calls that failed ──────────────────────────────────────────────────────────────


def error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("failed", "clause"),
    [
        (TimeoutError(), "no answer in time"),
        (error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), "it is an older one"),
        (
            error(
                grpc.StatusCode.UNAVAILABLE,
                "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
            ),
            "nothing listens there (connection refused)",
        ),
        (error(grpc.StatusCode.RESOURCE_EXHAUSTED, "32 calls are open"), "32 calls are open"),
        (grpc.RpcError("the call was given up"), "the call was given up"),
    ],
)
def test_an_error_of_a_call(failed: Exception, clause: str) -> None:
    assert reason_of(failed, unimplemented="it is an older one") == clause


def test_a_call_that_a_server_lacks_has_the_words_of_grpc_by_itself() -> None:
    failed = error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert reason_of(failed) == "Method not found!"
