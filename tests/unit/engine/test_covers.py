"""Which shards make whole blocks."""

from __future__ import annotations

import itertools
import tracemalloc

from hypothesis import example, given, strategies as st

from kvstore.engine.memory.residency import COVERS_MAX, covers
from kvstore.types import Shard

WHOLE = Shard(0, 4, 0, 4)
HEADS = (Shard(0, 4, 0, 2), Shard(0, 4, 2, 4))
LAYERS = (Shard(0, 2, 0, 4), Shard(2, 4, 0, 4))


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
    assert covers(frozenset({WHOLE}), (4, 8)) == ()
    assert covers(frozenset({WHOLE}), (2, 4)) == ()


def test_a_shard_without_layers_costs_no_search() -> None:
    assert covers(frozenset({Shard(0, 0, 0, 4), WHOLE}), (4, 4)) == ((WHOLE,),)


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
