"""The file tier's word: FileKnown, FileGone, and the scopes they make."""

from __future__ import annotations

import pytest

from kvstore.engine.events import Clear, Cleared
from kvstore.engine.memory import residency
from kvstore.engine.memory.table import BlockTable
from kvstore.engine.why.reasons import Reason
from kvstore.types import Shard, SpaceId
from tests.unit.engine.disk import SPACE, gone, known
from tests.unit.engine.harness import (
    Node,
    Peer,
    attached,
    keys,
    pairs,
    short,
)


def test_known_blocks_come_and_go() -> None:
    node = Node()
    node.step(known(1, 2, 3))
    assert node.blocks() == dict.fromkeys(map(short, (1, 2, 3)), "file")
    assert node.engine.tiers()[1].blocks == 3
    node.step(gone(2, 4))
    assert node.blocks() == dict.fromkeys(map(short, (1, 3)), "file")
    node.step(gone(1, 1, 3))
    assert node.blocks() == {}


def test_a_block_in_both_tiers_lives_until_both_let_go() -> None:
    node, peer = attached(Node())
    places = peer.seal(1, 2)
    node.step(known(1, 2))
    assert set(node.blocks().values()) == {"dram+file"}
    node.step(gone(1))
    assert node.blocks() == {short(1): "dram", short(2): "dram+file"}
    assert pairs(peer.lease(1, 1, 2)) == places
    peer.distrust(*places)
    assert node.blocks() == {short(2): "file"}


def test_a_key_twice_in_one_event_is_one_block() -> None:
    node = Node()
    node.step(known(1, 2, 1))
    assert node.engine.nodes()[0].blocks == 2
    node.step(known(1, at=50))
    assert node.engine.nodes()[0].blocks == 2


def test_scopes_are_apart() -> None:
    node = Node()
    node.step(known(1), known(1, tenant="u"), known(1, space=SpaceId(b"s" * 32)))
    assert node.engine.nodes()[0].blocks == 3
    node.step(gone(1, tenant="u"), gone(1, shard=Shard(0, 1, 0, 1)))
    assert sorted(s.tenant for s in node.engine.spaces()) == ["t", "t"]


def test_more_than_the_table_holds_is_left_out() -> None:
    node = Node(slots=8, block_count_max=12)
    node.step(known(*range(10)))
    assert len(node.blocks()) == 4
    assert (node.engine.files.left_out_count, node.engine.counters.file_blocks_crowded) == (6, 6)
    node.step(known(*range(10), at=100))
    assert len(node.blocks()) == 4
    assert node.engine.files.left_out_count == 12
    assert node.step(Clear(None, "t"))[-1] == Cleared(4)


def test_blocks_on_disk_that_give_their_row_to_dram_are_counted() -> None:
    node, peer = attached(Node(slots=8, block_count_max=12))
    for number in range(20):
        peer.seal(number)
        node.step(known(number, at=number + 1))
    told = node.engine.explain.prefix("t", SPACE, keys(*range(20)))
    assert Reason.CROWDED_OUT in [row.reason for row in told]
    counts = node.engine.counters.file_blocks_crowded, len(node.blocks())
    assert counts[0] > 0
    assert sum(counts) == 20, "what is not there was counted, once"
    assert node.engine.files.left_out_count == 0


def test_unused_scopes_are_forgotten_but_never_a_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "SCOPE_COUNT_MAX", 8)
    node = Node()
    idle = Peer(node)
    for i in range(20):
        space = SpaceId(bytes([i]) * 32)
        node.step(known(i, space=space))
        if i != 3:
            node.step(Clear(space, None))
    assert len(node.state.residency.scopes()) <= 8
    idle.seal(1)
    assert node.blocks() == {short(3): "file", short(1): "dram"}
    assert node.step(Clear(SPACE, "t"))[-1] == Cleared(1)


def test_many_scopes_in_use_are_not_looked_through_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look for unused ones sees every row of the table."""
    passes = 0
    used_scopes = vars(BlockTable)["used_scopes"]

    def counting(table: BlockTable) -> object:
        nonlocal passes
        passes += 1
        return used_scopes.fget(table)

    monkeypatch.setattr(BlockTable, "used_scopes", property(counting))
    engine = Node(block_count_max=8_000).engine
    passes = 0

    def many(begin: int, end: int) -> None:
        for i in range(begin, end):
            engine.step([known(i, space=SpaceId(i.to_bytes(32, "little")))], i + 10**9)

    many(0, 5_000)
    assert passes == 1, "at 4,096"
    many(5_000, 6_000)
    assert passes == 2, "at 5,120"
    engine.step([Clear(None, None)], 2 * 10**9)
    passes = 0
    many(6_000, 6_500)
    assert passes == 1, "at 6,400"
    assert len(engine._state.residency.scopes()) == 500
