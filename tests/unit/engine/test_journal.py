"""The journal and what goes on with it: rows that are believed, order, quotas, marks, disk, and
what engines said of their spaces, without which the next process offers, serves and verifies
nothing."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.engine import state
from kvstore.engine.events import AnswerPeer
from kvstore.engine.memory import journal as journal_module
from kvstore.engine.memory.journal import (
    PAGE_WORDS,
    SPACE_COUNT_MAX,
    Journal,
    JournalUnusable,
    Remembered,
    SpaceTable,
)
from kvstore.types import (
    PAGE_BYTES,
    PAGES_PER_GENERATION,
    SLOT_BYTES_MIN,
    Shard,
    SpaceId,
)
from kvstore.wire.messages import Quiesce, Quiet, Verified
from kvstore.wire.peers import ServeAnswer
from kvstore.wire.space import fingerprint
from tests.kit.engine_check import is_published
from tests.kit.parts_check import published
from tests.sim.world.tape import tape
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    WHOLE,
    Peer,
    arrays,
    attached,
    checksum,
    key,
    keys,
    pairs,
)
from tests.unit.engine.mortal import MortalNode
from tests.unit.engine.peers import serve

SLAB_BYTES = 2 * SLOT_BYTES_MIN
ARENA_BYTES = 4 * SLAB_BYTES

SPACE = SpaceId(fingerprint(SMALL, weights_epoch=""))


def reborn(node: MortalNode) -> MortalNode:
    """The process died between two steps, and another goes on."""
    node.restart(node.memory)
    return node


def moved(node: MortalNode, **changes: int) -> Journal:
    """The node's journal, as somebody with other sizes would see it."""
    sizes = {"arena_bytes": node.config.arena_bytes, "slab_bytes": node.config.slab_bytes}
    return Journal(node.memory, **(sizes | changes))


# ── what is believed ─────────────────────────────────────────────────────────────────────────────


def test_a_row_with_any_bit_flipped_is_a_miss() -> None:
    node, peer = attached(MortalNode())
    peer.seal(1)
    journal = moved(node)
    (word,) = published(journal)
    random = np.random.default_rng(1)
    for column in range(8):
        for bit in random.choice(64, 8, replace=False).tolist():
            row = journal._rows[word]
            row[column] ^= np.uint64(1 << bit)
            found = journal.examine(quotas=[], writers=set(node.registry))
            assert len(found.words) == 0, (column, bit)
            row[column] ^= np.uint64(1 << bit)
    assert journal.examine(quotas=[], writers=set(node.registry)).words.tolist() == [word]


def test_the_same_block_twice_counts_once() -> None:
    node, peer = attached(MortalNode())
    peer.seal(1, 2)
    journal = moved(node)
    one, two = published(journal)
    row = journal._rows[one : one + 1].copy()
    row[:, 7] = journal_module._checks(np.array([two]), row)
    journal._rows[two] = row
    assert journal.examine(quotas=[], writers=set(node.registry)).words.tolist() == [one]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_another_layout_is_not_believed(at: int) -> None:
    node = MortalNode()
    Peer(node).seal(1)
    node.memory[at] += np.uint64(1)
    with pytest.raises(JournalUnusable, match="another version"):
        moved(node).examine(quotas=[], writers=set(node.registry))


def test_a_writer_whom_nobody_knows_makes_all_of_it_unusable() -> None:
    node, peer = attached(MortalNode())
    with pytest.raises(JournalUnusable, match="1 unknown writers"):
        moved(node).examine(quotas=[], writers={peer.scheduler})


def test_slots_of_a_size_that_cannot_be_make_all_of_it_unusable() -> None:
    node = MortalNode()
    Peer(node).seal(1)
    journal = moved(node)
    journal.cut(0, 5)
    with pytest.raises(JournalUnusable, match="of a size that does not exist"):
        journal.examine(quotas=[], writers=set(node.registry))


def flipped(column: NDArray[Any], at: int, bits: list[int]) -> None:
    """Memory fails."""
    for bit in bits:
        column[at] ^= column.dtype.type(1 << bit)


@pytest.mark.parametrize("bits", [[63], [0], [3, 4, 62]])
def test_a_slot_whose_writer_cannot_be_read_is_nobodys(bits: list[int]) -> None:
    node, peer = attached(MortalNode())
    granted = node.granted()
    place = peer.unused()[1]
    word = place[0] // PAGES_PER_GENERATION
    flipped(moved(node)._writers.view(np.uint64), word, bits)
    for _ in range(2):
        reborn(node)
        assert node.quarantined() == granted
    again = Peer(node)
    assert node.quarantined() == 1, "its writer may be anybody"
    for number in range(40):
        again.seal(number)
    assert all(slot != place[0] for slot, _ in again.credits())


