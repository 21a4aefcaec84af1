"""Which shards make whole blocks."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from kvstore.engine.sessions.owners import COVERS_MAX, covers
from kvstore.types import Shard

WHOLE = Shard(0, 4, 0, 4)
HEADS = (Shard(0, 4, 0, 2), Shard(0, 4, 2, 4))
LAYERS = (Shard(0, 2, 0, 4), Shard(2, 4, 0, 4))


def test_many_are_bounded() -> None:
    rows = [Shard(layer, layer + 1, head, end) for layer in range(8) for head, end in _cuts(3)]
    assert len(covers(rows, layer_count=8, head_count=3)) == COVERS_MAX


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
    found = covers(shards, layer_count=3, head_count=3)
    assert {frozenset(cover) for cover in found} == expected
    assert all(list(cover) == sorted(cover) for cover in found)


def test_shards_of_another_geometry_are_none() -> None:
    assert covers([WHOLE], layer_count=4, head_count=8) == []
    assert covers([WHOLE], layer_count=2, head_count=4) == []
