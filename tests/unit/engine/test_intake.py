"""One door into dram: the same holds for blocks from disk, from another node, and for pushed ones;
whoever brings a block, all who wait for it have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.engine.events import Clear
from kvstore.engine.state import Off
from kvstore.wire.messages import LeaseMore
from tests.unit.engine.disk import SPACE, DiskNode, known
from tests.unit.engine.harness import Node, Peer, attached, pairs, short
from tests.unit.engine.peers import PeerNode
from tests.unit.engine.pushing import PushPair


class Way:
    """Block 1 is on its way, and an engine's lease 1 waits for it."""

    def __init__(self, node: Node, peer: Peer, end: Callable[[bool], object]) -> None:
        self.node, self.peer, self.end = node, peer, end

    @property
    def told(self) -> LeaseMore:
        """What the lease got last."""
        return self.peer.more

    @property
    def is_in_dram(self) -> bool:
        return "dram" in self.node.blocks().get(short(1), "")

    def check_slots(self) -> None:
        """No slot is held but for engines."""
        assert self.node.granted() == sum(
            len(self.node.state.slots.of_writer(connection))
            for connection in self.node.state.connections
        )


def from_disk() -> Way:
    node = DiskNode()
    peer = Peer(node)
    node.step(known(1))
    peer.lease(1, 1)
    (read,) = node.reads
    return Way(node, peer, lambda good: node.answer(read, [good]))


def fetched() -> Way:
    node, peer = attached(PeerNode())
    peer.lease(1, 1)
    node.locate(("far", 1))
    return Way(node, peer, lambda good: node.arrive([good]))


def pushed() -> Way:
    pair = PushPair()
    pair.open()
    pair.store(1)
    pair.expect(1)
    pair.decode.lease(1, 1)
    pair.pump_until_it_lands()

    def end(good: bool) -> None:
        pair.land(good)
        pair.pump()
        pair.at_rest()

    return Way(pair.d, pair.decode, end)


@pytest.fixture(params=[from_disk, fetched, pushed], ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Way:
    made: Way = request.param()
    return made


def test_it_wakes_the_lease_that_waits(way: Way) -> None:
    way.end(True)
    assert (len(pairs(way.told)), way.told.promoting) == (1, 0)
    assert way.is_in_dram


def test_what_does_not_come_leaves_nothing(way: Way) -> None:
    way.end(False)
    assert (way.told.slots, way.told.promoting) == (b"", 0)
    assert not way.is_in_dram
    way.check_slots()


@pytest.mark.parametrize("tenant", [None, "t"])
def test_what_is_cleared_on_its_way_does_not_come_back(way: Way, tenant: str | None) -> None:
    way.node.step(Clear(None, tenant))
    way.end(True)
    assert (way.told.slots, way.told.promoting) == (b"", 0)
    assert way.node.blocks() == {}
    way.check_slots()


def test_another_tenants_clear_is_not_ours(way: Way) -> None:
    way.node.step(Clear(None, "u"))
    way.end(True)
    assert way.is_in_dram


def test_what_is_switched_off_on_its_way_is_not_kept(way: Way) -> None:
    way.node.state.off["t", SPACE] = Off(None)
    way.end(True)
    assert not way.is_in_dram
    way.check_slots()


def test_it_comes_after_its_engine_has_gone(way: Way) -> None:
    way.node.end(way.peer.scheduler, *way.peer.ranks)
    way.end(True)
    assert way.is_in_dram
    assert len(pairs(Peer(way.node, "g").lease(1, 1))) == 1


def test_a_seal_wakes_who_waits_and_what_comes_later_is_for_nobody(way: Way) -> None:
    """Another engine computed it sooner than it comes."""
    sealed = Peer(way.node, "f").seal(1)
    assert (pairs(way.told), way.told.promoting) == (sealed, 0)
    way.end(True)
    assert way.node.count(way.peer.scheduler, LeaseMore) == 1
    assert way.node.engine.tiers()[0].slots_sealed == 1
    way.check_slots()
