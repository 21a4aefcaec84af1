"""The scrub of the file tier: finds what rots, in its own time, behind everybody else."""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.tier_events import FileGone, FileKnown, FileReclaim, RecoveryDone, Scrubbed
from kvstore.tiers.file import scrub as scrub_module
from kvstore.tiers.file.config import AUTO, AUTO_BYTES_PER_S_MAX, DAY_S, ScrubRate
from kvstore.tiers.file.parts import Parts
from kvstore.types import PAGE_BYTES
from kvstore.units import GIB, KIB, MIB, TIB
from tests.unit.tiers.file.conftest import Start
from tests.unit.tiers.file.kit import BLOCK_BYTES, PATIENCE_S, Driver, FaultyDisk, key, u64

FAST = ScrubRate(1 << 40, daily=False)


@pytest.fixture
def start(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A tier whose scrub begins pass after pass."""
    monkeypatch.setattr(scrub_module, "PASS_PAUSE_S", 0.01)
    return partial(start, scrub=FAST)


def flip(driver: Driver, place: int, *, at: int = PAGE_BYTES + 99) -> None:
    """A bit of the record at a place changes, on the medium."""
    name = f"seg-{place >> 32:08x}.kv"
    with (driver.config.directory / name).open("r+b") as file:
        file.seek((place & 0xFFFF_FFFF) * PAGE_BYTES + at)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def gone(driver: Driver) -> list[tuple[bytes, list[int], bool]]:
    return [(e.keys, u64(e.locations), e.damaged) for e in driver.seen if isinstance(e, FileGone)]


def whole_passes(driver: Driver, count: int) -> list[Scrubbed]:
    """Wait for so many passes that begin from now on; what was said until then."""
    driver.take()
    said = sum(isinstance(e, Scrubbed) and e.pass_ended for e in driver.seen)

    def ended() -> int:
        return sum(isinstance(e, Scrubbed) and e.pass_ended for e in driver.seen)

    # The pass under way may have gone past what a test just did.
    driver.wait(Scrubbed, lambda e: e.pass_ended and ended() > said + count)
    return [e for e in driver.seen if isinstance(e, Scrubbed)]


@pytest.mark.parametrize("at", [5, 60, PAGE_BYTES, PAGE_BYTES + BLOCK_BYTES - 1])
@pytest.mark.parametrize("count", [3, 20])
def test_a_flipped_bit_is_found_without_anybody_asking(start: Start, count: int, at: int) -> None:
    """In the segment that is still written to as in those that are closed."""
    driver = start()
    places = driver.write(range(count))
    flip(driver, places[1], at=at)
    bad = driver.wait(Scrubbed, lambda e: e.bad_key != b"")
    assert bad.bad_key == key(1)
    said = whole_passes(driver, 2)
    assert gone(driver) == [(key(1), [places[1]], True)], "once, however often it is seen"
    assert sum(e.bad_key != b"" for e in said) == 1
    assert sum(e.blocks for e in said) >= 2 * count
    assert sum(e.size_bytes for e in said) >= 2 * count * BLOCK_BYTES


def test_a_pass_counts_only_if_all_was_known_when_it_began(
    start: Start, disk: FaultyDisk, tmp_path: Path
) -> None:
    first = start()
    first.write(range(20))
    first.close()
    recovers = threading.Event()
    real = disk.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "file-recovery":
            recovers.set()
            assert disk.release.wait(PATIENCE_S)
        return real(fd, buffers, offset)

    disk.preadv = preadv  # type: ignore[method-assign]
    driver = Driver(tmp_path / "store", disk=disk, scrub=FAST)
    try:
        assert recovers.wait(PATIENCE_S)
        threading.Event().wait(0.3)  # passes over nothing would have ended
        disk.release.set()
        driver.wait(RecoveryDone)
        driver.wait(Scrubbed, lambda e: e.pass_ended)
        kinds = [type(event) for event in driver.seen]
        last_known = len(kinds) - 1 - kinds[::-1].index(FileKnown)
        ended = [n for n, e in enumerate(driver.seen) if isinstance(e, Scrubbed) and e.pass_ended]
        assert ended[0] > last_known
        said = [e for e in driver.seen[: ended[0] + 1] if isinstance(e, Scrubbed)]
        assert sum(e.blocks for e in said) == 20
    finally:
        driver.close()


def test_what_is_good_is_left_alone(start: Start) -> None:
    driver = start(capacity_bytes=2 * 1024 * KIB, segment_bytes=256 * KIB)
    driver.on_reclaim = lambda event: driver.reclaim(event.segment, [])
    for begin in range(0, 60, 5):  # segments are closed and reclaimed all the while
        driver.write(range(begin, begin + 5))
    said = whole_passes(driver, 2)
    assert any(isinstance(event, FileReclaim) for event in driver.seen)
    assert gone(driver) == []
    assert all(e.bad_key == b"" for e in said)
    assert sum(e.blocks for e in said) > 0


def test_what_was_cleared_is_nobodys_loss(start: Start) -> None:
    driver = start()
    (place,) = driver.write([1])
    driver.void(None, None)
    assert driver.tier.wait_for_voids(PATIENCE_S)
    whole_passes(driver, 1)
    flip(driver, place)
    whole_passes(driver, 2)
    assert gone(driver) == []


def test_a_bad_sector_is_a_bad_record_and_no_more(start: Start, disk: FaultyDisk) -> None:
    driver = start()
    places = driver.write([1, 2, 3])
    bad_begin = (places[1] & 0xFFFF_FFFF) * PAGE_BYTES

    def fail(offset: int) -> OSError | None:
        return OSError(errno.EIO, "EIO") if offset == bad_begin else None

    disk.fail["preadv"] = fail
    driver.wait(Scrubbed, lambda e: e.bad_key != b"")
    assert gone(driver) == [(key(2), [places[1]], True)]


def test_a_failing_disk_is_not_scrubbed_and_loses_nothing_more(
    start: Start, disk: FaultyDisk
) -> None:
    driver = start(failures_max=2)
    driver.write(range(10))
    disk.fail["preadv"] = lambda _: OSError(errno.EIO, "EIO")
    driver.wait(Scrubbed, lambda e: e.bad_key != b"")
    pause = threading.Event()
    while driver.tier.breakers[0].value == "closed":
        pause.wait(0.01)
    for _ in range(10):  # a piece that was begun before may end after
        calls = len(disk.calls)
        pause.wait(0.5)  # it looks whether all is well several times
        if len(disk.calls) == calls:
            break
    assert len(disk.calls) == calls, "it goes on and on"
    driver.take()
    assert len(gone(driver)) <= 2


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_it_waits_while_others_want_the_disk(
    start: Start, disk: FaultyDisk, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a load nor a store that waits or runs ever finds another piece begun before it."""
    driver = start(scrub=None, reader_count=1)
    driver.write(range(10))
    turns: list[bool] = []
    scrub = _by_hand(driver, lambda: turns.append(True))
    disk.hang.add(call)
    job = driver.start_read([1]) if call == "preadv" else driver.start_write([77])
    assert job
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    thread = threading.Thread(target=scrub.run_pass, daemon=True)
    thread.start()
    pause = threading.Event()
    pause.wait(0.3)
    assert turns == [], "nothing was read"
    disk.go_on()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert turns


def _by_hand(driver: Driver, on_read: Callable[[], None] = lambda: None) -> scrub_module.Scrub:
    """A scrub of the driver's tier that says when it reads."""
    tier = driver.tier

    class Watched(FaultyDisk):
        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            on_read()
            return super().preadv(fd, buffers, offset)

    watched = Watched()
    catalog = copy.copy(tier._catalog)
    catalog._disk = watched
    parts = Parts(
        *(tier._config, driver.clock, watched, tier._directory, catalog),
        *(tier._outbox, tier._health, tier._lock, threading.Event()),
    )
    return scrub_module.Scrub(FAST, parts, tier._log, tier._reads)


def test_a_load_waits_for_one_piece_at_most(start: Start, disk: FaultyDisk) -> None:
    """The scrub hangs in the kernel with one piece; a load goes past it."""
    driver = start(reader_count=1)
    driver.write(range(10))
    hangs = threading.Event()
    real = disk.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "file-scrub":
            hangs.set()
            assert disk.release.wait(PATIENCE_S)
        return real(fd, buffers, offset)

    disk.preadv = preadv  # type: ignore[method-assign]
    assert hangs.wait(PATIENCE_S)
    assert driver.read([1, 2, 3]) == [True, True, True]


def test_it_reads_no_faster_than_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    driver = start(scrub=None)
    driver.write(range(10))
    scrub = _by_hand(driver)
    scrub._rate = ScrubRate(BLOCK_BYTES, daily=False)
    monkeypatch.setattr(scrub, "_wait", waited.append)
    scrub.run_pass()
    assert sum(waited) >= 10, "a second for each of ten blocks"


def test_the_end_of_the_tier_is_the_end_of_the_scrub(start: Start) -> None:
    driver = start(scrub=ScrubRate(1, daily=False))
    driver.write(range(10))
    driver.close()
    assert not any(thread.is_alive() for thread in driver.tier._threads)


def test_it_tells_as_it_goes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_module, "TELL_BYTES", 2 * BLOCK_BYTES)
    driver = start(scrub=None)
    driver.write(range(5))
    _by_hand(driver).run_pass()
    driver.take()
    said = [e for e in driver.seen if isinstance(e, Scrubbed)]
    assert [(e.blocks, e.pass_ended) for e in said] == [(2, False), (2, False), (1, True)]


