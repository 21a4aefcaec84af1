"""Clears that meet a full segment, each other, or segments that are still being read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.tier_events import RecoveryDone
from tests.unit.tiers.file.kit import PATIENCE_S, SCOPE, SEGMENT_BYTES, Driver, FaultyDisk, key


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
