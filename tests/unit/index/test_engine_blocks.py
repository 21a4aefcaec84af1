"""What an engine says of its own memory, by the keys that everybody uses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.index import engine_feed
from kvstore.index.chain import block_keys
from kvstore.index.engine_feed import EngineBlocks, EngineFeed
from kvstore.types import BlockKey, EngineSource, SpaceId
from kvstore.wire.kv_events import (
    PAYLOAD_BYTES_MAX,
    EngineCleared,
    EngineRemoved,
    EngineStored,
    decode_batch,
)

SIZE, SEED = 4, "vllm-none-hash"
RNG = random.Random(1)
TOKENS = [RNG.randrange(1000) for _ in range(5 * SIZE)]
KEYS = block_keys(TOKENS, block_tokens=SIZE, seed=SEED)
LOW = [int.from_bytes(key[-8:], "big") for key in KEYS]


PLACE = EngineSource(engine="e", rank=0, tenant="t", space=SpaceId(b"s" * 32), hash_seed=SEED)


def blocks(**changes: Any) -> EngineBlocks:
    return EngineBlocks(PLACE, **changes)


def store(
    held: EngineBlocks, begin: int, end: int, *, names: list[Any] | None = None, **changes: Any
) -> list[bytes]:
    of_all: list[Any] = names or list(range(100, 105))
    told: dict[str, Any] = {
        "parent_block_hash": of_all[begin - 1] if begin else None,
        "token_ids": TOKENS[begin * SIZE : end * SIZE],
        "block_size": SIZE,
    }
    return list(held.stored(EngineStored(of_all[begin:end], **(told | changes))))


@pytest.mark.parametrize("names", [KEYS, LOW, [7, 8, 9, 10, 11]], ids=["whole", "low", "any"])
def test_whatever_the_engine_calls_them_they_have_their_keys(names: list[Any]) -> None:
    held = blocks()
    assert store(held, 0, 2, names=names) == KEYS[:2]
    assert store(held, 2, 5, names=names) == KEYS[2:]
    assert held.removed(names[3:]) == KEYS[3:]
    assert held.removed(names[3:]) == [], "once"
    held.cleared()
    assert (len(held), held.removed(names)) == (0, [])


def test_what_cannot_be_named_is_left_out_and_all_behind_it() -> None:
    held = blocks()
    assert store(held, 0, 1, lora_id=1) == []
    assert store(held, 1, 2) == [], "its parent is not known"
    assert store(held, 2, 3, token_ids=TOKENS[:3]) == [], "tokens of less than its blocks"
    assert held.left_out == 3


def test_no_key_is_made_that_there_is_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def chained(*args: Any, **named: Any) -> list[BlockKey]:
        keys = block_keys(*args, **named)
        made.append(len(keys))
        return keys

    monkeypatch.setattr(engine_feed, "block_keys", chained)
    held = blocks(block_count_max=3)
    assert store(held, 0, 5) == KEYS[:3]
    assert store(held, 0, 5) == []
    assert made == [3]
    assert held.left_out == 2 + 5


def test_a_key_is_held_as_long_as_a_name_stands_for_it() -> None:
    held = blocks()
    store(held, 0, 2)
    assert [key in held for key in KEYS[:3]] == [True, True, False]
    store(held, 0, 1, names=[101], token_ids=TOKENS[SIZE : 2 * SIZE])  # as that of another block
    assert [key in held for key in KEYS[:2]] == [True, False]
    held.removed([100])
    assert KEYS[0] not in held
    store(held, 0, 1)
    held.cleared()
    assert KEYS[0] not in held


LOOKAHEAD = Path(__file__).parents[2] / "data" / "lookahead_events.hex"
"""Batches of vLLM 0.33's block pool, whose hashes cover one token behind each block: 13 of TOKENS;
another prompt, with the first 8 of them; the first prompt's blocks were evicted."""


def test_an_engine_that_hashes_ahead_has_the_keys_of_all_others_and_is_told_of() -> None:
    first, second, evicted = map(bytes.fromhex, LOOKAHEAD.read_text().split())
    (event,) = decode_batch(first)
    assert isinstance(event, EngineStored)
    assert event.lookahead_token_ids == [[TOKENS[n]] for n in (4, 8, 12)]
    assert event.block_hashes != LOW[:3], "its own names"
    feed = EngineFeed(PLACE, lambda _: None)
    feed.begin(0)
    assert feed.lookahead_tokens == 0
    feed.heard(0, first, 0)
    assert feed.blocks.keys() == KEYS[:3]
    feed.heard(1, second, 0)
    feed.heard(2, evicted, 0)
    assert [key in feed.blocks for key in KEYS[:3]] == [False, True, False]
    assert feed.lookahead_tokens == 1
    feed.heard(3, payload(STORED), 0)
    assert feed.lookahead_tokens == 0, "it was restarted with that"


def payload(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


STORED = {
    "type": "BlockStored",
    "block_hashes": LOW[:1],
    "parent_block_hash": None,
    "token_ids": TOKENS[:SIZE],
    "block_size": SIZE,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "something": "that comes later",
}


def test_what_vllm_publishes_is_understood() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [KEYS[0]], "medium": "GPU"}
    events = decode_batch(
        payload(STORED, {"type": "Later", "x": 1}, removed, {"type": "AllBlocksCleared"}, rank=3)
    )
    assert decode_batch(payload(rank=None)) == []
    assert [type(event) for event in events] == [EngineStored, EngineRemoved, EngineCleared]
    assert events[0] == EngineStored(
        block_hashes=[*LOW[:1]],
        parent_block_hash=None,
        token_ids=TOKENS[:SIZE],
        block_size=SIZE,
        medium="GPU",
    )
    assert events[1] == EngineRemoved(block_hashes=[KEYS[0]], medium="GPU")


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"type": "BlockStored"}),
        payload(STORED | {"block_hashes": "text"}),
        payload(STORED | {"block_hashes": [b"short"]}),
        payload(STORED | {"lookahead_token_ids": [7]}),
        payload({"type": "BlockRemoved"}),
        payload(7),
        payload({"type": 7}),
        bytes(PAYLOAD_BYTES_MAX + 1),
    ],
)
def test_nonsense_is_said_to_be_that(broken: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(broken)
