"""One door into dram: whoever brings a block, all who wait for it have it."""

from __future__ import annotations

from kvstore.engine.events import FileRead
from kvstore.wire.messages import LeaseMore
from tests.unit.engine.disk import DiskNode, known
from tests.unit.engine.harness import Peer, pairs
from tests.unit.engine.test_fetches import attached, more


def test_a_seal_wakes_who_waits_for_another_node() -> None:
    """Another engine computed it sooner than it comes from far."""
    node, peer = attached(slots=64)
    other = Peer(node, "f")
    peer.lease(1, 1, 2, 3)
    node.locate(("far", 3))
    other.seal(2, 3)
    assert not node.count(peer.scheduler, LeaseMore), "the first one is on its way"
    other.seal(1)
    assert (len(pairs(more(node, peer))), more(node, peer).promoting) == (3, 0)
    node.arrive()
    assert node.count(peer.scheduler, LeaseMore) == 1
    assert node.engine.counters.fetched_blocks == 3, "for nobody: their slots are free"


def test_blocks_that_do_not_come_are_counted() -> None:
    node, peer = attached()
    peer.lease(1, 1, 2, 3)
    node.locate(("far", 3))
    node.arrive([True, False, False])
    counters = node.engine.counters
    assert (counters.fetched_blocks, counters.fetch_blocks_lost) == (1, 2)


def test_a_seal_wakes_who_waits_for_the_disk() -> None:
    node = DiskNode()
    peer, other = Peer(node), Peer(node, "f")
    node.step(known(1, 2))
    peer.lease(1, 1, 2)
    assert len(node.reads) == 1
    other.seal(1, 2)
    told = node.last(peer.scheduler, LeaseMore)
    assert (len(pairs(told)), told.promoting, told.from_file) == (2, 0, 0)
    (read,) = node.reads
    node.step(FileRead(read.job, b"\1\1"))
    assert node.count(peer.scheduler, LeaseMore) == 1
    assert len(node.engine._files.reading_words()) == 0, "its slots are free"
