"""Ranks that hold the same shard: one writes, all read, all belong to the session (ADR 2)."""

from __future__ import annotations

import pytest

from kvstore.engine.events import Exited
from kvstore.types import ConnectionId
from kvstore.wire.messages import Quiesce, Quiet, Seal, SessionClosed, SessionOpen
from tests.unit.engine.harness import (
    LATENT,
    Node,
    arrays,
    attached,
    checksum,
    keys,
    pairs,
)


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
