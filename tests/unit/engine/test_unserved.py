"""An engine that gets nothing from the node is listed, with the reason, until it gets something."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.engine.sessions.owners import (
    FORMS_NS_MAX,
    REFUSED_COUNT_MAX,
    REFUSED_NS_MAX,
    UnservedReport,
)
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.messages import Refused, SessionClosed, Unserved
from tests.unit.engine.harness import HALVES, Hellos, Node, Peer, attached

LONG_MS = FORMS_NS_MAX // NS_PER_MS + 1
CUDA = "the KV cache is on cuda"


@pytest.fixture
def node() -> Node:
    return Node(slots=32)


def reasons(node: Node) -> list[str]:
    return [row.reason for row in node.engine.unserved()]


def test_an_engine_says_itself_why(node: Node) -> None:
    peer = Hellos("a")
    scheduler = node.connect(peer.scheduler_hello())
    node.hear(scheduler, Unserved(CUDA))
    assert node.engine.unserved() == [UnservedReport("a (a)", "t", CUDA)]
    node.end(scheduler)
    assert node.engine.unserved() == [], "it is gone"


def test_what_a_scheduler_said_is_known_while_its_ranks_are_there(node: Node) -> None:
    """It went on without its connector; what it says next, it says after another hello."""
    peer = Peer(node, "a")
    node.hear(peer.scheduler, Unserved("an error"))
    assert reasons(node) == [], "it is served until it ends"
    node.end(peer.scheduler)
    assert reasons(node) == ["an error"]
    peer.scheduler = node.connect(peer.scheduler_hello())
    peer.be_quiet()
    assert reasons(node) == []


def test_ranks_that_do_not_come_are_missed(node: Node) -> None:
    peer = Hellos("a", shards=HALVES)
    rank = node.connect(peer.rank_hello(0))
    node.tick(LONG_MS)
    assert reasons(node) == [], "it starts"
    node.connect(peer.scheduler_hello())
    node.tick(LONG_MS - 2)
    assert reasons(node) == []
    node.tick(2)
    assert reasons(node) == ["1 of its 2 ranks are attached"]
    node.connect(peer.rank_hello(1))
    assert reasons(node) == ["its ranks do not answer: one of them may be stopped"]
    node.end(rank)
    assert reasons(node) == ["1 of its 2 ranks are attached"]


def test_one_that_was_refused_is_listed_no_more_once_it_is_served(node: Node) -> None:
    first = Peer(node, "a")
    node.connect(msgspec.structs.replace(first.scheduler_hello(), process="another"))
    assert len(reasons(node)) == 1
    node.end(first.scheduler, *first.ranks)
    Peer(node, "a")
    assert reasons(node) == []


def test_a_session_that_was_lost_is_given_time(node: Node) -> None:
    peer = Peer(node, "a")
    node.tick(LONG_MS)
    node.end(peer.ranks[0])
    assert reasons(node) == []
    node.tick(LONG_MS)
    assert reasons(node) == ["0 of its 1 ranks are attached"]


def refuse(node: Node, name: str) -> None:
    hello = Hellos(name).scheduler_hello()
    node.connect(msgspec.structs.replace(hello, protocol=99))


def test_refused_engines_are_listed_while_they_ask(node: Node) -> None:
    refuse(node, "a")
    ((row),) = node.engine.unserved()
    assert row.engine == "a"
    assert row.reason.startswith("refused: this node speaks attach protocol")
    node.tick(REFUSED_NS_MAX // NS_PER_MS)
    refuse(node, "a")
    node.tick(10 * NS_PER_S // NS_PER_MS)
    assert len(reasons(node)) == 1
    node.tick(REFUSED_NS_MAX // NS_PER_MS)
    assert reasons(node) == []


def test_no_more_refusals_are_remembered_than_a_page_needs(node: Node) -> None:
    for number in range(REFUSED_COUNT_MAX + 5):
        refuse(node, str(number))
    rows = node.engine.unserved()
    assert len(rows) == REFUSED_COUNT_MAX
    assert rows[-1].engine == str(REFUSED_COUNT_MAX + 4)


def test_ranks_that_cannot_be_joined_are_a_refusal(node: Node) -> None:
    peer = Hellos("a", shards=(HALVES[0],))
    node.connect(peer.scheduler_hello())
    node.connect(peer.rank_hello(0))
    assert reasons(node) == ["refused: its ranks do not cover all layers and heads exactly once"]


def test_a_full_node_is_said_until_there_is_room() -> None:
    node = Node(slots=32, connection_count_max=2)
    first = Peer(node, "a")
    node.connect(Hellos("b").scheduler_hello())
    assert reasons(node) == ["refused: 2 connections are attached already"]
    node.end(first.scheduler, *first.ranks)
    assert reasons(node) == []


@pytest.mark.parametrize("role", ["scheduler", "rank"])
def test_a_second_claim_to_a_place_is_refused_until_the_first_has_left(role: str) -> None:
    """Two connectors of one engine would drop each other for ever; a restart gets its place."""
    node, peer = attached(Node())
    first = peer.scheduler if role == "scheduler" else peer.ranks[0]
    hello = peer.scheduler_hello() if role == "scheduler" else peer.rank_hello(0)
    claim = msgspec.structs.replace(hello, process="another")
    for _ in range(3):
        connection = node.connect(claim)
        assert connection in node.hangups
        refused = node.last(connection, Refused)
        assert not refused.permanent
        assert refused.reason.startswith(
            f"another process or connector is attached as this engine's {role}: "
        )
        assert '"connectors" of --kv-transfer-config' in refused.reason
    assert first not in node.hangups
    assert node.count(peer.scheduler, SessionClosed) == 0
    assert [row.reason for row in node.engine.unserved()] == [f"refused: {refused.reason}"]
    restarted = node.connect(msgspec.structs.replace(claim, nonce="next"))
    assert restarted in node.admitted, "its first socket may still be closing"
    node.end(first)
    assert node.connect(claim) in node.admitted
