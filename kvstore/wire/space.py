"""The space, a fingerprint of everything, tokens aside, that changes the bytes of a block; and how
these bytes lie in a slot.

Two engines share blocks only when every field of `Space` is equal. Parallel sizes are not part of
it: shards are canonical (`Shard`). A field added here makes every stored block unreachable, which
is a cold start and never a wrong answer; a field forgotten here is a wrong answer.

    slot bytes = [layer][head][token][K‖V]        (vLLM's LBHNC page per layer, layers contiguous)

              page of layer 0            page of layer 1
    ├─head 0─┼─head 1─┤…        ├─head 0─┼─head 1─┤…           …│ pad to 4 KiB │
      token 0..N-1, each of them K bytes + V bytes of one head

A layer with a cache of its own size, such as a draft model's, has as many heads as the others, of
its own size: where the numbers of KV heads differ, their greatest common divisor is the number of
heads, and each of them stands for several (`Space.head_bytes`). Another parallel size cuts the same
block otherwise (`kvstore.wire.assembly`).

Copies of blocks may lie in a node's slab of GPU memory, too: their places are in a page of the
layout of generation pages, one word for each slot of dram, or 0. A word changes before its copy
does, and none has two meanings: it carries the generation of its place. So a copy was read whole if
its word is the same before and after, and the slot of dram still has its generation.

    word = generation of the place << 32 | its first page + 1

Does not cover: copying (`kvstore.kernels`), placing slots (`kvstore.engine.memory.slots`).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Shard, SpaceId
from kvstore.wire.bounds import U64, BlockBytes, Count, Label, Small, Tokens

SIZED_LAYERS_MAX: Final = 1024
"""Most layers of a model whose layers differ in size."""

FULL_ATTENTION: Final = "full attention"
"""Kind of a group of which a leading run of blocks is what an engine can begin with."""
_BEHIND_KIND: Final = ": "

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties of a model, as a rank reports them. Strings are as the engine spells them."""

    model: Label
    """Digest of the model's own configuration (hex)."""
    weights: Label
    """Digest of config.json and, per weights file, of size, header and sampled pieces (hex)."""
    draft: Label
    """Digest of the draft model whose layers lie in the blocks, too (hex); empty: none does."""
    group: Label
    """Kind and digest (hex) of the KV cache group, one of several: `name_group`; empty: the only
    one."""
    dtype: Label
    kv_dtype: Label
    quantization: Label
    attention_backend: Label
    kv_layout: Label
    isa: Label
    """Instruction set in whose order CPU pages are packed; empty on GPUs."""
    block_tokens: Tokens
    hash_block_tokens: Tokens
    layer_count: Count
    """Layers of the whole model, not of the rank."""
    kv_head_count: Count
    """KV heads of the whole model, not of the rank."""
    head_bytes: Annotated[
        tuple[BlockBytes, ...], msgspec.Meta(min_length=1, max_length=SIZED_LAYERS_MAX)
    ]
    """Bytes of one head of one layer in a block: one number where all layers are alike, else one
    for each layer of the model."""
    hash_algorithm: Label
    hash_seed: Label
    kv_format: Label
    """Name that engine versions share which make the same bytes; another version's own name."""


def name_group(kind: str, digest: str) -> str:
    """`Space.group` of a KV cache group with this kind and digest (hex)."""
    return f"{kind}{_BEHIND_KIND}{digest}"


def group_kind(space: Space) -> str:
    """Kind of its KV cache group, for people; empty: the model has one group."""
    return space.group.rpartition(_BEHIND_KIND)[0]


def is_prefix(space: Space) -> bool:
    """Whether its blocks say how long a prefix of a prompt is held. Those of windows and recurrent
    layers have the same keys, and are of use only beside them."""
    return group_kind(space) in ("", FULL_ATTENTION)


def fingerprint(space: Space, *, weights_epoch: str) -> SpaceId:
    """The 32-byte id of `space`.

    `weights_epoch` is empty until weights change in place; then it is a fresh random text, so that
    the engine moves to a space of its own at once.
    """
    return SpaceId(hashlib.sha256(_encoder.encode((space, weights_epoch))).digest())


# ── groups ────────────────────────────────────────────────────────────────────────────────────────
# KV cache groups as ranks report them and sessions number them (ADR 2).
#
# An engine allocates its cache in groups of layers with blocks of their own: one for most models, 2
# to 7 for those that mix full attention with windows or recurrent state. Each group has its own
# space, shards and columns; elsewhere a group is its place in the Hellos of the ranks.

GROUPS_MAX: Final = 16
PER_GROUP: Final = msgspec.Meta(min_length=1, max_length=GROUPS_MAX)
"""A bound of tuples with one element per group."""
GroupIndex = Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache group as one rank holds it."""

    space: Space
    shard: Shard
    block_bytes: BlockBytes


class ShardColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's part in one KV cache group of a session."""

    number: Small = 0
    """Place of the rank's shard in the [n][S] arrays of the group."""
    writes: bool = True
    """False: a lower rank holds the same shard and stores it; this one only loads."""


# ── layout ────────────────────────────────────────────────────────────────────────────────────────

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


def slot_bytes(block_bytes: int) -> int:
    """Bytes that such a block takes in the arena: whole pages, never below the minimum."""
    pages = -(-block_bytes // PAGE_BYTES)
    return max(pages * PAGE_BYTES, SLOT_BYTES_MIN)


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
