"""The file tier on a disk that fails, fills up, hangs or answers late."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.tier_events import FileGone, FileLate, FileRead, FileWritten, Resumed, Suspended
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.parts import Health
from tests.unit.tiers.file.conftest import Start
from tests.unit.tiers.file.kit import (
    BLOCK_BYTES,
    PATIENCE_S,
    SCOPE,
    Driver,
    FaultyDisk,
    OpenFails,
    failing,
    key,
    reopen,
    u64,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store with block 1."""
    driver = Driver(tmp_path / "store")
    driver.write([1])
    driver.close()
    return tmp_path / "store"


def test_memory_that_is_not_there_says_nothing_against_the_disk(
    start: Start, disk: FaultyDisk
) -> None:
    driver = start(failures_max=2)
    assert all(driver.write([1, 2]))
    disk.fail["preadv"] = failing(errno.EFAULT)
    for _ in range(5):
        assert driver.read([1, 2]) == [False, False]
    disk.fail["pwritev"] = failing(errno.EFAULT)
    for number in range(3, 8):
        assert driver.write([number]) == [0]
    disk.fail.clear()
    assert all(driver.write([9])), "it was never given up"
    assert driver.read([1, 2, 9]) == [True] * 3, "and no record was called damaged"
    assert not [event for event in driver.seen if isinstance(event, Suspended | FileGone)]


def test_what_was_read_is_verified_without_a_touch_of_the_arena(tmp_path: Path) -> None:
    looks: list[tuple[int, int]] = []
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1, 2])
    driver.close()

    def look(begin: int, into: memoryview) -> None:
        looks.append((begin, len(into)))  # the other slot's pages were given back since
        into[:] = bytes(len(into)) if begin else driver.arena[: len(into)].tobytes()

    again = Driver(tmp_path / "store", look=look).recovered()
    driver.arena = again.arena
    assert again.read([1, 2]) == [True, False]
    assert sorted(looks) == [(0, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES)]


def test_a_failed_write_costs_its_blocks_and_begins_a_new_segment(
    start: Start, disk: FaultyDisk
) -> None:
    driver = start()
    (first,) = driver.write([1])
    disk.fail["pwritev"] = failing(errno.EIO, times=1)
    assert driver.write([2]) == [0]
    (third,) = driver.write([3])
    assert third >> 32 > first >> 32
    assert driver.read([1, 3]) == [True, True]
    again = reopen(driver)
    assert again.read([1, 3]) == [True, True]
    assert not again.has(2)


