"""Ranks that hold the same shard: one writes, all read, all belong to the session (ADR 2)."""

from __future__ import annotations

import itertools

import pytest

from kvstore.engine.events import Exited
from kvstore.types import ConnectionId
from kvstore.wire.messages import Quiesce, Quiet, Seal, SessionClosed, SessionOpen
from tests.unit.engine.harness import (
    LATENT,
    REPLICAS,
    Hellos,
    Node,
    arrays,
    attached,
    checksum,
    keys,
    pairs,
)


def told(node: Node, connection: int) -> tuple[int, bool]:
    """ShardColumn, and whether it writes."""
    (column,) = node.last(connection, Quiesce).columns
    return column.number, column.writes


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::3])
def test_columns_do_not_depend_on_the_order_of_attaching(order: tuple[int, ...]) -> None:
    node, shape = Node(), Hellos(shards=REPLICAS)
    scheduler = node.connect(shape.scheduler_hello())
    ranks = {rank: node.connect(shape.rank_hello(rank)) for rank in order}
    assert [told(node, ranks[rank]) for rank in range(4)] == [
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    ]
    for rank in reversed(order):
        assert node.count(scheduler, SessionOpen) == 0
        node.hear(ranks[rank], Quiet(node.last(ranks[rank], Quiesce).session))
    assert node.last(scheduler, SessionOpen).shard_counts == (2,)


def test_a_replica_that_seals_is_hung_up_and_changes_nothing() -> None:
    node, peer = attached(Node(), shards=LATENT)
    place = peer.unused()[0]
    slots, generations = arrays([place])
    node.hear(peer.ranks[1], Seal(peer.session, keys(1), slots, generations, checksum(1)))
    assert "does not write" in node.hangups[peer.ranks[1]]
    assert node.blocks() == {}
    assert node.count(peer.scheduler, SessionClosed) == 1
    assert node.quarantined() == 0, "it was served nothing"


@pytest.mark.parametrize("exited", [False, True])
def test_a_replica_that_leaves_ends_the_session_but_not_the_writers_slots(exited: bool) -> None:
    node, peer = attached(Node(), shards=LATENT)
    granted = node.granted()
    assert granted > 0
    peer.lease(1)
    if exited:
        node.step(Exited(ConnectionId(peer.ranks[1])))
    else:
        node.end(peer.ranks[1])
    assert node.count(peer.scheduler, SessionClosed) == 1
    assert (node.granted(), node.quarantined()) == (granted, 0), "the writer may be copying"
    peer.ranks[1] = node.connect(peer.rank_hello(1, process="another"))
    node.hear(peer.ranks[1], Quiet(node.last(peer.ranks[1], Quiesce).session))
    assert node.count(peer.scheduler, SessionOpen) == 1, "the writer is not quiet yet"
    peer.be_quiet()
    assert node.count(peer.scheduler, SessionOpen) == 2
    peer.store(5)
    assert len(pairs(peer.lease(2, 5))) == 1
