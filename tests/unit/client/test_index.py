"""A client of the index, as far as it gets without one: questions that make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.client.index import IndexClient, Tokens
from kvstore.errors import ConfigError
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


def test_a_replica_that_refuses_a_question_did_answer() -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        add_IndexServicer_to_server(Strict(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with IndexClient([f"127.0.0.1:{port}"], insecure=True, timeout_s=30) as client:
                for ask in (client.nodes, lambda: next(client.watch())):
                    with pytest.raises(ValueError, match=r"^name a prompt$"):
                        ask()
        finally:
            server.stop(None).wait()
