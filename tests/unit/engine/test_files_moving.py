"""What is written through to disk, what comes back, and who waits for it."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvstore.engine.events import Clear
from kvstore.engine.memory import residency as residency_module
from kvstore.engine.moves import files as files_module, writes as writes_module
from kvstore.engine.moves.jobs import ReadPace
from kvstore.engine.state import Off
from kvstore.tier_events import FileKnown, FileRead, VoidFile
from kvstore.types import SLOT_BYTES_MIN, SpaceId, Tier
from kvstore.wire.messages import LeaseAsk, LeaseMore, LeaseRelease
from kvstore.wire.record import Scope
from kvstore.wire.space import shard_bytes
from tests.unit.engine.disk import SPACE, DiskNode, gone, known, moved, places
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    WHOLE,
    Peer,
    attached,
    checksum,
    keys,
    pairs,
    short,
)


def on_disk_only(*numbers: int, slots: int = 32) -> tuple[DiskNode, Peer]:
    """A peer whose node holds these blocks on disk."""
    node, peer = attached(DiskNode(slots=slots))
    node.step(known(*numbers))
    return node, peer


def test_a_read_ends_though_its_scope_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "SCOPE_COUNT_MAX", 2)
    node, peer = on_disk_only(1)
    peer.lease(1, 1)
    (read,) = node.reads
    node.end(peer.scheduler, *peer.ranks)
    node.step(Clear(None, None))
    for number in range(3):
        node.step(known(50 + number, space=SpaceId(bytes([number]) * 32)))
    assert SPACE not in {space for _, space, _ in node.state.residency.scopes()}
    node.state.off["u", SPACE] = Off(None)
    node.step(FileRead(read.job, b"\x01"))
    assert node.engine.tiers()[0].blocks == 0
    assert not node.engine.files._reads.values()


def test_jobs_of_a_node_that_runs_for_months_are_known_by_their_numbers() -> None:
    """Lookups of a cluster draw from the same numbers."""
    node, peer = on_disk_only(1, 2)
    numbers, files = itertools.count(1 << 31), node.engine.files
    files._reads._numbers = files.writes._jobs._numbers = numbers
    assert peer.lease(1, 1).promoting == 1
    [read] = node.reads
    node.step(FileRead(read.job, b"\x01"))
    assert node.blocks()[short(1)] == "dram+file"
    peer.seal(3)
    node.write_all()
    assert node.blocks()[short(3)] == "dram+file"


# ── to disk ──────────────────────────────────────────────────────────────────────────────────────


def test_what_is_sealed_is_written_once() -> None:
    node, peer = attached(DiskNode())
    sealed = peer.seal(1, 2)
    (write,) = node.writes
    assert write.scope == Scope("t", SPACE, WHOLE, peer.rank_hello(0).groups[0].block_bytes)
    assert write.keys == keys(1, 2)
    assert write.slots.tolist() == [slot for slot, _ in sealed]
    assert write.checksums == checksum(1) + checksum(2)
    node.write_all()
    assert node.blocks() == {short(1): "dram+file", short(2): "dram+file"}
    peer.seal(1)
    assert node.writes == [], "known already"
    assert node.engine.counters.file_blocks_written == 2


def test_a_block_that_was_cleared_while_it_was_written_is_not_taken_for_written() -> None:
    node, peer = attached(DiskNode())
    peer.seal(1)
    node.step(Clear(None, None))
    assert node.voids == [VoidFile(None, None)]
    node.write_all()
    assert node.blocks() == {}


def test_no_more_than_a_quarter_of_the_arena_is_on_its_way_to_disk() -> None:
    node, peer = attached(DiskNode(slots=32, credit_share=0.5))
    peer.seal(*range(12))
    assert sum(len(write.keys) // 32 for write in node.writes) == 8
    assert node.engine.counters.file_writes_dropped == 4
    node.write_all()
    peer.seal(20)
    assert len(node.writes) == 1


def test_large_blocks_go_in_several_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes_module, "JOB_BYTES_MAX", 2 * SLOT_BYTES_MIN)
    monkeypatch.setattr(files_module, "READ_BYTES", 2 * SLOT_BYTES_MIN)
    node, peer = attached(DiskNode())
    peer.seal(1, 2, 3)
    assert [len(write.keys) // 32 for write in node.writes] == [2, 1]
    node.write_all()
    node.step(known(11, 12, 13, at=5000))
    peer.lease(1, 11, 12, 13)
    assert [len(read.keys) // 32 for read in node.reads] == [2, 1]


def test_no_more_is_read_at_once_than_the_disk_can_bring_in_time() -> None:
    node, peer = on_disk_only(*range(1, 9))
    peer.lease(1, 1)
    node.now_ns += 10**9  # a block a second
    node.read_all()
    assert peer.lease(2, *range(2, 9)).promoting == 7, "and yet all of it will come"
    assert [len(read.keys) // 32 for read in node.reads] == [2], "four of half a second's size"
    node.now_ns += 4 * 10**9
    node.answer(node.reads[0])
    assert peer.more.promoting == 5
    assert [len(read.keys) // 32 for read in node.reads] == [1], (
        "one at least, or it is never measured"
    )
    node.hear(peer.scheduler, LeaseRelease([2]))
    node.read_all()
    assert node.reads == [], "what nobody waits for any more stays on disk"
    assert peer.hint(*range(5, 9)) == [True] * 4
    assert [len(read.keys) // 32 for read in node.reads] == [1]


def test_a_block_computed_anew_replaces_the_record_of_the_old_one() -> None:
    """The same key, computed twice, may differ in its last bits."""
    node, peer = on_disk_only(1)
    node.step(msgspec.structs.replace(known(2), checksums=checksum(99)))
    peer.seal(2)
    assert node.blocks() == {short(1): "file", short(2): "dram"}
    assert len(node.writes) == 1
    node.write_all()
    assert node.blocks() == {short(1): "file", short(2): "dram+file"}


# ── from disk ────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_of_what_is_on_disk_grows_when_it_comes() -> None:
    node, peer = on_disk_only(1, 2, 3)
    reply = peer.lease(5, 1, 2, 3, 4, with_checksums=True)
    assert (reply.slots, reply.promoting) == (b"", 3)
    assert reply.promoting_ms >= 1
    (read,) = node.reads
    assert read.keys == keys(1, 2, 3)
    assert read.locations == places(1, 3)
    assert node.count(peer.scheduler, LeaseMore) == 0
    node.read_all()
    grown = peer.more
    assert (grown.lease, grown.promoting) == (5, 0)
    assert [slot for slot, _ in pairs(grown)] == read.slots.tolist()
    assert grown.checksums == checksum(1) + checksum(2) + checksum(3)
    assert node.blocks() == dict.fromkeys(map(short, (1, 2, 3)), "dram+file")
    assert node.engine.tiers()[0].slots_leased == 3
    node.hear(peer.scheduler, LeaseRelease([5]))
    assert node.engine.tiers()[0].slots_leased == 0


def test_a_hint_starts_the_promotion_and_the_lease_joins_it() -> None:
    node, peer = on_disk_only(1, 2)
    assert peer.hint(1, 2) == [True, True]
    assert len(node.reads) == 1
    assert peer.lease(1, 1, 2).promoting == 2
    assert len(node.reads) == 1, "the same blocks are not read twice"
    node.read_all()
    assert len(pairs(peer.more)) == 2


@pytest.mark.parametrize("in_dram", [0, 3])
@pytest.mark.parametrize("records_per_s", [1, 5, 64])
def test_all_shards_of_a_block_come_before_any_of_the_next(
    records_per_s: int, in_dram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of engines with two ranks, on a disk that reads few records in a second."""
    monkeypatch.setattr(files_module, "READ_AHEAD_NS", records_per_s * SLOT_BYTES_MIN)
    monkeypatch.setattr(ReadPace, "ns_per_byte", lambda *_: 1.0)
    node = DiskNode(slots=256, block_count_max=1024)
    for rank, shard in enumerate(HALVES):
        scope = Scope("t", SPACE, shard, shard_bytes(SMALL, shard))
        sums = b"".join(checksum(number, rank) for number in range(20))
        node.step(FileKnown(scope, keys(*range(20)), places(1 + 100 * rank, 20), sums))
    peer = Peer(node, shards=HALVES)
    if in_dram:
        peer.store(*range(in_dram))
        assert all(peer.hint(*range(20)))
        scopes = {read.scope.shard for read in node.reads}
        assert scopes == {*HALVES}, "of the first block that is not in dram, too"
    reply = peer.lease(1, *range(20))
    assert reply.promoting == 20 - in_dram
    came = 0
    while node.reads:
        node.answer(node.reads[0])
        sent = [each for each in node.sent[peer.scheduler] if isinstance(each, LeaseMore)]
        came = sum(len(pairs(each)) for each in sent) // len(HALVES)
    assert came == 20 - in_dram


