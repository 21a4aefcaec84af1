"""Layout of a block: how one block of one shard lies in its slot.

    slot bytes = [layer][head][token][K‖V]        (vLLM's LBHNC page per layer, layers contiguous)

              page of layer 0            page of layer 1
    ├─head 0─┼─head 1─┤…        ├─head 0─┼─head 1─┤…           …│ pad to 4 KiB │
      token 0..N-1, each of them K bytes + V bytes of one head

A layer with a cache of its own size, such as a draft model's, has as many heads as the others, of
its own size: where the numbers of KV heads differ, their greatest common divisor is the number of
heads, and each of them stands for several (`Space.head_bytes`).

Another parallel size cuts the same block otherwise. Two shards have one run of bytes per layer in
common, or one for all neighbouring layers where both have all of each other's heads (`shared`):

    held here   layers 0-2, heads 0-4    │0 1 2 3│0 1 2 3│
    wanted      layers 0-2, heads 2-4        │2 3│   │2 3│

Copies of blocks may lie in a node's slab of GPU memory, too: their places are in a page of the
layout of generation pages, one word for each slot of dram, or 0. A word changes before its copy
does, and none has two meanings: it carries the generation of its place. So a copy was read whole if
its word is the same before and after, and the slot of dram still has its generation.

    word = generation of the place << 32 | its first page + 1

Covers: sizes and offsets. Does not cover: copying (`kvstore.kernels`), placing slots in the arena
(`kvstore.engine.memory.slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Shard
from kvstore.wire.bounds import U64, Label
from kvstore.wire.space import Space

_PAGE_BITS: Final = 32
_PAGE_MASK: Final = (1 << _PAGE_BITS) - 1


def shard_bytes(space: Space, shard: Shard) -> int:
    """Payload bytes of one block of a shard."""
    sizes = space.head_bytes
    layers = slice(shard.layer_begin, shard.layer_end)
    its = sizes[0] * (layers.stop - layers.start) if len(sizes) == 1 else sum(sizes[layers])
    return its * (shard.head_end - shard.head_begin)


def whole_block_bytes(space: Space) -> int:
    """Payload bytes of one block, all shards together."""
    return shard_bytes(space, Shard(0, space.layer_count, 0, space.kv_head_count))


def layer_offsets(head_bytes: Sequence[int], layer_count: int) -> NDArray[np.int64]:
    """Bytes of one head in the layers before each layer, and in all: i64 [layer_count + 1].

    Args:
        head_bytes: of each layer, or one number for all (`Space.head_bytes`).
        layer_count: of the model.
    """
    sizes = np.resize(np.array(head_bytes, dtype=np.int64), layer_count)
    return np.concatenate(([0], np.cumsum(sizes)))


def slot_bytes(block_bytes: int) -> int:
    """Bytes that such a block takes in the arena: whole pages, never below the minimum."""
    pages = -(-block_bytes // PAGE_BYTES)
    return max(pages * PAGE_BYTES, SLOT_BYTES_MIN)


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


class Slab(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's slab of GPU memory, in the Welcome to a rank on the same GPU. The descriptor of the
    page of places comes with it, behind the others."""

    gpu: Label
    """As in HelloRank."""
    size_bytes: U64
    handle: Annotated[bytes, msgspec.Meta(max_length=64)]
    """Handle by which another process maps the slab."""


def place_words(slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words for copies in these slots of a slab."""
    words: NDArray[np.uint64] = generations << np.uint64(_PAGE_BITS)
    words += slots + np.uint64(1)
    return words


def begin_of(word: int) -> int:
    """Offset in the slab of the place that a word names; -1: there is no copy."""
    return ((word & _PAGE_MASK) - 1) * PAGE_BYTES if word else -1