def test_a_failed_sync_is_read_back(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    driver.write([1, 2])
    disk.fail["fsync"] = failing(errno.EIO, times=1)
    data = next(driver.config.directory.glob("seg-*.kv"))
    with data.open("r+b") as file:  # what a kernel that dropped a dirty page leaves
        file.seek(3 * 4096)
        file.write(b"lost")
    driver.void("nobody", None)
    driver.wait(FileGone)
    assert [e.keys for e in driver.seen if isinstance(e, FileGone)] == [key(1)]
    assert driver.read([2]) == [True]
    assert 0 not in driver.write([3])


def test_what_a_failed_sync_lost_is_not_named_by_the_write_that_filled_the_segment(
    start: Start, disk: FaultyDisk
) -> None:
    driver = start()
    disk.fail["fsync"] = failing(errno.EIO, times=1)
    disk.fail["preadv"] = failing(errno.EIO, times=1)
    places = driver.write(range(1, 9))  # one more than a segment holds
    assert [e.keys for e in driver.seen if isinstance(e, FileGone)] == [key(1)]
    assert places[0] == 0, "it would be there again, after it was said to be gone"
    assert 0 not in places[1:7]
    assert driver.read([2]) == [True]


def test_no_room_stops_writes_only(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    driver.write([1])
    disk.fail["pwritev"] = failing(errno.ENOSPC)
    assert driver.write([2]) == [0]
    assert driver.wait(Suspended).writes_only
    assert not driver.start_write([3])
    assert driver.read([1]) == [True]
    disk.fail.clear()
    driver.clock.advance_ms(1_001)
    assert 0 not in driver.write([4])
    assert driver.wait(Resumed).writes_only


def test_a_failing_disk_is_left_alone_and_probed(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    places = driver.write([1, 2, 3, 4])
    disk.fail["preadv"] = failing(errno.EIO)
    for number, place in zip((1, 2, 3), places, strict=False):
        assert driver.read([number], places=[place]) == [False]
    assert not driver.wait(Suspended).writes_only
    calls = len(disk.calls)
    assert not driver.start_read([4])
    assert not driver.start_write([5])
    assert len(disk.calls) == calls, "refused at once"
    driver.clock.advance_ms(1_001)
    assert driver.read([3]) == [False], "one probe"
    assert not driver.start_read([4])
    driver.clock.advance_ms(1_001)
    assert not driver.start_read([4]), "the cool-down doubled"
    disk.fail.clear()
    driver.clock.advance_ms(1_000)
    assert driver.read([4]) == [True]
    assert not driver.wait(Resumed).writes_only


def test_one_bad_sector_does_not_cost_its_neighbours(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    places = driver.write([1, 2, 3])
    bad = (places[1] & 0xFFFF_FFFF) * 4096

    def fail(offset: int) -> OSError | None:
        is_whole_run = offset == (places[0] & 0xFFFF_FFFF) * 4096 and not tried
        tried.append(offset)
        return OSError(errno.EIO, "EIO") if is_whole_run or offset == bad else None

    tried: list[int] = []
    disk.fail["preadv"] = fail
    assert driver.read([1, 2, 3]) == [True, False, True]


def test_a_hung_read_is_late_and_ends_when_it_ends(start: Start, disk: FaultyDisk) -> None:
    driver = start(reader_count=1)
    driver.write([1, 2])
    disk.hang.add("preadv")
    hung = driver.start_read([1])
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    waiting = driver.start_read([2])
    driver.clock.advance_ms(2_001)
    for _ in range(2):
        driver.tier.expire()
    assert driver.wait(FileLate).job == hung
    assert driver.wait(FileRead).job == waiting, "what had not begun ends at once"
    assert not any(isinstance(e, FileRead) and e.job == hung for e in driver.seen)
    disk.go_on()
    assert driver.wait(FileRead, lambda e: e.job == hung).good == b"\1"
    assert sum(isinstance(event, FileLate) for event in driver.seen) == 1, "late once"


def test_a_hung_write_is_late_and_those_behind_it_end(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    disk.hang.add("pwritev")
    hung = driver.start_write([1])
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    waiting = driver.start_write([1])
    driver.clock.advance_ms(10_001)
    for _ in range(2):
        driver.tier.expire()
    assert driver.wait(FileLate).job == hung
    ended = driver.wait(FileWritten)
    assert (ended.job, u64(ended.locations)) == (waiting, [0])
    disk.go_on()
    assert u64(driver.wait(FileWritten, lambda e: e.job == hung).locations) != [0]
    assert sum(isinstance(event, FileLate) for event in driver.seen) == 1, "late once"


def test_the_end_waits_for_a_hung_disk_no_longer_than_told(start: Start, disk: FaultyDisk) -> None:
    driver = start(close_deadline_ms=50)
    disk.hang.add("pwritev")
    driver.start_write([1])
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    driver.close()
    assert any(thread.is_alive() for thread in driver.tier._threads)
    disk.go_on()
    for thread in driver.tier._threads:
        thread.join(PATIENCE_S)
    driver.tier._catalog.close()
    driver.tier._directory.close()
    driver.tier._outbox.close()


def test_every_failing_call_in_turn(tmp_path: Path) -> None:
    """Fail the first, second, third … call of a small life: no exception, no wrong byte."""
    for code in (errno.EIO, errno.ENOSPC):
        for turn in range(200):
            disk = FaultyDisk()
            driver = Driver(tmp_path / f"{code}-{turn}", disk=disk).recovered()
            begin = len(disk.calls)

            def fail(
                _offset: int, *, disk: FaultyDisk = disk, at: int = begin + turn, code: int = code
            ) -> OSError | None:
                return OSError(code, "injected") if len(disk.calls) == at + 1 else None

            disk.fail = dict.fromkeys(("open", "preadv", "pwritev", "fsync"), fail)
            for numbers in ([1, 2], [3], range(10, 16)):
                driver.write(numbers)
            driver.void("nobody", None)
            driver.read([n for n in (1, 2, 3, 10) if (SCOPE, key(n)) in driver.known])
            driver.close()
            is_over = len(disk.calls) <= begin + turn
            again = Driver(tmp_path / f"{code}-{turn}").recovered()
            found = [int.from_bytes(name[:4], "big") for _, name in again.known]
            assert len(again.read(found)) == len(found)
            again.close()
            if is_over:
                break
        else:
            pytest.fail("the sweep did not come to an end")


def test_a_damaged_identity_on_a_full_disk_does_not_make_a_stranger(store: Path) -> None:
    """Found by the seeded world: no node started there ever again."""
    (store / "store").write_bytes(bytes(4096))
    with pytest.raises(ConfigError, match="No space left"):
        Driver(store, disk=OpenFails("store.new", errno.ENOSPC))
    driver = Driver(store).recovered()
    assert driver.write([2]) != [0]


@pytest.mark.parametrize("times", [1, 1 << 30])
def test_a_file_that_cannot_be_closed_well_ends_no_writing(
    start: Start, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As on a file system of another machine, where a quota is noticed so late."""
    driver, close, left = start(), os.close, [times]

    def fail(fd: int) -> None:
        is_segment = Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("seg-")
        close(fd)
        if is_segment and left[0]:
            left[0] -= 1
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    driver.write([1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        disk.fail["pwritev"] = failing(errno.EIO, times=1)
        assert driver.write([2]) == [0]
        assert 0 not in driver.write(range(3, 13)), "a segment is filled and closed"
        assert driver.read([1, *range(3, 13)]) == [True] * 11
        driver.close()
    assert left[0] < times, "no close failed"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_store_on_a_disk_that_takes_no_more_files_is_served(store: Path, code: int) -> None:
    again = Driver(store, disk=OpenFails("probe", code)).recovered()
    assert again.has(1)


def test_a_full_disk_without_a_quarantine_is_served(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator looked at what was in it, and deleted all."""
    (store / "quarantine").rmdir()
    (store / "seg-00000009.kv").write_bytes(bytes(8192))

    def fail(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.file.directory.os.mkdir", fail)
        again = Driver(store).recovered()
    assert again.has(1)
    assert (store / "seg-00000009.kv").exists(), "there is nowhere to put it"
    again.close()
    Driver(store).recovered().close()
    assert len(list((store / "quarantine").iterdir())) == 1


def test_an_identity_that_cannot_be_opened_for_a_moment_stays(store: Path) -> None:
    with pytest.raises(ConfigError, match="Too many open files"):
        Driver(store, disk=OpenFails("store", errno.EMFILE))
    driver = Driver(store).recovered()
    assert driver.has(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_keeps_no_slot(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start(reader_count=1)
    driver.write([1])

    def broken(*_arguments: object, **_more: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("kvstore.tiers.file.reader.Reader.read", broken)
    monkeypatch.setattr("kvstore.tiers.file.writer.Writer.append", broken)
    assert driver.read([1]) == [False]
    assert driver.write([2]) == [0]
    assert not driver.start_write([3])
    told = driver.wait(Suspended)
    assert "a bug of the node" in told.reason, "an operator reads it in /healthz"


def test_reads_are_bounded_by_bytes_and_count_and_those_waiting_at_the_end_are_misses(
    start: Start, disk: FaultyDisk
) -> None:
    driver = start(
        reader_count=1, queued_bytes_max=3 * 64 * 1024, queued_jobs_max=2, close_deadline_ms=50
    )
    for number in (1, 2, 3, 4):
        driver.write([number])
    disk.hang.add("preadv")
    assert not driver.start_read([1, 2, 3, 4]), "too many bytes"
    hung = driver.start_read([1])
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    waiting = driver.start_read([2])
    assert waiting
    assert not driver.start_read([3]), "too many jobs"
    closing = threading.Thread(target=driver.tier.close)
    closing.start()
    assert driver.wait(FileRead).job == waiting
    assert driver.wait(FileRead).good == b"\0"
    disk.go_on()
    closing.join(PATIENCE_S)
    driver.take()
    assert [e.job for e in driver.seen if isinstance(e, FileRead)] == [waiting, hung]


def test_what_waits_behind_a_hung_write_is_done_before_the_end(
    tmp_path: Path, start: Start, disk: FaultyDisk
) -> None:
    driver = start()
    driver.write([1])
    disk.hang.add("pwritev")
    driver.start_write([2])
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    behind = driver.start_write([3])
    driver.void(None, None)
    closing = threading.Thread(target=driver.tier.close)
    closing.start()
    pause = threading.Event()
    while not driver.tier._reads.is_closed:
        pause.wait(0.01)
    disk.go_on()
    closing.join(PATIENCE_S)
    driver.take()
    (written,) = [e for e in driver.seen if isinstance(e, FileWritten) and e.job == behind]
    assert u64(written.locations) != [0]
    again = Driver(tmp_path / "store").recovered()
    assert again.known == {}


def test_what_can_neither_be_synced_nor_read_back_is_gone(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    driver.write([1, 2])
    disk.fail["fsync"] = failing(errno.EIO, times=1)
    disk.fail["preadv"] = failing(errno.EIO, times=2)
    driver.void("nobody", None)
    driver.wait(FileGone, lambda e: e.keys == key(2))
    assert [e.keys for e in driver.seen if isinstance(e, FileGone)] == [key(1), key(2)]


def test_a_tier_that_cannot_be_made_gives_its_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.file.tier.Catalog", _no_memory)
        with pytest.raises(MemoryError):
            Driver(tmp_path / "store")
    Driver(tmp_path / "store").recovered().close()


def _no_memory(*_arguments: object, **_more: object) -> None:
    raise MemoryError


def test_a_deleted_segment_makes_room_unless_writes_fail_otherwise() -> None:
    config = FileConfig(Path("store"), 1 << 30, failures_max=1)
    full = OSError(errno.ENOSPC, "full")
    health = Health(config)
    assert health.room_again() == [], "there was room"
    health.failed_writing(0, full)
    assert health.room_again() == [Resumed(writes_only=True)]
    health.failed_writing(0, full)
    health.failed_writing(0, None)
    assert health.room_again() == []
    assert not health.allows_write(0)
