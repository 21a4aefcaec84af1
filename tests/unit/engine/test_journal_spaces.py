"""What engines said of their spaces outlives the process: without them the next one offers, serves
and verifies what was kept."""

from __future__ import annotations

import msgspec
import numpy as np

from kvstore.engine.events import AnswerPeer
from kvstore.engine.memory.journal import (
    PAGE_WORDS,
    SPACE_COUNT_MAX,
    Journal,
    Remembered,
    SpaceTable,
)
from kvstore.types import PAGE_BYTES, Shard, SpaceId
from kvstore.wire.peers import ServeAnswer
from kvstore.wire.space import fingerprint
from tests.unit.engine.harness import HALVES, SMALL, Peer, attached, keys
from tests.unit.engine.mortal import MortalNode
from tests.unit.engine.peers import serve

SPACE = SpaceId(fingerprint(SMALL, weights_epoch=""))
WHOLE = Shard(0, SMALL.layer_count, 0, SMALL.kv_head_count)


def reborn(node: MortalNode) -> MortalNode:
    node.restart(node.memory)
    return node


def test_without_an_engine_what_was_kept_is_offered_and_served() -> None:
    node, peer = attached(MortalNode(), shards=HALVES)
    peer.store(1, 2)
    tenant = peer.tenant
    offered = set(node.offered)
    assert len(offered) == 2
    reborn(node)
    assert node.offered == offered, "by the shards that its engine had"
    asked = node.step(serve(1, 1, 1, 2, tenant=tenant))
    (said,) = [said for said in asked if isinstance(said, AnswerPeer)]
    assert isinstance(said.its, ServeAnswer)
    assert len(said.its.slots) == 4 * 2 * len(HALVES)


def test_it_is_scrubbed_and_explained_too() -> None:
    node, peer = attached(MortalNode())
    peer.store(1)
    reborn(node)
    assert len(node.engine.scrubs.sealed(0).blocks) == 1
    (hashing,) = node.engine.explain.hashings()
    assert (hashing.space, hashing.block_tokens) == (SPACE.hex(), SMALL.hash_block_tokens)
    (found,) = node.engine.explain.prefix(peer.tenant, SPACE, keys(1))
    assert found.blocks == 1


def test_an_entry_with_any_bit_flipped_is_none_and_its_space_waits_for_an_engine() -> None:
    node, peer = attached(MortalNode())
    peer.store(1)
    c = node.config
    journal = Journal(node.memory, arena_bytes=c.arena_bytes, slab_bytes=c.slab_bytes)
    entries = journal.spaces._entries
    (row,) = np.flatnonzero(entries[:, 0])
    end = 16 + int(entries[row, 1])  # digest and length, then so many bytes; zeros fill the page
    random = np.random.default_rng(5)
    for word in range(-(-end // 8)):
        bit = np.uint64(1) << np.uint64(random.integers(min(64, 8 * (end - 8 * word))))
        entries[row, word] ^= bit
        assert journal.spaces.found() == ()
        entries[row, word] ^= bit
    entries[row, 1] ^= np.uint64(1)
    reborn(node)
    assert not node.offered
    Peer(node)
    assert len(node.offered) == 1


def table() -> SpaceTable:
    return SpaceTable(np.zeros(SPACE_COUNT_MAX * PAGE_WORDS, np.uint64))


def remember(spaces: SpaceTable, number: int, *, shards: int = 1) -> None:
    spaces.remember(("t", SpaceId(bytes([number]) * 32)), str(number), [WHOLE] * shards, SMALL)


def numbers(spaces: SpaceTable) -> set[int]:
    return {int(each.label) for each in SpaceTable(spaces._entries.reshape(-1)).found()}


def test_of_more_than_there_is_room_for_the_latest_are_kept() -> None:
    spaces = table()
    for number in range(SPACE_COUNT_MAX):
        remember(spaces, number)
    remember(spaces, 0)
    remember(spaces, 100)
    assert numbers(spaces) == {0, 100, *range(2, SPACE_COUNT_MAX)}


def test_what_does_not_fit_a_page_is_not_kept_and_harms_nobody() -> None:
    spaces = table()
    remember(spaces, 1)
    remember(spaces, 2, shards=PAGE_BYTES // 4)
    assert numbers(spaces) == {1}


def test_any_space_that_an_engine_may_tell_of_has_room() -> None:
    longest = msgspec.structs.replace(
        SMALL,
        **{name: "x" * 255 for name, kind in SMALL.__annotations__.items() if kind == "Label"},
    )
    body = msgspec.msgpack.encode(
        Remembered("x" * 64, bytes(32), "x" * 64, ((0, 1, 0, 1),) * 8, longest)
    )
    assert len(body) < PAGE_BYTES - 16