def test_a_read_that_failed_is_not_repeated_for_the_lease_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files_module, "READ_BYTES", 2 * SLOT_BYTES_MIN)
    node, peer = on_disk_only(1, 2, 3, 4)
    peer.lease(1, 1, 2, 3, 4)
    first, second = node.reads
    node.answer(first, [True, False])
    assert (len(pairs(peer.more)), peer.more.promoting) == (1, 0)
    assert node.reads == [second]


def test_a_late_read_frees_the_waiting_at_once_and_the_slots_when_it_ends() -> None:
    node, peer = on_disk_only(1)
    peer.lease(1, 1)
    (read,) = node.reads
    node.be_late(read)
    assert (peer.more.slots, peer.more.promoting) == (b"", 0)
    assert node.engine.tiers()[0].slots_granted > 0
    held = int((node.state.slots.writer == -1).sum())
    assert held == 1, "the kernel may still write there"
    node.be_late(read)
    assert node.engine.counters.file_reads_late == 1
    node.answer(read)
    assert int((node.state.slots.writer == -1).sum()) == 0
    assert node.blocks() == {short(1): "dram+file"}, "late, but good"


def test_a_read_that_never_ends_keeps_nobody_from_the_disk() -> None:
    node, peer = on_disk_only(1, 2, 3)
    peer.lease(1, 1)
    (hung,) = node.reads
    node.now_ns += 2 * 10**9
    node.be_late(hung)
    node.now_ns += 3600 * 10**9
    reply = peer.lease(2, 2, 3)
    assert (reply.promoting, reply.promoting_ms) == (2, 1)
    node.answer(node.reads[1])
    assert len(pairs(peer.more)) == 2
    node.answer(hung)
    assert node.engine.files.pace.begun_bytes == 0


