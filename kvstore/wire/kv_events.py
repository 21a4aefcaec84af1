"""KV events: what a node holds, in vLLM's own wire form, for indexers outside kvstore.

    message   [topic, sequence number (u64 big-endian), payload]
    payload   msgpack [time, [event, …], nil]: vLLM's KVEventBatch; the rank is nobody's
    event     a map: vLLM's fields of BlockStored, BlockRemoved or AllBlocksCleared, and `kvstore`

An event describes itself: `kvstore` says of which node, incarnation, tenant, space and shard it is,
and has the whole 32-byte keys. `block_hashes` has them in the form in which the node's engines
publish theirs (the low 64 bits as numbers, or whole), so that an index can join the two.

A node knows no tokens: `token_ids` is empty, there is no parent, and `block_size` is 0. vLLM itself
publishes this for blocks whose tokens it does not know, and consumers skip such blocks or join them
by hash; with the real size, those that cut `token_ids` by it would read past its end.

Covers the form. Does not cover: sockets, sequence numbers (`kvstore.node.publish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from kvstore.types import KEY_BYTES, Shard, Tier
from kvstore.wire.bounds import Hex64, Key, Label, Name, Space32, Tokens, Word

OWNERSHIP: Final = "kvstore"
MEDIUM: Final = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.FILE: "STORAGE"}
"""vLLM's names of tiers."""
SEQUENCE_BYTES: Final = 8
END: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Instead of a sequence number: of a reply, that it was the last; of a request, that a snapshot is
wanted."""
BLOCKS_MAX: Final = 1 << 20
"""Most blocks of one event; a batch of ours has far fewer."""

Hashes = Annotated[Sequence[Word | Key], msgspec.Meta(max_length=BLOCKS_MAX)]


class PublisherName(msgspec.Struct, frozen=True):
    """Identity of the publisher. An incarnation knows nothing of another one's events."""

    node: Name
    incarnation: Hex64
    """16 hex digits."""


class EventOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Node, tenant, space and shard of the blocks of an event, and their keys."""

    node: Name
    incarnation: Hex64
    tenant: Name
    space: Space32
    shard: Shard
    label: Label
    block_tokens: Tokens
    keys: Annotated[bytes, msgspec.Meta(max_length=BLOCKS_MAX * KEY_BYTES)]
    """32 bytes each, in the order of `block_hashes`."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A tier holds these blocks now."""

    block_hashes: Hashes
    medium: Label
    kvstore: EventOrigin
    parent_block_hash: None = None
    token_ids: tuple[()] = ()
    block_size: Literal[0] = 0
    lora_id: None = None
    lora_name: None = None
    locality: Label = "LOCAL"
    ownership: Label = OWNERSHIP


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A tier holds these blocks no more."""

    block_hashes: Hashes
    medium: Label
    kvstore: EventOrigin
    locality: Label = "LOCAL"
    ownership: Label = OWNERSHIP


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All earlier events of this publisher are void."""

    kvstore: PublisherName
    ownership: Label = OWNERSHIP


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

_encoder = msgspec.msgpack.Encoder()


def block_event(
    origin: EventOrigin, *, tier: Tier, stored: bool, whole_hashes: bool
) -> BlockStored | BlockRemoved:
    """One event about the keys of `origin`."""
    hashes = _whole(origin.keys) if whole_hashes else low_hashes(origin.keys)
    kind = BlockStored if stored else BlockRemoved
    return kind(block_hashes=hashes, medium=MEDIUM[tier], kvstore=origin)


def low_hashes(keys: bytes) -> list[int]:
    """The low 64 bits of each key: what vLLM publishes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""
    low: list[int] = np.frombuffer(keys, ">u8").reshape(-1, KEY_BYTES // 8)[:, -1].tolist()
    return low


def _whole(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def encode_batch(time_s: float, events: Sequence[KVEvent]) -> bytes:
    """The payload of one message; `time_s` is wall time."""
    return _encoder.encode((time_s, events, None))
