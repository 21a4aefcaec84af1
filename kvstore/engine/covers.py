"""Which sets of shards make whole blocks: every layer and head exactly once.

    shards of a space            covers
    0-16 × 0-8                   one rank
    0-16 × 0-4, 0-16 × 4-8       two tensor-parallel ranks
    0-8 × 0-8,  8-16 × 0-8       two stages of a pipeline

Blocks of one space may be held by engines of several parallel sizes: each is a cover of its own.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import Shard

COVERS_MAX = 16
"""Parallel sizes of one space on one node; what is beyond is not offered."""


def covers(
    shards: Collection[Shard], *, layer_count: int, head_count: int
) -> list[tuple[Shard, ...]]:
    """All sets of these shards that tile layers × heads, each in ascending order."""
    found: list[tuple[Shard, ...]] = []
    ascending = sorted(shards)

    def extend(chosen: tuple[Shard, ...]) -> None:
        corner = _first_gap(chosen, layer_count, head_count)
        if corner is None:
            found.append(chosen)
            return
        for shard in ascending:
            begins = (shard.layer_begin, shard.head_begin) == corner
            inside = shard.layer_end <= layer_count and shard.head_end <= head_count
            if len(found) < COVERS_MAX and begins and inside and not _overlaps(shard, chosen):
                extend((*chosen, shard))

    extend(())
    return found


def _first_gap(
    chosen: tuple[Shard, ...], layer_count: int, head_count: int
) -> tuple[int, int] | None:
    """The first (layer, head) that no shard has; None: there is none."""
    corners = {(0, 0)}
    for shard in chosen:
        corners |= {
            (shard.layer_end, shard.head_begin),
            (shard.layer_begin, shard.head_end),
            (shard.layer_end, 0),
        }
    for layer, head in sorted(corners):
        inside = layer < layer_count and head < head_count
        if inside and not any(_has(shard, layer, head) for shard in chosen):
            return layer, head
    return None


def _has(shard: Shard, layer: int, head: int) -> bool:
    return (
        shard.layer_begin <= layer < shard.layer_end and shard.head_begin <= head < shard.head_end
    )


def _overlaps(shard: Shard, chosen: tuple[Shard, ...]) -> bool:
    return any(
        shard.layer_begin < other.layer_end
        and other.layer_begin < shard.layer_end
        and shard.head_begin < other.head_end
        and other.head_begin < shard.head_end
        for other in chosen
    )
