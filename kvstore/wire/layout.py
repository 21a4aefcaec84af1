"""Geometry of a block: how one block of one shard lies in its slot.

    slot bytes = [layer][head][token][K‖V]        (vLLM's LBHNC page per layer, layers contiguous)

              page of layer 0            page of layer 1
    ├─head 0─┼─head 1─┤…        ├─head 0─┼─head 1─┤…           …│ pad to 4 KiB │
      token 0..N-1, each token_bytes = K bytes + V bytes of one head

Another parallel size cuts the same block otherwise. Two shards have one run of bytes per layer in
common, or one for all neighbouring layers where both have all of each other's heads (`shared`):

    held here   layers 0-2, heads 0-4    │0 1 2 3│0 1 2 3│
    wanted      layers 0-2, heads 2-4        │2 3│   │2 3│

Covers: sizes and offsets. Does not cover: copying (`kvstore.kernels`), placing slots in the arena
(`kvstore.engine.memory.slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Shard
from kvstore.wire.bounds import Count, Tokens
from kvstore.wire.space import Space


class Geometry(msgspec.Struct, frozen=True):
    """Shape of one block of one shard."""

    layer_count: Count
    head_count: Count
    token_count: Tokens
    """Tokens in a block."""
    token_bytes: Tokens
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


class Runs(NamedTuple):
    """Runs of bytes that shards of a block share, one side's with the other's. Arrays i64 [n]."""

    sources: NDArray[np.int64]
    """Number of the shard that they come from, ascending."""
    targets: NDArray[np.int64]
    """… and into which they go."""
    source_offsets: NDArray[np.int64]
    """In the bytes of the shard, ascending within a source."""
    target_offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


def corners(shards: Sequence[Shard]) -> NDArray[np.int64]:
    """[n][layer begin, layer end, head begin, head end]"""
    return np.array([msgspec.structs.astuple(shard) for shard in shards], dtype=np.int64)


def shared(sources: NDArray[np.int64], targets: NDArray[np.int64], *, head_bytes: int) -> Runs:
    """Runs of a block's `sources` that belong into its `targets`; possibly none.

    Args:
        sources, targets: corners of shards of one space.
        head_bytes: of one head in one layer: tokens of a block times bytes of a token.
    """
    is_shared = sources[:, None, 0] < targets[:, 1]
    is_shared &= targets[:, 0] < sources[:, None, 1]
    is_shared &= sources[:, None, 2] < targets[:, 3]
    is_shared &= targets[:, 2] < sources[:, None, 3]
    source, target = np.nonzero(is_shared)
    one, other = sources[source], targets[target]
    layer, _, head, _ = (begins := np.maximum(one, other)).T
    _, layer_end, _, head_end = np.minimum(one, other).T
    # All of each other's heads: one run for all layers.
    is_whole = (one[:, 2:] == other[:, 2:]).all(axis=1)
    layers = layer_end - layer
    counts = np.where(is_whole, 1, layers)
    lengths = (head_end - head) * head_bytes * np.where(is_whole, layers, 1)
    each = np.repeat(np.arange(len(source)), counts)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)

    def offsets(shards: NDArray[np.int64]) -> NDArray[np.int64]:
        heads = (shards[:, 3] - shards[:, 2])[each]
        past: NDArray[np.int64] = (begins - shards)[each]
        found: NDArray[np.int64] = ((past[:, 0] + nth) * heads + past[:, 2]) * head_bytes
        return found

    source_offsets = offsets(one)
    order = np.lexsort((source_offsets, source[each]))
    runs = (source[each], target[each], source_offsets, offsets(other), lengths[each])
    return Runs(*(array[order] for array in runs))
