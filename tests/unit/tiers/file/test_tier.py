"""The file tier in good times: round trips, restarts, superseding, reclaim; and clears that meet a
full segment, each other, or segments that are still being read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.tier_events import (
    FileGone,
    FileKnown,
    FileMoved,
    FileReclaim,
    FileWritten,
    RecoveryDone,
    WriteFile,
)
from kvstore.tiers.file.catalog import FIXED_BYTES
from kvstore.tiers.file.log_thread import FREE_SEGMENTS_MIN
from kvstore.types import Shard
from kvstore.units import MIB
from kvstore.wire.record import Scope
from tests.unit.tiers.file.conftest import Start
from tests.unit.tiers.file.kit import (
    BLOCK_BYTES,
    PATIENCE_S,
    SCOPE,
    SEGMENT_BYTES,
    Driver,
    FaultyDisk,
    key,
    reopen,
    u64,
)

OTHER = Scope("u", SCOPE.space, SCOPE.shard, BLOCK_BYTES)
ODD = Scope("t", b"o" * 32, Shard(0, 1, 0, 1), 5_000)
"""Fills its last page only in part."""


def test_a_block_that_does_not_fill_its_pages(start: Start) -> None:
    driver = start()
    assert 0 not in driver.write([1, 2, 3], ODD)
    assert driver.read([2, 3, 1], ODD) == [True] * 3
    names = [path for path in driver.config.directory.iterdir() if path.suffix == ".kv"]
    (data,) = [path.read_bytes() for path in names]
    driver.arena[:] = 0xAA
    begin = data.index(key(1)) // 4096 * 4096 + 4096
    assert data[begin + 5_000 : begin + 8_192] == bytes(3_192), "padding is zeros"


@pytest.mark.parametrize("direct", [True, False])
def test_an_orderly_end_loses_nothing(start: Start, tmp_path: Path, *, direct: bool) -> None:
    driver = start(direct=direct)
    for first in range(0, 40, 10):
        places = driver.write(range(first, first + 10))
        assert len(set(places) - {0}) == 10
    driver.write([3], OTHER)
    driver.close()
    again = start(direct=direct)
    assert again.tier.is_direct <= direct
    assert len(again.known) == 41
    assert again.read(range(40)) == [True] * 40
    assert again.read([3], OTHER) == [True]
    known = [event for event in again.seen if isinstance(event, FileKnown)]
    firsts = [u64(event.locations)[0] for event in known if event.scope == SCOPE]
    assert firsts == sorted(firsts, reverse=True), "newest segment first"


def test_checksums_of_the_caller_outrank_those_of_the_record(start: Start) -> None:
    driver = start()
    driver.write([1])
    driver = reopen(driver)
    sums = driver.checksums[driver.known[SCOPE, key(1)]]
    assert driver.read([1], sums=sums) == [True]
    assert driver.read([1], sums=bytes(16)) == [False]


def test_a_record_is_no_other_key_scope_or_place(start: Start) -> None:
    driver = start()
    first, second = driver.write([1, 2])
    assert driver.read([2], places=[first]) == [False]
    assert driver.read([1], OTHER, places=[first]) == [False]
    assert driver.read([1], places=[first + 1]) == [False]
    assert driver.read([1, 2], places=[first, second]) == [True, True]
    gone = [event for event in driver.seen if isinstance(event, FileGone)]
    assert [u64(event.locations) for event in gone] == [[first], [first], [first + 1]]


def test_a_new_location_is_greater_and_supersedes_the_old(start: Start) -> None:
    driver = start()
    (old,) = driver.write([1])
    (new,) = driver.write([1])
    assert new > old
    driver = reopen(driver)
    assert driver.known[SCOPE, key(1)] == new


def keeping(driver: Driver, keep: Callable[[int], bool]) -> Callable[[FileReclaim], None]:
    """Answers Reclaims as an engine does: keeps those that are current and wanted."""

    def answer(event: FileReclaim) -> None:
        kept = []
        for records in event.parts:
            for index, place in enumerate(u64(records.locations)):
                name = (records.scope, records.keys[index * 32 : (index + 1) * 32])
                if driver.known.get(name) != place:
                    continue
                if keep(int.from_bytes(name[1][:4], "big")):
                    kept.append(place)
                else:
                    del driver.known[name]
        driver.reclaim(event.segment, kept)

    return answer


def test_the_oldest_segment_makes_room_and_what_is_kept_moves(start: Start) -> None:
    driver = start(capacity_bytes=4 * MIB)
    driver.on_reclaim = keeping(driver, lambda number: number in (0, 2))
    driver.write(range(3))
    first = driver.known[SCOPE, key(0)]
    for number in range(100, 200):
        driver.write([number])
        assert driver.tier.taken_bytes <= 4 * MIB
    driver.on_reclaim = None
    driver.write([200])  # an answer that was given is acted on before this
    assert driver.known[SCOPE, key(0)] > first
    assert driver.has(0)
    assert driver.has(2)
    assert (SCOPE, key(1)) not in driver.known
    assert any(isinstance(event, FileMoved) for event in driver.seen)
    assert driver.has(199)
    used = sum(p.stat().st_blocks * 512 for p in driver.config.directory.rglob("*"))
    assert used <= 4 * MIB


def test_without_an_answer_nothing_is_written_beyond_the_capacity(start: Start) -> None:
    driver = start(capacity_bytes=4 * MIB)
    jobs = [driver.start_write([number]) for number in range(100)]
    assert all(jobs)
    event = driver.wait(FileReclaim)
    driver.close()
    written = [e for e in driver.seen if isinstance(e, FileWritten)]
    assert len(written) == 100
    assert any(u64(e.locations) == [0] for e in written)
    assert event.segment == 1
    assert driver.tier.taken_bytes <= 4 * MIB


@pytest.mark.parametrize("cleared", [1, 2])
def test_a_write_goes_on_in_the_room_of_segments_that_were_cleared(
    start: Start, cleared: int
) -> None:
    """The engine is asked about the next one, if about any, and does not answer."""
    segment_count, blocks = 10, SEGMENT_BYTES // BLOCK_BYTES - 1
    driver = start(capacity_bytes=segment_count * SEGMENT_BYTES + FIXED_BYTES)
    for number in range(segment_count - FREE_SEGMENTS_MIN):
        driver.write(range(blocks), OTHER if number < cleared else SCOPE)
    driver.void(OTHER.tenant, None)
    assert 0 not in driver.write(range(FREE_SEGMENTS_MIN * blocks))
    assert any(isinstance(event, FileReclaim) for event in driver.seen) == (cleared == 1)


def test_a_write_that_found_no_room_does_not_hold_up_those_after_it(start: Start) -> None:
    driver = start(capacity_bytes=10 * SEGMENT_BYTES + FIXED_BYTES)
    driver.tier._catalog.aside_bytes = 10 * SEGMENT_BYTES  # and nothing that may be reclaimed
    assert driver.write([0]) == [0]
    driver.tier._catalog.aside_bytes = 0
    for _ in range(8):
        assert 0 not in driver.write(range(7))
    driver.wait(FileReclaim)
    assert 0 not in driver.write([0]), "there is room, though the engine has not answered"


@pytest.mark.parametrize(
    ("tenant", "space", "left"),
    [(None, None, 0), ("t", None, 1), (None, SCOPE.space, 0), ("t", SCOPE.space, 1)],
)
def test_a_clear_survives_a_restart(
    start: Start, tenant: str | None, space: bytes | None, left: int
) -> None:
    driver = start()
    driver.write(range(20))
    driver.write([7], OTHER)
    driver.void(tenant, space)
    driver.write([50])
    driver = reopen(driver)
    assert len(driver.known) == left + 1
    assert driver.has(50)
    driver = reopen(driver)
    assert len(driver.known) == left + 1


def test_a_clear_during_recovery_covers_what_is_still_unknown(start: Start, tmp_path: Path) -> None:
    driver = start()
    driver.write(range(20))
    driver.close()
    again = Driver(tmp_path / "store")
    again.void(None, None)
    again.recovered()
    assert not again.known
    again = reopen(again)
    assert not again.known


def test_a_clear_outlives_its_segment(start: Start) -> None:
    """The segment with the void is the only newer one, and is reclaimed while older ones live."""
    driver = start(capacity_bytes=4 * MIB)
    driver.write(range(7))
    driver.void("t", None)
    driver.known.clear()
    driver.on_reclaim = keeping(driver, lambda number: number % 16 == 0)
    for number in range(100, 300):
        driver.write([number])
    driver = reopen(driver, capacity_bytes=4 * MIB)
    assert not any((SCOPE, key(number)) in driver.known for number in range(7))


def test_an_idle_tier_makes_no_file(start: Start) -> None:
    driver = start()
    assert driver.seen == [RecoveryDone()]
    driver.close()
    assert sorted(p.name for p in driver.config.directory.iterdir()) == [
        "lock",
        "quarantine",
        "store",
    ]


def test_a_block_too_large_for_a_segment_is_not_written(start: Start) -> None:
    driver = start()
    large = Scope("t", b"l" * 32, SCOPE.shard, SEGMENT_BYTES)
    job = driver.tier.submit(WriteFile(1, large, key(1), np.zeros(1, np.uint32), bytes(16)))
    assert job
    written = driver.wait(FileWritten)
    assert u64(written.locations) == [0]


# ── clears ───────────────────────────────────────────────────────────────────────────────────────


def test_a_clear_that_does_not_fit_any_more_begins_a_segment(tmp_path: Path) -> None:
    """Whatever was cleared before has left less room: at some number none is left."""
    segments = 0
    for before in range(20):
        driver = Driver(tmp_path / str(before)).recovered()
        driver.write(range(7))
        for _ in range(before):
            driver.void("nobody", None)
        driver.void(SCOPE.tenant, None)
        assert driver.tier.wait_for_voids(PATIENCE_S)
        driver.close()
        sizes = [path.stat().st_size for path in (tmp_path / str(before)).glob("seg-*.kv")]
        assert max(sizes) <= SEGMENT_BYTES, "a segment, its footer included, is no longer than told"
        segments = len(sizes)
        again = Driver(tmp_path / str(before)).recovered()
        assert again.known == {}
        again.close()
        if segments == 2:
            break
    assert segments == 2


def test_many_clears_become_one_of_everything_older(tmp_path: Path) -> None:
    """A cache may forget, never lie: no list of voids grows without bound."""
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1])
    for number in range(9):
        driver.void(f"nobody-{number}", None)
    assert driver.tier.wait_for_voids(PATIENCE_S)
    (void,) = driver.tier._log.writer.voids
    assert (void.tenant, void.space) == (None, None)
    for begin in (10, 20):
        driver.write(range(begin, begin + 7))
    driver.close()
    again = Driver(tmp_path / "store").recovered()
    found = {name for _, name in again.known}
    assert key(1) not in found
    assert {key(number) for number in range(20, 27)} <= found


class HeldRecovery(FaultyDisk):
    """Who reads old segments waits."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name == "file-recovery":
            self.hanging.release()
            assert self.release.wait(PATIENCE_S)
        return super().preadv(fd, buffers, offset)


def test_a_clear_found_late_is_repeated_though_a_segment_was_begun(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1])
    driver.void(SCOPE.tenant, None)
    assert driver.tier.wait_for_voids(PATIENCE_S)
    (void,) = driver.tier._log.writer.voids
    driver.close()
    disk = HeldRecovery()
    driver = Driver(tmp_path / "store", disk=disk)
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    (early,) = driver.write([2])
    assert early
    disk.release.set()
    driver.wait(RecoveryDone)
    late = early
    while late >> 32 == early >> 32:
        (late,) = driver.write([3])
    segment = driver.tier._catalog.get(late >> 32)
    assert segment is not None
    assert segment.found is not None
    assert void in segment.found.voids
    assert driver.read([2, 3]) == [True, True]
