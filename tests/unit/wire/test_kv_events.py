"""The form of KV events: vLLM's own decoder reads it, and `kvstore` says the rest."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from kvstore.types import Shard, SpaceId, Tier
from kvstore.wire import kv_events

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
ORIGIN = kv_events.EventOrigin(
    node="n1",
    incarnation="00000000000000ab",
    tenant="team",
    space=SpaceId(bytes(range(32))),
    shard=Shard(0, 4, 0, 2),
    label="llama",
    block_tokens=16,
    keys=b"".join(KEYS),
)


def batch(*, whole_hashes: bool) -> bytes:
    keys = ORIGIN.keys
    hashes = kv_events.whole_hashes(keys) if whole_hashes else kv_events.low_hashes(keys)
    kinds = [
        (Tier.DRAM, kv_events.BlockStored),
        (Tier.FILE, kv_events.BlockStored),
        (Tier.DRAM, kv_events.BlockRemoved),
    ]
    events: list[kv_events.KVEvent] = [
        kv_events.AllBlocksCleared(kvstore=kv_events.PublisherName("n1", "00000000000000ab"))
    ]
    for tier, kind in kinds:
        medium = kv_events.MEDIUM[tier]
        events.append(kind(block_hashes=hashes, medium=medium, kvstore=ORIGIN))
    return kv_events.encode_batch(12.5, events)


def test_an_event_describes_itself() -> None:
    time_s, events, rank = msgspec.msgpack.decode(batch(whole_hashes=False))
    assert (time_s, rank, len(events)) == (12.5, None, 4)
    assert events[0] == {
        "type": "AllBlocksCleared",
        "kvstore": {"node": "n1", "incarnation": "00000000000000ab"},
        "ownership": "kvstore",
    }
    told = [(event["type"], event["medium"]) for event in events[1:]]
    assert told == [("BlockStored", "CPU"), ("BlockStored", "STORAGE"), ("BlockRemoved", "CPU")]
    stored = events[1]
    assert stored["kvstore"] == {
        "node": "n1",
        "incarnation": "00000000000000ab",
        "tenant": "team",
        "space": bytes(range(32)),
        "shard": {"layer_begin": 0, "layer_end": 4, "head_begin": 0, "head_end": 2},
        "label": "llama",
        "block_tokens": 16,
        "keys": b"".join(KEYS),
    }


@pytest.mark.parametrize("whole_hashes", [False, True])
def test_both_forms_of_a_hash(*, whole_hashes: bool) -> None:
    low = [int.from_bytes(key, "big") & (2**64 - 1) for key in KEYS]
    _, events, _ = msgspec.msgpack.decode(batch(whole_hashes=whole_hashes))
    assert events[1]["block_hashes"] == (KEYS if whole_hashes else low)
    assert events[1]["kvstore"]["keys"] == b"".join(KEYS)


@pytest.mark.engine
@pytest.mark.parametrize("whole_hashes", [False, True])
def test_the_engine_reads_it(monkeypatch: pytest.MonkeyPatch, *, whole_hashes: bool) -> None:
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0" if whole_hashes else "1")
    hashes = [maybe_convert_block_hash(BlockHash(key)) for key in KEYS]
    read = msgspec.msgpack.Decoder(KVEventBatch).decode(batch(whole_hashes=whole_hashes))
    assert (read.ts, read.data_parallel_rank) == (12.5, None)
    cleared, in_memory, on_disk, removed = read.events
    assert isinstance(cleared, AllBlocksCleared)
    for event, medium in ((in_memory, "CPU"), (on_disk, "STORAGE")):
        assert event == BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality="LOCAL",
            ownership="kvstore",
        )
    assert removed == BlockRemoved(
        block_hashes=hashes, medium="CPU", locality="LOCAL", ownership="kvstore"
    )
