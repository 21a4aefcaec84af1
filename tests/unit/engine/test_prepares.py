"""Blocks that a router wants in dram before an engine asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.engine.events import BlocksPrepared, Clear, PrepareBlocks
from kvstore.engine.moves.fetches import AHEAD_LOCATES_MAX
from kvstore.engine.sessions.lookups import AHEAD_NS, AHEAD_SHARE
from kvstore.engine.state import Off
from kvstore.types import Shard
from kvstore.units import NS_PER_MS
from kvstore.wire.peers import PrepareReply, PrepareRequest
from tests.unit.engine.disk import SPACE, known
from tests.unit.engine.harness import HALVES, WHOLE, Peer, attached, keys, short
from tests.unit.engine.peers import PeerNode

SLOTS = 32
ROOM = SLOTS // AHEAD_SHARE


class AheadNode(PeerNode):
    """A node that routers reach."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"slots": SLOTS, **config})

    def prepare(self, *numbers: int, engine: str = "", tenant: str = "t") -> PrepareReply:
        commands = self.step(
            PrepareBlocks(7, PrepareRequest(tenant, SPACE, engine, keys(*numbers)))
        )
        (said,) = [each for each in commands if isinstance(each, BlocksPrepared)]
        assert said.ask == 7
        return said.its


def counts(said: PrepareReply) -> tuple[int, int, int, str]:
    return said.dram, said.reading, said.sought, said.refused


def test_blocks_on_disk_are_in_dram_before_an_engine_asks() -> None:
    node, peer = attached(AheadNode())
    node.step(known(1, 2, 3))
    assert counts(node.prepare(1, 2, 3)) == (0, 3, 0, "")
    node.read_all()
    reply = peer.lease(1, 1, 2, 3)
    assert (len(reply.slots) // 4, reply.promoting) == (3, 0)
    assert counts(node.prepare(1, 2, 3)) == (3, 0, 0, "")


def test_what_another_node_holds_is_sought_and_an_engine_waits_for_the_same_fetch() -> None:
    node, peer = attached(AheadNode())
    node.step(known(1))
    assert counts(node.prepare(1, 2, 3)) == (0, 1, 2, "")
    assert node.locates[0].keys == keys(2, 3)
    node.locate(("far", 2))
    assert [scope.shard for scope in node.fetches[0].targets] == [WHOLE]
    node.read_all()
    assert peer.lease(1, 1, 2, 3).promoting == 2
    assert len(node.fetches) == 1
    node.arrive()
    assert len(peer.lease(2, 1, 2, 3).slots) // 4 == 3


def test_nothing_is_pinned_and_what_was_touched_leaves_last() -> None:
    node, peer = attached(AheadNode(slots=8, credit_blocks_max=1))
    peer.store(1)
    peer.store(2)
    node.write_nothing()
    assert counts(node.prepare(1)) == (1, 0, 0, "")
    for number in range(100, 120):
        peer.store(number)
        node.write_nothing()
        if len(here := {short(1), short(2)} & node.blocks().keys()) < 2:
            break
    assert here == {short(1)}
    node.step(Clear(None, None))
    assert node.prepare(1).dram == 0


def test_without_an_engine_of_the_space_nothing_is_brought() -> None:
    node = AheadNode()
    node.step(known(1))
    assert counts(node.prepare(1))[:3] == (0, 0, 0)
    Peer(node)
    assert "no engine" in node.prepare(1, tenant="u").refused
    assert node.prepare(1, 1).refused == "a key is named twice"
    node.state.off["t", SPACE] = Off(None)
    assert "switched off" in node.prepare(1).refused
    assert not node.reads


def test_a_flood_brings_its_share_of_the_arena_and_no_more_until_time_has_passed() -> None:
    node = AheadNode()
    Peer(node)
    node.step(known(*range(100)))
    first = node.prepare(*range(100)).reading
    assert 0 < first <= SLOTS // 8, "half of what may be in motion"
    brought = first
    for _ in range(20):
        node.read_all()
        brought += node.prepare(*range(brought, 100)).reading
    assert brought == ROOM
    node.tick(AHEAD_NS / NS_PER_MS / 4)
    node.read_all()
    assert 0 < node.prepare(*range(brought, 100)).reading <= ROOM // 4


def test_a_question_of_a_router_takes_no_part_of_an_engines_share() -> None:
    node, peer = attached(AheadNode(slots=128))
    node.prepare(*range(500, 540))
    assert node.engine._fetches._coming_of == {"(a router)": 40}
    assert peer.lease(1, 1).promoting == 1


def test_many_questions_of_a_router_leave_the_places_of_engines_free() -> None:
    node, peer = attached(AheadNode())
    for number in range(AHEAD_LOCATES_MAX + 1):
        node.prepare(1000 - number)
        node.tick(AHEAD_NS / NS_PER_MS / ROOM)
    assert len(node.locates) == AHEAD_LOCATES_MAX
    assert peer.lease(1, 1).promoting == 1


@pytest.mark.parametrize(("engine", "shards"), [("two", HALVES), ("gone", (WHOLE,))])
def test_blocks_come_in_the_shards_of_the_engine_that_is_named(
    engine: str, shards: tuple[Shard, ...]
) -> None:
    node = AheadNode()
    Peer(node, "one")
    Peer(node, "two", shards=HALVES)
    assert node.prepare(1, engine=engine).sought == 1
    node.locate(("far", 1))
    assert tuple(scope.shard for scope in node.fetches[0].targets) == shards
