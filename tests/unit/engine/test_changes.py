"""What the tiers gain and lose, and what peers can have, is told exactly. `Node.step` compares it
with the tables each time, so every test and machine of this folder that moves a block is one of the
changes and offers too."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Changed, Clear
from kvstore.engine.memory import residency as residency_module
from kvstore.engine.memory.residency import Change, Geometry, Offers, covers
from kvstore.tier_events import FileKnown
from kvstore.types import Shard, SpaceId, Tier
from kvstore.wire.feed import Removed
from kvstore.wire.record import Scope
from kvstore.wire.space import shard_bytes
from tests.unit.engine.disk import SPACE, DiskNode, known, places
from tests.unit.engine.harness import (
    HALVES,
    HEADS,
    LAYERS,
    SMALL,
    WHOLE,
    Node,
    Peer,
    checksum,
    key,
    keys,
    residency_of,
)
from tests.unit.engine.peers import PeerNode


def all_held(node: Node) -> list[Changed]:
    """Everything that the node holds, asked slice by slice."""
    changes, row = node.engine.held(0)
    while row >= 0:
        more, row = node.engine.held(row)
        changes += more
    return changes


def as_set(changes: list[Changed]) -> set[tuple[object, ...]]:
    return {
        (c.tier, *c.scope, c.keys[at : at + 32])
        for c in changes
        for at in range(0, len(c.keys), 32)
    }


def test_who_wants_neither_changes_nor_offers_gets_none() -> None:
    node = Node(tell_offers=False, tell_changes=False)
    Peer(node).store(1, 2)
    node.step(Clear(None, None))
    assert node.engine.counters.stores_sealed == 2
    assert not node.told
    assert not node.offered


def test_a_change_says_all_that_is_known_of_its_blocks() -> None:
    node = DiskNode()
    node.step(known(5))
    (early,) = all_held(node)
    assert early.stored
    assert (early.tier, early.label, early.block_tokens) == (Tier.FILE, "", 0)
    assert early.scope == ("t", SPACE, WHOLE)
    assert early.keys == keys(5)
    Peer(node, "llama")
    Peer(node, "its latest name")
    (change,) = all_held(node)
    assert (change.label, change.block_tokens) == ("its latest name", SMALL.block_tokens)


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


@settings(max_examples=40)
@given(
    slice_rows=st.integers(1, 9),
    one=st.sets(st.integers(0, 11)),
    two=st.sets(st.integers(0, 11), max_size=4),
    cleared=st.booleans(),
    tenant=st.sampled_from(["t", "u"]),
)
@example(slice_rows=1, one={1}, two={1}, cleared=False, tenant="t")
def test_slices_add_up_to_what_was_told(
    slice_rows: int, one: set[int], two: set[int], *, cleared: bool, tenant: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "HELD_ROWS_MAX", slice_rows)
        node = DiskNode()
        first, second = Peer(node), Peer(node, "b", shards=HALVES, tenant=tenant)
        node.step(known(1, 2, 20))
        first.store(*one)
        if cleared:
            node.step(Clear(None, "t"))
        second.store(*sorted(two))
        node.write_all()
        assert as_set(all_held(node)) == node.told
        offered = set(node.offered)
        node.ask_offers()
        assert node.offered == offered


def test_what_a_space_lost_is_taken_back_though_its_scopes_are_forgotten() -> None:
    offers = Offers(residency_of(4, 4), lambda _: (LAYERS, HEADS))
    scope = ("t", SpaceId(bytes(32)), WHOLE)
    assert offers.offers_of([Change(Tier.DRAM, False, scope, key(1) + key(2))]) == [
        Removed(*scope[:2], Tier.DRAM, key(1) + key(2))
    ]


def test_a_block_is_not_offered_if_no_peer_can_be_served_it() -> None:
    """Two shards that overlap hold all of it, and are no parallel size of any engine."""
    node = PeerNode()
    Peer(node)
    overlapping = Shard(0, 2, 0, HEADS), Shard(1, LAYERS, 0, HEADS)
    for at, shard in enumerate(overlapping):
        scope = Scope("t", SPACE, shard, shard_bytes(SMALL, shard))
        node.step(FileKnown(scope, keys(5), places(at + 1, 1), checksum(5)))
    assert node.serve(1, 5).slots == b""
    assert not node.offered


def test_keys_that_lack_different_shards_cost_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each combination stood the loop still for seconds."""
    node = DiskNode()
    Peer(node)
    shards = [Shard(layer, layer + 1, 0, HEADS) for layer in range(LAYERS)]
    for number in range(1 << LAYERS):
        for at in (at for at in range(LAYERS) if number >> at & 1):
            scope = Scope("t", SPACE, shards[at], shard_bytes(SMALL, shards[at]))
            number_of = 100 * number + at
            node.step(FileKnown(scope, keys(number), places(number_of, 1), checksum(number)))
    searched: list[frozenset[Shard]] = []

    def counted(shards: frozenset[Shard], geometry: Geometry) -> tuple[tuple[Shard, ...], ...]:
        searched.append(shards)
        return covers(shards, geometry)

    monkeypatch.setattr(residency_module, "covers", counted)
    node.ask_offers()
    assert {(block[0], block[3]) for block in node.offered} == {(Tier.FILE, key((1 << LAYERS) - 1))}
    assert set(searched) == {frozenset(shards[:1]), frozenset({*shards, WHOLE})}


def test_offers_come_whether_changes_are_wanted_or_not() -> None:
    node = Node(tell_changes=False)
    Peer(node).store(1)
    assert (len(node.offered), node.told) == (1, set())
