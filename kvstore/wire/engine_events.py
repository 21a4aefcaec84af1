"""KV events of an engine, as vLLM publishes them: what its own memory holds.

    message   [topic, sequence number (u64 big-endian), payload]
    replay    [empty, first number] ─▶ [empty, topic, number, payload] …, [empty, empty, END, empty]
    payload   msgpack [time, [event, …], data-parallel rank or nil]
    event     a map with its kind under "type", as vLLM's msgspec structs make it

Hashes are whole (32 bytes) or, by vLLM's default, the low 64 bits as a number. Fields that are not
needed here, and events of kinds that are not known, are left aside.

Ways to be broken: not msgpack; no list of time and events; a known event whose fields are of other
types; hashes of another length. All raise `ProtocolError`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from kvstore.errors import ProtocolError
from kvstore.types import KEY_BYTES
from kvstore.wire.bounds import I64, U32, Label, Sentence, Small, Word

OWN_MEDIA: Final = (None, "GPU")
"""Media of the engine's own memory; its connectors publish events for their own media."""
PAYLOAD_BYTES_MAX: Final = 4 << 20
"""Longest payload that is read: a step of half a million tokens."""
SEQUENCE_BYTES: Final = 8
END: Final = b"\xff" * SEQUENCE_BYTES
"""Stands in the place of a sequence number at the end of a replay."""

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


class EventBatch(msgspec.Struct, frozen=True):
    """The events of one message that are known here, and the data-parallel rank of its engine."""

    events: Annotated[list[EngineEvent], _AsMany]
    rank: Small


def decode_batch(payload: bytes) -> EventBatch:
    """The events of a payload that are known here. Raises ProtocolError."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a batch of {len(payload)} bytes; at most {PAYLOAD_BYTES_MAX}")
    try:
        _, raw, rank = _raw.decode(payload)
        events = [_decoder.decode(event) for event in raw if _is_known(event)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed KV events: {error}") from None
    return EventBatch(events, rank or 0)


def _is_known(event: msgspec.Raw) -> bool:
    kind = _kind.decode(event).get("type")
    return kind is not None and _text.decode(kind) in _KINDS
