"""Sets of shards that make whole blocks: every layer and head exactly once.

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
"""Parallel sizes of one space on one node; blocks of further ones are not offered."""


WORK_MAX = 1 << 15
"""Gaps looked at in one search. Engines choose the shards, and could make the search long."""

_Gap = tuple[int, int, int]
"""First head, the head behind the last one, first layer that is not covered."""
_Chosen = tuple[Shard, "_Chosen | None"]


def covers(
    shards: Collection[Shard], *, layer_count: int, head_count: int
) -> list[tuple[Shard, ...]]:
    """All sets of these shards that tile layers × heads, each in ascending order."""
    found: list[tuple[Shard, ...]] = []
    at_corner: dict[tuple[int, int], list[Shard]] = {}
    for shard in sorted(shards, reverse=True):
        if shard.layer_end <= layer_count and shard.head_end <= head_count:
            at_corner.setdefault((shard.layer_begin, shard.head_begin), []).append(shard)
    # Where the cover ends, head by head; the first uncovered cell is where the next shard begins.
    waiting: list[tuple[list[_Gap], _Chosen | None]] = [([(0, head_count, 0)], None)]
    work = WORK_MAX
    while waiting and work > 0 and len(found) < COVERS_MAX:
        gaps, chosen = waiting.pop()
        work -= len(gaps)
        head, end, layer = min(gaps, key=lambda gap: (gap[2], gap[0]))
        if layer == layer_count:
            found.append(_unfold(chosen))
            continue
        for shard in at_corner.get((layer, head), ()):
            work -= 1
            if shard.head_end <= end:
                waiting.append((_placed(gaps, shard, end), (shard, chosen)))
    return found


def _placed(gaps: list[_Gap], shard: Shard, end: int) -> list[_Gap]:
    """The gaps when this shard lies at the start of the one that ends at `end`."""
    new: list[_Gap] = []
    for gap in gaps:
        parts = [gap]
        if gap[1] == end:
            first = (shard.head_begin, shard.head_end, shard.layer_end)
            rest = (shard.head_end, end, gap[2])
            parts = [first, rest] if rest[0] < end else [first]
        for part in parts:
            if new and new[-1][2] == part[2]:
                part = (new.pop()[0], part[1], part[2])
            new.append(part)
    return new


def _unfold(chosen: _Chosen | None) -> tuple[Shard, ...]:
    shards = []
    while chosen is not None:
        shard, chosen = chosen
        shards.append(shard)
    return tuple(reversed(shards))
