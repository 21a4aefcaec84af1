"""Blocks that come in other shards than are wanted: which bytes go where, and are they right.

    served by a peer   S shards, each with its checksum          a₀ a₁            (two ranks there)
    wanted here        T shards, each with a slot                b₀ b₁ b₂ b₃      (four ranks here)

Both cover all layers and heads. Bytes go straight from slots there into slots here, in the runs
that two shards have in common (`shared`): one per layer, or one for all neighbouring layers where
both have all of each other's heads:

    held here   layers 0-2, heads 0-4    │0 1 2 3│0 1 2 3│
    wanted      layers 0-2, heads 2-4        │2 3│   │2 3│

No shard of the peer exists here as one piece. Its checksum is made over its bytes all the same, in
its own order, collected from where they lie now; only then are the checksums of the shards here
made. Where a shard is the same on both sides it is one run and one hash.

Pure: bytes are seen through memoryviews. Does not cover: moving them (`kvstore.transport`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, BlockKey, Shard
from kvstore.wire.peers import checksums_of
from kvstore.wire.record import Scope, checksum_of, header


class Assembly:
    """How blocks of one space come from the shards of a peer into ours."""

    def __init__(
        self, sources: Sequence[Scope], targets: Sequence[Scope], *, head_bytes: Sequence[int]
    ) -> None:
        """Check the shards, and find the runs that both sides share. Cheap, whatever a peer says:
        it is not taken off the loop.

        Args:
            sources, targets: shards of the peer, and ours.
            head_bytes: of the space (`Space.head_bytes`).

        Raises:
            ValueError: they are not both the whole of the same blocks.
        """
        self.sources, self.targets = tuple(sources), tuple(targets)
        theirs, ours = (corners([scope.shard for scope in side]) for side in (sources, targets))
        layer_count = int(ours[:, 1].max())
        # What costs nothing first: so there are no more runs than a block has heads in layers.
        if _size(sources) != _size(targets) or theirs[:, 1].max() > layer_count:
            raise ValueError("shards that do not cover the same layers and heads")
        offsets = layer_offsets(head_bytes, layer_count)
        if not (_fits(theirs, sources, offsets) and _fits(ours, targets, offsets)):
            raise ValueError("shards of blocks of other sizes")
        self.runs = runs = shared(theirs, ours, offsets=offsets)
        # As many bytes twice would leave others as they were: what was in a slot before.
        if not (
            _fill(sources, runs.sources, runs.source_offsets, runs.lengths)
            and _fill(targets, runs.targets, runs.target_offsets, runs.lengths)
        ):
            raise ValueError("shards that do not cover the same layers and heads, each once")
        self._prefixes = [scope.prefix() for scope in sources]
        self._same = [sources.index(scope) if scope in sources else None for scope in targets]
        """Index of the identical source for each target, or None."""

    @cached_property
    def _ranges(self) -> list[tuple[int, int, int, int]]:
        """(source, target, offset in the target, length) of each run, made when the first block is
        verified."""
        runs = self.runs
        parts = (runs.sources, runs.targets, runs.target_offsets, runs.lengths)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def moves(
        self, source_offsets: NDArray[np.int64], target_offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(from, to, length) in bytes of everything to be moved, i64 [m].

        Args:
            source_offsets: of each block's slots in the peer's arena, [n][S].
            target_offsets: of its slots in ours, [n][T].
        """
        runs = self.runs
        begins = source_offsets.T[runs.sources] + runs.source_offsets[:, None]
        ends = target_offsets.T[runs.targets] + runs.target_offsets[:, None]
        # Run by run: neighbouring slots of one shard are neighbours here, too.
        return begins.ravel(), ends.ravel(), np.repeat(runs.lengths, len(source_offsets))

    def verify(
        self, slots: NDArray[np.int64], memory: NDArray[np.uint8], keys: bytes, checksums: bytes
    ) -> Iterator[list[bytes] | None]:
        """The checksums of our shards of each block that has come, made when it is asked for; None
        for one that is not what was stored.

        Args:
            slots: offsets of the blocks' shards in `memory`, by target, [n][T].
            memory: an arena.
            keys: of all the blocks.
            checksums: as the peer sent them for all, [n][S].
        """
        for number, begins in enumerate(slots.tolist()):
            payloads = [
                memory[begin : begin + scope.block_bytes].data
                for begin, scope in zip(begins, self.targets, strict=True)
            ]
            key = BlockKey(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            told = checksums_of(checksums, block=number, shards=len(self.sources))
            parts: list[list[memoryview]] = [[] for _ in self.sources]
            for source, target, begin, length in self._ranges:
                parts[source].append(payloads[target][begin : begin + length])
            its = [header(prefix, key) for prefix in self._prefixes]
            is_right = list(map(checksum_of, its, parts)) == told
            yield self._ours(key, payloads, told) if is_right else None

    def _ours(
        self, key: BlockKey, payloads: Sequence[memoryview], told: Sequence[bytes]
    ) -> list[bytes]:
        """The checksums of our shards of a block that is right."""
        return [
            told[same] if same is not None else checksum_of(header(scope.prefix(), key), [payload])
            for scope, same, payload in zip(self.targets, self._same, payloads, strict=True)
        ]


def good_blocks(verified: Sequence[Sequence[bytes] | None], columns: int) -> tuple[bytes, bytes]:
    """(flags of the blocks that are right, checksums of all in `columns` shards, [n][T]: zeros for
    the others)."""
    nothing = [bytes(columns * CHECKSUM_BYTES)]
    good = bytes(sums is not None for sums in verified)
    return good, b"".join(b"".join(sums or nothing) for sums in verified)


def _size(side: Sequence[Scope]) -> int:
    """Bytes of a block."""
    return sum(scope.block_bytes for scope in side)


def _fill(
    side: Sequence[Scope],
    numbers: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> bool:
    """Whether ranges in these shards, by their numbers, are every byte of them, each once."""
    ends = np.cumsum([scope.block_bytes for scope in side], dtype=np.int64)
    begins = (ends - [scope.block_bytes for scope in side])[numbers] + offsets
    order = np.argsort(begins, kind="stable")
    reached = np.cumsum(lengths[order])
    return bool(
        len(begins)
        and reached[-1] == ends[-1]
        and np.all(begins[order] == reached - lengths[order])
    )


def _fits(shards: NDArray[np.int64], side: Sequence[Scope], offsets: NDArray[np.int64]) -> bool:
    """Whether each shard has as many bytes as its layers and heads."""
    layer, layer_end, head, head_end = shards.T
    if not ((layer < layer_end) & (head < head_end)).all():
        return False  # a peer may say any number: of no layer, perhaps
    sizes: list[int] = ((offsets[layer_end] - offsets[layer]) * (head_end - head)).tolist()
    return sizes == [scope.block_bytes for scope in side]


# ── bytes that shards share ───────────────────────────────────────────────────────────────────────


def layer_offsets(head_bytes: Sequence[int], layer_count: int) -> NDArray[np.int64]:
    """Bytes of one head in the layers before each layer, and in all: i64 [layer_count + 1].

    Args:
        head_bytes: of each layer, or one number for all (`Space.head_bytes`).
        layer_count: of the model.
    """
    sizes = np.resize(np.array(head_bytes, dtype=np.int64), layer_count)
    return np.concatenate(([0], np.cumsum(sizes)))


class Runs(NamedTuple):
    """Runs of bytes that shards of a block share, one side's with the other's. Arrays i64 [n]."""

    sources: NDArray[np.int64]
    """Number of the shard that they come from, ascending."""
    targets: NDArray[np.int64]
    """Number of the shard that they go into."""
    source_offsets: NDArray[np.int64]
    """Begin of the run in the bytes of the source shard, ascending within a source."""
    target_offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


def corners(shards: Sequence[Shard]) -> NDArray[np.int64]:
    """[n][layer begin, layer end, head begin, head end]"""
    return np.array([msgspec.structs.astuple(shard) for shard in shards], dtype=np.int64)


def shared(
    sources: NDArray[np.int64], targets: NDArray[np.int64], *, offsets: NDArray[np.int64]
) -> Runs:
    """Runs of a block's `sources` that belong into its `targets`; possibly none.

    Args:
        sources, targets: corners of shards of one space.
        offsets: `layer_offsets` of the space.
    """
    is_shared = sources[:, None, 0] < targets[:, 1]
    is_shared &= targets[:, 0] < sources[:, None, 1]
    is_shared &= sources[:, None, 2] < targets[:, 3]
    is_shared &= targets[:, 2] < sources[:, None, 3]
    source, target = np.nonzero(is_shared)
    one, other = sources[source], targets[target]
    layer, _, head, _ = np.maximum(one, other).T
    _, layer_end, _, head_end = np.minimum(one, other).T
    # All of each other's heads: one run for all layers.
    is_whole = (one[:, 2:] == other[:, 2:]).all(axis=1)
    counts = np.where(is_whole, 1, layer_end - layer)
    each = np.repeat(np.arange(len(source)), counts)
    first = layer[each] + np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
    end = np.where(is_whole[each], layer_end[each], first + 1)
    size = offsets[end] - offsets[first]

    def begin_in(shards: NDArray[np.int64]) -> NDArray[np.int64]:
        its = shards[each]
        before = (offsets[first] - offsets[its[:, 0]]) * (its[:, 3] - its[:, 2])
        found: NDArray[np.int64] = before + (head[each] - its[:, 2]) * size
        return found

    source_offsets = begin_in(one)
    order = np.lexsort((source_offsets, source[each]))
    lengths = (head_end - head)[each] * size
    runs = (source[each], target[each], source_offsets, begin_in(other), lengths)
    return Runs(*(array[order] for array in runs))
