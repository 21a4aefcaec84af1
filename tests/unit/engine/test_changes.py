"""What the tiers gain and lose, and what peers can have, is told exactly; which shards make whole
blocks, and which rows are those of a scope. `Node.step` compares what is told with the tables each
time, so every test and machine of this folder that moves a block is one of the changes and offers
too."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Changed, Clear, Cleared
from kvstore.engine.memory import residency as residency_module
from kvstore.engine.memory.residency import COVERS_MAX, Change, Geometry, Offers, covers
from kvstore.tier_events import FileKnown
from kvstore.types import Shard, SpaceId, Tier
from kvstore.wire.feed import Removed
from kvstore.wire.messages import keys_array
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


# ── rows of scopes ────────────────────────────────────────────────────────────────────────────────


OTHER = SpaceId(bytes(32))


@given(
    scopes=st.lists(st.integers(1, 3), max_size=30),
    gone=st.sets(st.integers(0, 29)),
    wanted=st.sets(st.integers(1, 3)),
    count_max=st.integers(0, 30),
    begin=st.integers(0, 30),
)
def test_rows_are_found_from_anywhere_on(
    scopes: list[int], gone: set[int], wanted: set[int], count_max: int, begin: int
) -> None:
    residency = residency_of(32, 1)
    for number in range(1, 4):
        assert residency.scope("t", SpaceId(bytes([number]) * 32), WHOLE) == number
    for number, scope in enumerate(scopes):
        residency.table.insert(scope, np.full((1, 4), number, dtype=np.uint64))
    rows = np.arange(len(scopes))
    residency.put_file(rows, rows.astype(np.uint64) + np.uint64(1))
    residency.drop_file(rows[[row in gone for row in rows]])
    begin = min(begin, len(scopes))
    there = [row for row, scope in enumerate(scopes) if row not in gone and scope in wanted]
    expected = [row for row in there if row >= begin] + [row for row in there if row < begin]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency_module, "SCAN_ROWS", 4)
        found = residency.rows_in(wanted, count_max, begin=begin)
    assert found.tolist() == expected[:count_max]


def test_a_clear_finds_what_took_rows_that_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLEAR_ROWS_MAX", 4)
    monkeypatch.setattr(residency_module, "SCAN_ROWS", 3)
    node = Node(slots=8, block_count_max=28)
    clear = Clear(SPACE, None)
    node.step(known(*range(20)))
    assert [node.step(clear)[-1] for _ in range(6)] == [Cleared(4)] * 5 + [Cleared(0)]
    node.step(known(*range(10)), known(*range(20, 30), space=OTHER, at=100))
    assert node.step(clear)[-1] == Cleared(4)
    node.step(known(40, 41, at=200))
    residency = node.state.residency
    rows = residency.table.find(residency.scope("t", SPACE, WHOLE), keys_array(keys(40, 41)))
    assert max(rows) < node.engine._clear_from, "they lie where the clear has been"
    assert [node.step(clear)[-1] for _ in range(3)] == [Cleared(4), Cleared(4), Cleared(0)]
    assert node.engine.blocks(space=SPACE.hex()) == []
    assert len(node.engine.blocks(space=OTHER.hex())) == 10


# ── which shards make whole blocks ───────────────────────────────────────────────────────────────


SQUARE = Shard(0, 4, 0, 4)


def test_many_are_bounded() -> None:
    rows = [Shard(layer, layer + 1, head, end) for layer in range(8) for head, end in _cuts(3)]
    assert len(covers(frozenset(rows), (8, 3))) == COVERS_MAX


def _cuts(width: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(width + 1), 2))


@given(
    st.sets(
        st.builds(
            Shard, st.integers(0, 2), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)
        ).filter(lambda s: s.layer_begin < s.layer_end and s.head_begin < s.head_end),
        max_size=6,
    )
)
@example({Shard(0, 1, 1, 3), Shard(0, 3, 0, 1), Shard(1, 3, 1, 3)})
def test_covers_are_exact_and_none_is_missing(shards: set[Shard]) -> None:
    cells = set(itertools.product(range(3), range(3)))

    def tiles(some: tuple[Shard, ...]) -> bool:
        seen = [
            (layer, head)
            for s in some
            for layer in range(s.layer_begin, s.layer_end)
            for head in range(s.head_begin, s.head_end)
        ]
        return len(seen) == len(set(seen)) and set(seen) == cells

    expected = {
        frozenset(some)
        for count in range(1, len(shards) + 1)
        for some in itertools.combinations(shards, count)
        if tiles(some)
    }
    found = covers(frozenset(shards), (3, 3))
    assert {frozenset(cover) for cover in found} == expected
    for cover in found:
        corners = [(shard.layer_begin, shard.head_begin) for shard in cover]
        assert corners == sorted(corners)


def test_shards_of_another_geometry_are_none() -> None:
    assert covers(frozenset({SQUARE}), (4, 8)) == ()
    assert covers(frozenset({SQUARE}), (2, 4)) == ()


def test_a_shard_without_layers_costs_no_search() -> None:
    assert covers(frozenset({Shard(0, 0, 0, 4), SQUARE}), (4, 4)) == ((SQUARE,),)


def test_the_largest_space_that_an_engine_can_name_costs_little_memory() -> None:
    largest = (65535, 65535)
    halves = frozenset({Shard(0, 65535, 0, 30000), Shard(0, 65535, 30000, 65535)})
    tracemalloc.start()
    try:
        assert covers(halves, largest)
        assert not covers(frozenset({Shard(0, 65535, 1, 65535)}), largest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
