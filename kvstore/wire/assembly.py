"""Blocks that come in other shards than are wanted: which bytes go where, and are they right.

    lent by a peer     S shards, each with its checksum          a₀ a₁            (two ranks there)
    wanted here        T shards, each with a slot                b₀ b₁ b₂ b₃      (four ranks here)

Both cover all layers and heads. Bytes go straight from slots there into slots here, in the runs
that two shards share (`layout.shared`); no shard of the peer exists here as one piece. Its checksum
is made over its bytes all the same, in its own order, collected from where they lie now; only then
are the checksums of the shards here made. Where a shard is the same on both sides it is one run and
one hash.

Pure: bytes are seen through memoryviews. Does not cover: moving them (`kvstore.transport`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, BlockKey, Shard
from kvstore.wire.layout import Runs, shared
from kvstore.wire.record import Scope, header


class Piece(msgspec.Struct, frozen=True):
    """Runs from one shard of the peer into one of ours."""

    source: int
    target: int
    runs: Runs


class Assembly:
    """How blocks of one space come from the shards of a peer into ours."""

    def __init__(self, sources: Sequence[Scope], targets: Sequence[Scope]) -> None:
        """Raises:
        ValueError: they are not both the whole of the same blocks.
        """
        head_bytes = {_head_bytes(scope) for scope in (*sources, *targets)}
        if len(head_bytes) != 1:
            raise ValueError("shards of blocks of other sizes")
        self.sources, self.targets = tuple(sources), tuple(targets)
        (size,) = head_bytes
        # As many bytes twice would leave others as they were: what was in a slot before.
        if any(
            len(shared(one.shard, other.shard, head_bytes=size).lengths)
            for side in (sources, targets)
            for one, other in itertools.combinations(side, 2)
        ):
            raise ValueError("shards that do not cover the same layers and heads, each once")
        self.pieces = [
            Piece(s, t, runs)
            for s, source in enumerate(sources)
            for t, target in enumerate(targets)
            for runs in [shared(source.shard, target.shard, head_bytes=size)]
            if len(runs.lengths)
        ]
        for side, scopes in (("source", sources), ("target", targets)):
            for number, scope in enumerate(scopes):
                its = [p for p in self.pieces if getattr(p, side) == number]
                if sum(int(p.runs.lengths.sum()) for p in its) != scope.block_bytes:
                    raise ValueError("shards that do not cover the same layers and heads")
        self._in_source_order = [_ordered(self.pieces, s) for s in range(len(sources))]

    def moves(
        self, source_offsets: NDArray[np.int64], target_offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(from, to, length) in bytes of everything to be moved, i64 [m].

        Args:
            source_offsets: of each block's slots in the peer's arena, [n][S].
            target_offsets: of its slots in ours, [n][T].
        """
        begins: list[NDArray[np.int64]] = []
        ends: list[NDArray[np.int64]] = []
        lengths: list[NDArray[np.int64]] = []
        for piece in self.pieces:
            runs = piece.runs
            begins.append((source_offsets[:, piece.source, None] + runs.source_offsets).ravel())
            ends.append((target_offsets[:, piece.target, None] + runs.target_offsets).ravel())
            lengths.append(
                np.broadcast_to(runs.lengths, (len(source_offsets), len(runs.lengths))).ravel()
            )
        return np.concatenate(begins), np.concatenate(ends), np.concatenate(lengths)

    def verify(
        self, key: BlockKey, slots: Sequence[memoryview], checksums: Sequence[bytes]
    ) -> list[bytes] | None:
        """The checksums of our shards of a block that has come; None if it is not what was stored.

        Args:
            key: of the block.
            slots: bytes of our shards, by target.
            checksums: as the peer told them, by source.
        """
        assert len(key) == KEY_BYTES
        for number, scope in enumerate(self.sources):
            digest = xxhash.xxh3_128(header(scope.prefix(), key))
            for target, begin, end in self._in_source_order[number]:
                digest.update(slots[target][begin:end])
            if digest.digest() != checksums[number]:
                return None
        made = []
        for number, scope in enumerate(self.targets):
            if scope in self.sources:
                made.append(checksums[self.sources.index(scope)])
                continue
            digest = xxhash.xxh3_128(header(scope.prefix(), key))
            digest.update(slots[number][: scope.block_bytes])
            made.append(digest.digest())
        assert all(len(checksum) == CHECKSUM_BYTES for checksum in made)
        return made


def _ordered(pieces: Sequence[Piece], source: int) -> list[tuple[int, int, int]]:
    """(target, begin, end) of all runs of a source, in the order of its bytes."""
    found = [
        (int(begin), piece.target, int(to), int(to) + int(length))
        for piece in pieces
        if piece.source == source
        for begin, to, length in zip(
            piece.runs.source_offsets, piece.runs.target_offsets, piece.runs.lengths, strict=True
        )
    ]
    return [(target, begin, end) for _, target, begin, end in sorted(found)]


def _head_bytes(scope: Scope) -> int:
    """Of one head in one layer."""
    shard: Shard = scope.shard
    heads = (shard.layer_end - shard.layer_begin) * (shard.head_end - shard.head_begin)
    if heads <= 0 or scope.block_bytes % heads:
        raise ValueError("a block whose bytes are no multiple of its heads")
    return scope.block_bytes // heads
