"""Geometry of a block: how one block of one shard lies in its slot.

    slot bytes = [layer][head][token][K‖V]        (vLLM's LBHNC page per layer, layers contiguous)

              page of layer 0            page of layer 1
    ├─head 0─┼─head 1─┤…        ├─head 0─┼─head 1─┤…           …│ pad to 4 KiB │
      token 0..N-1, each token_bytes = K bytes + V bytes of one head

Another parallel size cuts the same block otherwise. What two shards share is one run of bytes per
layer, or one for all neighbouring layers where both have all of each other's heads (`shared`):

    held here   layers 0-2, heads 0-4    │0 1 2 3│0 1 2 3│
    wanted      layers 0-2, heads 2-4        │2 3│   │2 3│

Covers: sizes and offsets. Does not cover: copying (`kvstore.kernels`), placing slots in the arena
(`kvstore.engine.slots`).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Shard
from kvstore.wire.space import Space


class Geometry(msgspec.Struct, frozen=True):
    """Shape of one block of one shard."""

    layer_count: int
    head_count: int
    token_count: int
    """Tokens in a block."""
    token_bytes: int
    """Bytes of K‖V of one token in one head of one layer."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer of the block."""
        return self.head_count * self.token_count * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Payload bytes of the block: all layers."""
        return self.layer_count * self.page_bytes

    def page_offset(self, layer: int) -> int:
        """Byte offset of a layer's page in the slot. `layer` counts from the shard's first."""
        assert 0 <= layer < self.layer_count, f"layer {layer} of {self.layer_count}"
        return layer * self.page_bytes

    def covers(self, shard: Shard) -> bool:
        """True when this is the geometry of `shard`: as many layers and heads."""
        return (
            shard.layer_end - shard.layer_begin == self.layer_count
            and shard.head_end - shard.head_begin == self.head_count
        )


def shard_bytes(space: Space, shard: Shard) -> int:
    """Payload bytes of one block of a shard."""
    layers, heads = shard.layer_end - shard.layer_begin, shard.head_end - shard.head_begin
    return layers * heads * space.block_tokens * space.token_bytes


def slot_bytes(block_bytes: int) -> int:
    """Bytes that such a block takes in the arena: whole pages, never below the minimum."""
    pages = -(-block_bytes // PAGE_BYTES)
    return max(pages * PAGE_BYTES, SLOT_BYTES_MIN)


class Runs(msgspec.Struct, frozen=True):
    """Runs of bytes that two shards of a block share, ascending in both. Arrays i64 [n]."""

    source_offsets: NDArray[np.int64]
    target_offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


def shared(source: Shard, target: Shard, *, head_bytes: int) -> Runs:
    """What of a block's `source` shard belongs into its `target` shard; possibly nothing.

    Args:
        source, target: of one space.
        head_bytes: of one head in one layer: tokens of a block times bytes of a token.
    """
    layers = range(
        max(source.layer_begin, target.layer_begin), min(source.layer_end, target.layer_end)
    )
    head_begin = max(source.head_begin, target.head_begin)
    head_end = min(source.head_end, target.head_end)
    if not layers or head_begin >= head_end:
        nothing = np.empty(0, dtype=np.int64)
        return Runs(nothing, nothing, nothing)

    def offsets(shard: Shard) -> NDArray[np.int64]:
        heads = shard.head_end - shard.head_begin
        layer = np.array(layers, dtype=np.int64) - shard.layer_begin
        begin: NDArray[np.int64] = (layer * heads + head_begin - shard.head_begin) * head_bytes
        return begin

    whole = (head_begin, head_end)
    length = (head_end - head_begin) * head_bytes
    if whole == (source.head_begin, source.head_end) == (target.head_begin, target.head_end):
        total = np.array([length * len(layers)], dtype=np.int64)
        return Runs(offsets(source)[:1], offsets(target)[:1], total)
    return Runs(offsets(source), offsets(target), np.full(len(layers), length, dtype=np.int64))
