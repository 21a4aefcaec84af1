"""What peers can have is told exactly. `Node.step` compares it with the tables each time, so every
test and machine of this folder that moves a block is one of the offers too."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Clear
from kvstore.engine.memory.residency import Change, Offers
from kvstore.types import SpaceId, Tier
from kvstore.wire.feed import Removed
from tests.unit.engine.disk import DiskNode, known
from tests.unit.engine.harness import HALVES, HEADS, LAYERS, WHOLE, Node, Peer, key, residency_of


def test_who_wants_neither_changes_nor_offers_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tell_offers=False, tell_changes=False)
    monkeypatch.setattr(node, "_held", set)
    Peer(node).store(1, 2)
    node.step(Clear(None, None))
    assert node.engine.counters.stores_sealed == 2
    assert not node.told
    assert not node.offered


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


@settings(max_examples=20)
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
    offers = Offers(residency_of(4, 4), lambda _: (LAYERS, HEADS))
    scope = ("t", SpaceId(bytes(32)), WHOLE)
    assert offers.offers_of([Change(Tier.DRAM, False, scope, key(1) + key(2))]) == [
        Removed(*scope[:2], Tier.DRAM, key(1) + key(2))
    ]
