"""KV events in vLLM's own wire form: what a node publishes for indexers outside kvstore, and what
an engine publishes about its own memory.

    message   [topic, sequence number (u64 big-endian), payload]
    replay    [empty, first number] ─▶ [empty, topic, number, payload] …, [empty, empty, END, empty]
    payload   msgpack [time, [event, …], data-parallel rank or nil]: vLLM's KVEventBatch
    event     a map with its kind under "type": BlockStored, BlockRemoved or AllBlocksCleared

**Events of a node.** An event has vLLM's fields and describes itself: `kvstore` says of which node,
incarnation, tenant, space and shard it is, and has the whole 32-byte keys. `block_hashes` has them
in the form in which the node's engines publish theirs (the low 64 bits as numbers, or whole), so
that an index can join the two. The rank is nobody's.

A node knows no tokens: `token_ids` is empty, there is no parent, and `block_size` is 0. vLLM itself
publishes this for blocks whose tokens it does not know, and consumers skip such blocks or join them
by hash; with the real size, those that cut `token_ids` by it would read past its end.

**Events of an engine.** Hashes are whole (32 bytes) or, by vLLM's default, the low 64 bits as a
number. Fields that are not needed here, and events of kinds that are not known, are left aside.

Ways for the latter to be broken: not msgpack; no list of time and events; a known event whose
fields are of other types; hashes of another length. All raise `ProtocolError`.

Covers the forms. Does not cover: sockets, sequence numbers (`kvstore.node.publish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from kvstore.errors import ProtocolError
from kvstore.types import KEY_BYTES, Shard, Tier
from kvstore.wire.bounds import (
    I64,
    U32,
    Hex64,
    Key,
    Label,
    Name,
    Sentence,
    Small,
    Space32,
    Tokens,
    Word,
)

SEQUENCE_BYTES: Final = 8
END: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Instead of a sequence number: of a reply, that it was the last; of a request to a node, that a
snapshot is wanted."""

# ── events of a node ──────────────────────────────────────────────────────────────────────────────

OWNERSHIP: Final = "kvstore"
MEDIUM: Final = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.FILE: "STORAGE"}
"""vLLM's names of tiers."""
BLOCKS_MAX: Final = 1 << 20
"""Most blocks of one event; a batch of ours has far fewer."""

Hashes = Annotated[Sequence[Word | Key], msgspec.Meta(max_length=BLOCKS_MAX)]


class PublisherName(msgspec.Struct, frozen=True):
    """Identity of the publisher. An incarnation knows nothing of another one's events."""

    node: Name
    incarnation: Hex64
    """16 hex digits."""


class EventOrigin(PublisherName, frozen=True, kw_only=True):
    """Tenant, space and shard of the blocks of an event, and their keys."""

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


def low_hashes(keys: bytes) -> list[int]:
    """Low 64 bits of each key: what vLLM publishes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1."""
    low: list[int] = np.frombuffer(keys, ">u8").reshape(-1, KEY_BYTES // 8)[:, -1].tolist()
    return low


def whole_hashes(keys: bytes) -> list[bytes]:
    """Each key: what vLLM publishes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def encode_batch(time_s: float, events: Sequence[KVEvent]) -> bytes:
    """The payload of one message; `time_s` is wall time."""
    return msgspec.msgpack.encode((time_s, events, None))


# ── events of an engine ───────────────────────────────────────────────────────────────────────────

OWN_MEDIA: Final = (None, "GPU")
"""Media of the engine's own memory; its connectors publish events for their own media."""
PAYLOAD_BYTES_MAX: Final = 4 << 20
"""Longest payload that is read: a step of half a million tokens."""

Hash = Word | Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_AsMany = msgspec.Meta(max_length=PAYLOAD_BYTES_MAX)
"""Bound of lists: no payload has room for more elements."""


class EngineStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks of one chain are in a medium now."""

    block_hashes: Annotated[list[Hash], _AsMany]
    parent_block_hash: Hash | None
    token_ids: Annotated[list[I64], _AsMany]
    block_size: I64
    lora_id: I64 | None = None
    medium: Label | None = None
    lora_name: Sentence | None = None
    extra_keys: Annotated[list[Any], _AsMany] | None = None
    group_idx: U32 | None = None
    lookahead_token_ids: Annotated[list[Annotated[list[I64], _AsMany]], _AsMany] | None = None
    """Tokens behind each block that its hash covers too: of vLLM 0.33 with EAGLE or MTP."""


class EngineRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """Blocks are in a medium no more."""

    block_hashes: Annotated[list[Hash], _AsMany]
    medium: Label | None = None
    group_idx: U32 | None = None


class EngineCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine's cache was emptied."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared
_KINDS: Final = frozenset(
    kind.__struct_config__.tag for kind in (EngineStored, EngineRemoved, EngineCleared)
)
_decoder = msgspec.msgpack.Decoder(EngineEvent)
_raw = msgspec.msgpack.Decoder(tuple[float, Annotated[list[msgspec.Raw], _AsMany], Small | None])
_kind = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_text = msgspec.msgpack.Decoder(str)


def decode_batch(payload: bytes) -> list[EngineEvent]:
    """The events of a payload that are known here. Raises ProtocolError."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a batch of {len(payload)} bytes; at most {PAYLOAD_BYTES_MAX}")
    try:
        _, raw, _ = _raw.decode(payload)
        return [_decoder.decode(event) for event in raw if _is_known(event)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed KV events: {error}") from None


def _is_known(event: msgspec.Raw) -> bool:
    kind = _kind.decode(event).get("type")
    return kind is not None and _text.decode(kind) in _KINDS