def test_no_bit_makes_a_writer_another_or_none() -> None:
    for writer in (0, -1, -2, 1, 2, 7 << 32 | 3):
        code = np.array([journal_module._coded(writer)], np.uint64)
        assert journal_module._decoded(code)[0].tolist() == [writer]
        for bit in range(64):
            numbers, wrong = journal_module._decoded(code ^ np.uint64(1 << bit))
            assert (numbers[0], wrong[0]) == (0, True), (writer, bit)


def test_a_slab_whose_slots_cannot_be_known_is_not_used_again() -> None:
    node, peer = attached(MortalNode(slots=32, slab_slots=4))
    for number in range(12):
        peer.seal(number)
    lost = {block.slot for block in node.engine.blocks() if block.slot < 4 * PAGES_PER_GENERATION}
    flipped(moved(node)._slabs, 0, [12])
    for _ in range(2):
        reborn(node)
        assert len(node.blocks()) == 12 - len(lost), "of the others all is kept"
    again = Peer(node)
    for number in range(100, 140):
        again.seal(number)
    assert all(slot >= 4 * PAGES_PER_GENERATION for slot, _ in again.credits())


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_group_that_there_is_not_is_that_of_all_others(bit: int) -> None:
    node = MortalNode(quotas=(("e", 12 * SLOT_BYTES_MIN),))
    ((slot, _),) = Peer(node, "f").seal(1)
    flipped(moved(node).groups, slot // PAGES_PER_GENERATION, [bit])
    reborn(node)
    assert len(node.blocks()) == 1
    Peer(node, "f").seal(2)


@pytest.mark.parametrize("bit", [0, 57, 63])
def test_a_stamp_that_cannot_be_is_the_oldest(bit: int) -> None:
    node = MortalNode()
    ((slot, _),) = Peer(node).seal(1)
    flipped(moved(node).stamps.view(np.uint64), slot // PAGES_PER_GENERATION, [bit])
    reborn(node)
    Peer(node).seal(2, 3)
    assert len(node.blocks()) == 3
    assert int(node.state.slots.stamps.max()) < 2 * journal_module.STAMP_MAX


def test_much_that_cannot_be_read_is_no_journal() -> None:
    node = MortalNode()
    Peer(node).seal(1)
    moved(node)._writers[:] = 1
    with pytest.raises(JournalUnusable, match="look at this machine's memory"):
        moved(node).examine(quotas=[], writers=set(node.registry))


def test_no_more_is_ready_than_there_is() -> None:
    node = MortalNode()
    node.memory[5] = 1 << 60
    assert moved(node).ready_bytes == node.config.arena_bytes


def test_this_layout_is_the_one_with_this_number() -> None:
    """Another digest: raise LAYOUT_VERSION, and put the new one here."""
    node, peer = attached(MortalNode())
    peer.seal(1, 2)
    peer.hint(1)
    digest = hashlib.sha256(np.asarray(node.memory).tobytes()).hexdigest()
    assert (journal_module.LAYOUT_VERSION, digest[:16]) == (5, "afff9e3bffab4c6a")


def test_names_of_all_lengths_and_a_torn_one(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tape(Journal.size_bytes(8 * SLOT_BYTES_MIN, 2 * SLOT_BYTES_MIN))
    journal = Journal.fresh(arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES, memory=memory)
    again = Journal(memory, arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES)
    for slab in range(ARENA_BYTES // SLAB_BYTES):
        journal.cut(slab, SLOT_BYTES_MIN)
    tenants = ["t", "x" * 255, "é" * 127]
    sums = np.ones((1, 2), np.uint64)
    for number, tenant in enumerate(tenants, start=1):
        block = np.frombuffer(key(number), np.uint64).reshape(1, 4)
        address = (tenant, SPACE, Shard(2**30, 2**31, 2**30, 2**31))
        journal.publish(np.array([number]), number, address, block, sums)
    found = again.examine(quotas=[], writers=set())
    assert [found.addresses[int(id)][0] for id in found.scopes] == tenants
    journal._entries[1, 3] ^= np.uint64(1)
    found = again.examine(quotas=[], writers=set())
    assert found.words.tolist() == [1, 3]


def test_scopes_without_room_are_not_kept_until_there_is_some() -> None:
    journal = Journal.fresh(arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES)
    journal._indexes = [0]
    block = np.frombuffer(key(1), np.uint64).reshape(1, 4)
    sums = np.ones((1, 2), np.uint64)
    journal.publish(np.array([0]), 1, ("a", SPACE, WHOLE), block, sums)
    journal.publish(np.array([1]), 2, ("b", SPACE, WHOLE), block, sums)
    assert published(journal).tolist() == [0]
    assert is_published(journal, np.array([1]), 2, block, sums), "nothing is expected of it"
    journal.retract(np.array([0]))
    journal.forget_scope(1)
    journal.publish(np.array([1]), 2, ("b", SPACE, WHOLE), block, sums)
    assert published(journal).tolist() == [1]


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────


def test_blocks_are_there_again_and_their_readers_are_told_to_verify() -> None:
    node = MortalNode()
    places = Peer(node).seal(1, 2, 3)
    reborn(node)
    peer = Peer(node, "f")
    reply = peer.lease(1, 1, 2, 3, 4)
    again = pairs(reply)
    assert [slot for slot, _ in again] == [slot for slot, _ in places]
    assert all(new > old for (_, new), (_, old) in zip(again, places, strict=True))
    assert reply.checksums == b"".join(checksum(n) for n in (1, 2, 3))
    assert node.engine.counters.blocks_kept == 3


def test_a_kept_block_that_goes_and_soon_comes_back_counts_as_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "CHUNK_BLOCKS", 4)
    node, peer = attached(MortalNode(slots=64, slab_slots=16, credit_blocks_max=4, policy="reuse"))
    for number in range(10):
        peer.seal(number)
    reborn(node)
    peer = Peer(node, "f")
    new = (*range(1000, 1070), *range(10), *range(2000, 2192))
    for at in range(0, len(new), 4):
        peer.seal(*new[at : at + 4])
    assert all(peer.hint(number) == [True] for number in range(10))


def test_what_was_verified_once_is_not_verified_again_but_what_was_not_is() -> None:
    node = MortalNode()
    Peer(node).seal(1, 2)
    reborn(node)
    peer = Peer(node, "f")
    places = pairs(peer.lease(1, 1, 2))
    peer.seal(3)
    node.hear(peer.ranks[0], Verified(*arrays(places[:1])))
    assert peer.lease(2, 1, 2, 3).checksums == bytes(16) + checksum(2) + bytes(16)
    node.hear(peer.ranks[0], Verified(*arrays(places)))
    assert peer.lease(3, 1, 2, 3).checksums == b""
    assert node.engine.counters.blocks_verified == 2
    assert peer.lease(4, 1, with_checksums=True).checksums == checksum(1)


def test_only_who_can_read_a_copy_vouches_for_it() -> None:
    node = MortalNode(slots=64)
    Peer(node).seal(1)
    reborn(node)
    mine, other = Peer(node, "f"), Peer(node, "g", tenant="u")
    (place,) = pairs(mine.lease(1, 1))
    node.hear(other.ranks[0], Verified(*arrays([place])))
    node.hear(mine.ranks[0], Verified(*arrays([(place[0], place[1] - 1)])))
    assert mine.lease(2, 1).checksums == checksum(1)


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_the_order_of_use_is_kept(policy: str) -> None:
    node, peer = attached(MortalNode(slots=8, policy=policy, credit_share=0.25))
    for number in range(6):
        peer.seal(number)
    peer.hint(0)
    peer.hint(1)
    node.end(peer.scheduler, *peer.ranks)
    node.exit(peer.ranks[0])
    reborn(node)
    again = Peer(node, "f")
    for number in range(10, 14):
        again.seal(number)
    left = [n for n in range(6) if again.hint(n) == [True]]
    assert left[:2] == [0, 1], "what was asked for last goes last"
    assert 2 not in left


def test_quotas_count_what_was_kept() -> None:
    quotas = (("e", 12 * SLOT_BYTES_MIN),)
    node = MortalNode(quotas=quotas)
    Peer(node).seal(1, 2)
    held = node.state.slots.quotas.held.tolist()
    reborn(node)
    assert node.state.slots.quotas.held.tolist() == held
    node.quotas = (("another", 0),)
    reborn(node)
    assert node.state.slots.quotas.held.tolist() == [sum(held), 0]


# ── who may write ────────────────────────────────────────────────────────────────────────────────


def test_what_was_granted_is_quarantined_until_its_rank_attaches_again() -> None:
    node, peer = attached(MortalNode())
    granted = node.granted()
    assert granted > 0
    reborn(node)
    assert (node.granted(), node.quarantined()) == (0, granted)
    node.connect(peer.scheduler_hello())
    assert node.quarantined() == granted, "a scheduler writes nothing"
    other = node.connect(peer.rank_hello(0, process="another"))
    assert node.quarantined() == granted, "another process of the same rank"
    node.end(other)
    node.connect(peer.rank_hello(0))
    assert node.quarantined() == 0
    assert peer.ranks[0] in node.released


def test_ranks_that_hold_nothing_are_let_go_of() -> None:
    node, peer = attached(MortalNode())
    peer.drop(*peer.unused())
    node.end(peer.scheduler)
    node.hear(peer.ranks[0], Quiet(node.last(peer.ranks[0], Quiesce).session))
    assert node.granted() == 0
    reborn(node)
    assert peer.ranks[0] in node.released
    assert node.registry == {}


# ── spaces ───────────────────────────────────────────────────────────────────────────────────────


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
