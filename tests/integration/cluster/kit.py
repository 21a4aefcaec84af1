"""Nodes, indexes and clients of one lab, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc

from kvstore.client.index import IndexClient
from kvstore.client.tls import TlsFiles
from kvstore.index.feed import Trust
from kvstore.index.index import Match, Member
from kvstore.testing.process import Lab, NodeProcess
from kvstore.testing.raw_engine import make_space
from kvstore.types import SpaceId
from kvstore.wire.feed import FEEDS, OfStream, encode
from kvstore.wire.space import fingerprint
from tests.integration.node.conftest import eventually
from tests.kit.processes import IndexProcess

TENANT = "default"
SPACE: SpaceId = fingerprint(make_space(), weights_epoch="")
ASK_S = 5.0
"""For one answer of a busy machine."""
CONVERGES_S = 120.0


class Site:
    """A directory with a CA; what is started here is told apart by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lab = Lab(directory / "pki")

    def index(self, name: str = "i1", *flags: str, listen: str = "127.0.0.1:0") -> IndexProcess:
        tls = self.lab.flags("index", name)
        return IndexProcess.start(self.directory, (*tls, *flags), listen=listen, name=name)

    def node(
        self, name: str, *flags: str, with_index: bool = False, dram: str = "8MiB"
    ) -> NodeProcess:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        tls = self.lab.flags("node", name, with_index=with_index)
        return NodeProcess.start(directory, dram=dram, flags=(*tls, *flags))

    def client(self, *endpoints: str) -> IndexClient:
        return IndexClient(endpoints, tls=self.files, timeout_s=ASK_S)

    @property
    def files(self) -> TlsFiles:
        return self.lab.files("client", "router")


def feed(
    channel: grpc.Channel, words: Iterable[OfStream | bytes], *, timeout_s: float
) -> Iterator[bytes]:
    """A feed of these words; what is bytes already goes as it is."""

    def form(word: OfStream | bytes) -> bytes:
        return word if isinstance(word, bytes) else encode(word)

    call: Iterator[bytes] = channel.stream_stream(f"/{FEEDS}/Feed", form, bytes)(
        iter(words), timeout=timeout_s
    )
    return call


def member(client: IndexClient, node: str) -> Member | None:
    """What a replica says of a node."""
    return next((each for each in client.nodes().nodes if each.node == node), None)


def trust(client: IndexClient, node: str) -> Trust | None:
    """None: in no answer, or not known."""
    found = member(client, node)
    return found.trust if found is not None else None


def matches(client: IndexClient, keys: list[bytes]) -> dict[str, Match]:
    """Who holds the first of these keys, by node."""
    answer = client.match(TENANT, SPACE, b"".join(keys))
    return {match.holder.node: match for match in answer.matches}


def becomes(client: IndexClient, keys: list[bytes], expected: dict[str, int]) -> bool:
    """Whether these nodes come to hold so many leading blocks in dram, and believed, no others."""

    def asks() -> bool:
        found = matches(client, keys)
        return {
            node: match.dram_blocks for node, match in found.items() if match.trust is Trust.EXACT
        } == expected and len(found) == len(expected)

    return eventually(asks, timeout_s=CONVERGES_S)
