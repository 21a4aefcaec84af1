"""Rows of scopes: found, counted, and taken in slices that look at each row once; and which shards
make whole blocks."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Clear, Cleared
from kvstore.engine.memory import residency as module
from kvstore.engine.memory.residency import COVERS_MAX, covers
from kvstore.types import Shard, SpaceId
from kvstore.wire.messages import keys_array
from tests.unit.engine.disk import SPACE, known
from tests.unit.engine.harness import WHOLE, Node, keys, residency_of

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
        patch.setattr(module, "SCAN_ROWS", 4)
        found = residency.rows_in(wanted, count_max, begin=begin)
    assert found.tolist() == expected[:count_max]


def test_a_clear_finds_what_took_rows_that_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLEAR_ROWS_MAX", 4)
    monkeypatch.setattr(module, "SCAN_ROWS", 3)
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
