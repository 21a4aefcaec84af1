"""A client of the index, as far as it gets without one: questions that make no sense."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.client.index import IndexClient, Tokens
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
        with pytest.raises(ValueError, match="is closed: make another one"):
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