def test_a_read_that_nobody_waited_for_makes_the_disk_no_slower() -> None:
    node, peer = on_disk_only(1, 2, 3)
    pace = node.engine.files.pace
    for number, is_awaited in ((1, True), (2, False), (3, True)):
        before = pace.measured_ns_per_mib
        peer.lease(number, number)
        if not is_awaited:
            node.hear(peer.scheduler, LeaseRelease([number]))
        node.now_ns += number * 10**8
        node.read_all()
        assert (pace.measured_ns_per_mib > before) is is_awaited


@pytest.mark.parametrize(("on_disk", "in_dram"), [((1, 2), ()), ((2,), (1,)), ((9,), (1, 2))])
def test_a_question_that_names_a_key_twice_moves_nothing(
    on_disk: tuple[int, ...], in_dram: tuple[int, ...]
) -> None:
    """Two slots for one block would tear the tables apart."""
    node, peer = on_disk_only(*on_disk)
    if in_dram:
        peer.seal(*in_dram)
        node.write_nothing()
    assert peer.hint(1, 2, 1) == [True] * 3
    node.hear(peer.scheduler, LeaseAsk(lease=1, keys=keys(1, 2, 1)))
    assert node.reads == []
    assert node.hangups[peer.scheduler] == "a LeaseAsk that names a key twice"
    assert node.engine.leases() == []


def test_a_lease_whose_number_is_used_again_gets_nothing_of_the_old_one() -> None:
    node, peer = on_disk_only(1, 2)
    peer.seal(7)
    node.write_nothing()
    peer.lease(1, 1, 2)
    node.hear(peer.scheduler, LeaseRelease([1]))
    assert len(pairs(peer.lease(1, 7))) == 1
    node.read_all()
    assert node.count(peer.scheduler, LeaseMore) == 0
    assert node.engine.tiers()[0].slots_leased == 1


def test_a_block_read_keeps_the_checksum_it_was_verified_against() -> None:
    node, peer = on_disk_only(1)
    peer.lease(1, 1)
    node.step(gone(1))
    node.step(msgspec.structs.replace(known(1, at=9), checksums=checksum(99)))
    node.read_all()
    node.hear(peer.scheduler, LeaseRelease([1]))
    assert peer.lease(2, 1, with_checksums=True).checksums == checksum(1)
    assert node.blocks() == {short(1): "dram"}, "the other copy's record is another block"


def test_what_comes_from_disk_counts_as_hit() -> None:
    node, peer = on_disk_only(1, 2, 3)
    peer.lease(1, 1, 2, 3, 4)
    node.answer(node.reads[0], [True, True, False])
    counters = node.engine.counters
    assert counters.leased_bytes == 2 * SLOT_BYTES_MIN
    node.step(msgspec.structs.replace(gone(3, 7), damaged=True), gone(3, 7))
    assert counters.file_blocks_damaged == 2


# ── reclaiming ───────────────────────────────────────────────────────────────────────────────────


def test_a_reclaimed_segment_keeps_what_was_asked_for() -> None:
    node, peer = on_disk_only(*range(1, 9))
    node.hear(peer.scheduler, LeaseAsk(lease=1, keys=keys(3)))
    node.read_all()
    node.tick()
    node.tick(ms=700_000)
    assert node.reclaim(*range(1, 9)) == places(3, 1)
    assert node.engine.ages[Tier.FILE].counts == [0, 0, 7, 0, 0, 0], "written 700 s ago"
    assert node.blocks() == {short(3): "dram+file"}
    node.step(moved(3, old=3, new=77))
    assert node.reclaim(3, segment=5, at=77) == b"", "nobody asked again"
    assert node.blocks() == {short(3): "dram"}


def test_of_two_places_the_later_written_one_counts() -> None:
    node, peer = on_disk_only(1)
    foreign = (1 << 63) + 5
    for at, expected in ((9, 9), (4, 9), (foreign, 9), (11, 11)):
        node.step(known(1, at=at))
        assert node.state.residency.file[0] == expected
    node.step(known(2, at=foreign), known(2, at=foreign + 1), known(2, at=3))
    assert peer.hint(2) == [True]
    assert node.reads[-1].locations == places(3, 1)


def test_every_slot_of_dram_keeps_its_row() -> None:
    node, peer = attached(DiskNode(slots=8, block_count_max=10))
    node.step(known(*range(100, 200)))
    assert len(node.blocks()) == 2
    for number in range(20):
        peer.seal(number)
        node.write_all()
    assert len(pairs(peer.lease(1, 19))) == 1