def test_a_segment_that_somebody_took_away_is_passed_over(start: Start) -> None:
    driver = start(scrub=None, failures_max=1)
    driver.write(range(10))
    min(driver.config.directory.glob("seg-*.kv")).unlink()
    _by_hand(driver).run_pass()
    driver.take()
    assert [e.blocks for e in driver.seen if isinstance(e, Scrubbed)] == [3]
    assert gone(driver) == []
    assert driver.tier.breakers[0].value == "closed"


@pytest.mark.parametrize(("direct", "forgotten"), [(True, 0), (False, 5)])
def test_what_it_read_through_the_page_cache_does_not_stay_there(
    start: Start, monkeypatch: pytest.MonkeyPatch, *, direct: bool, forgotten: int
) -> None:
    pages: list[int] = []
    monkeypatch.setattr(
        scrub_module, "forget_cached", lambda _fd, begin, _size: pages.append(begin)
    )
    driver = start(scrub=None)
    driver.write(range(5))
    scrub = _by_hand(driver)
    scrub._direct = direct
    scrub.run_pass()
    assert len(set(pages)) == forgotten


# ── how fast it reads ────────────────────────────────────────────────────────────────────────────


def pass_s(rate: ScrubRate, held_bytes: int) -> float:
    return rate.seconds(held_bytes, held_bytes=held_bytes)


def test_a_rate_is_kept_whatever_is_held() -> None:
    rate = ScrubRate(64 * MIB, daily=False)
    assert rate.seconds(16 * MIB, held_bytes=0) == 0.25
    assert rate.seconds(16 * MIB, held_bytes=TIB) == 0.25


@pytest.mark.parametrize(
    ("held_bytes", "expected_s"),
    [
        (512 * GIB, DAY_S),
        (16 * TIB, 16 * TIB / AUTO_BYTES_PER_S_MAX),  # as fast as it may, which is six days
        (64 * MIB, 64),  # a megabyte a second is no burden
    ],
)
def test_a_pass_takes_a_day_within_bounds(held_bytes: int, expected_s: float) -> None:
    assert pass_s(AUTO, held_bytes) == pytest.approx(expected_s)
