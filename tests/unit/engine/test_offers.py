"""What peers can have is told exactly. `Node.step` compares it with the tables each time, so every
test and machine of this folder that moves a block is one of the offers too."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Clear, Command, OffersUntold
from kvstore.engine.memory.residency import Change, Residency
from kvstore.engine.memory.table import BlockTable
from kvstore.engine.moves.offers import Offers, _cover
from kvstore.types import Shard, SpaceId, Tier
from kvstore.wire.feed import Removed, Stored
from tests.unit.engine.disk import SPACE, DiskNode, known
from tests.unit.engine.harness import HALVES, HEADS, LAYERS, SMALL, WHOLE, Node, Peer, attached, key


def test_who_wants_no_offers_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tell_offers=False, tell_changes=False)
    monkeypatch.setattr(node, "_held", set)
    Peer(node).store(1, 2)
    assert node.engine.counters.stores_sealed == 2
    assert not node.offered


def test_a_block_is_offered_when_its_last_shard_is_in_and_not_when_one_goes() -> None:
    node, peer = attached(Node(slots=8), shards=HALVES)
    peer.store(1)
    assert {block[3] for block in node.offered} == {key(1)}
    node.step(Clear(None, None))
    assert not node.offered


def test_half_a_block_is_no_offer() -> None:
    node, peer = attached(Node(), shards=HALVES)
    peer.store(1, 2)
    (first, second) = sorted(set(peer_scopes(node)))
    residency = node.state.residency
    words = residency.words(residency.rows_in({second}, 2))
    node.state.empty(words[:1], 0)
    node.tick()
    assert len(node.offered) == 1
    node.state.empty(residency.words(residency.rows_in({first}, 2)), 0)
    node.tick()
    assert not node.offered


def peer_scopes(node: Node) -> list[int]:
    return list(node.state.residency.scopes().values())


def test_a_block_that_two_kinds_of_engines_stored_stays_while_either_is_whole() -> None:
    node = Node()
    Peer(node, "one").store(1)
    Peer(node, "two", shards=HALVES).store(1)
    residency = node.state.residency
    whole = residency.scopes()[("t", next(iter(node.offered))[2], WHOLE)]
    node.state.empty(residency.words(residency.rows_in({whole}, 9)), 0)
    node.tick()
    assert len(node.offered) == 1


def test_what_lies_on_disk_is_offered_once_an_engine_says_what_is_whole() -> None:
    node = DiskNode()
    node.step(known(5, 6))
    assert not node.offered
    assert node.untold == 0
    Peer(node)
    assert {(block[0], block[3]) for block in node.offered} == {
        (Tier.FILE, key(5)),
        (Tier.FILE, key(6)),
    }
    assert node.untold == 1
    Peer(node, "another")
    assert node.untold == 1


@given(
    slice_rows=st.integers(1, 9),
    one=st.sets(st.integers(0, 11)),
    two=st.sets(st.integers(0, 11)),
    cleared=st.booleans(),
)
@example(slice_rows=1, one={1}, two={1}, cleared=False)
def test_slices_add_up_to_what_was_told(
    slice_rows: int, one: set[int], two: set[int], *, cleared: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "HELD_ROWS_MAX", slice_rows)
        node = DiskNode()
        first, second = Peer(node), Peer(node, "b", shards=HALVES)
        first.store(*sorted(one)[:4])
        if cleared:
            node.step(Clear(None, "t"))
        second.store(*sorted(two)[:4])
        node.write_all()
        told = set(node.offered)
        node.ask_offers()
        assert node.offered == told


def test_what_a_space_lost_is_taken_back_though_its_scopes_are_forgotten() -> None:
    offers = Offers(Residency(block_count_max=4, word_count=4), lambda _: (LAYERS, HEADS))
    scope = ("t", SpaceId(bytes(32)), WHOLE)
    assert offers.offers_of([Change(Tier.DRAM, False, scope, key(1) + key(2))]) == [
        Removed(*scope[:2], Tier.DRAM, key(1) + key(2))
    ]


@pytest.mark.parametrize(
    ("shards", "whole"),
    [
        ([WHOLE], True),
        (list(HALVES), True),
        ([HALVES[0]], False),
        ([], False),
        ([Shard(0, 2, 0, HEADS), Shard(2, LAYERS, 0, 1)], False),
        ([Shard(0, 2, 0, HEADS), Shard(1, LAYERS, 0, HEADS)], True),
    ],
)
def test_what_covers(shards: list[Shard], *, whole: bool) -> None:
    assert _cover(frozenset(shards), (SMALL.layer_count, SMALL.kv_head_count)) is whole


def test_whether_a_space_holds_anything_takes_no_look_at_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked whenever a session opens."""
    node = DiskNode()
    node.step(known(1))
    Peer(node, "other", tenant="u")
    offers = node.state.offers
    mine, none = (("t", SPACE), ("u", SPACE))
    with monkeypatch.context() as context:
        context.delattr(BlockTable, "used_scopes")
        assert [offers.any_held(address) for address in (mine, none)] == [True, False]
    node.step(Clear(None, None))
    assert not offers.any_held(mine)


def test_an_offer_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Offers, changes: object) -> list[Command]:
        return []

    _, peer = attached(Node())
    monkeypatch.setattr(Offers, "offers_of", broken)
    with pytest.raises(AssertionError, match="offers tell another story"):
        peer.store(1)


def test_offers_name_no_shard_and_no_token() -> None:
    told = ("tenant", "space", "tier", "keys", "engine", "rank")
    assert Stored.__struct_fields__ == Removed.__struct_fields__ == told
    assert OffersUntold.__struct_fields__ == ()
