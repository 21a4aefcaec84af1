"""A start on a disk that cannot be read for a while, or not in one place."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.tier_events import FileReclaim, Suspended
from kvstore.tiers.file import discovery
from kvstore.tiers.file.directory import Directory, cannot_be_read
from kvstore.tiers.file.disk import Disk
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB
from kvstore.wire.segment import SEGMENT_BYTES_LIMIT
from tests.unit.tiers.file.kit import PATIENCE_S, SCOPE, Driver, OpenFails, key, reopen

STORED = range(20)
"""More than two segments."""


class BadPlaces(Disk):
    """Reads of some files fail, so many times; `first` reads of a file are let through."""

    def __init__(self, fails: dict[str, int], *, first: dict[str, int] | None = None) -> None:
        self.fails = fails
        self.first = first or {}
        self.failed = threading.Semaphore(0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if self.first.get(name, 0) > 0:
            self.first[name] -= 1
        elif self.fails.get(name, 0) > 0:
            self.fails[name] -= 1
            self.failed.release()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store with STORED in it."""
    driver = Driver(tmp_path / "store").recovered()
    for begin in range(0, len(STORED), 5):
        driver.write(STORED[begin : begin + 5])
    driver.close()
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(discovery, "DISK_PAUSE_S", 0.0)


def fail_stat(patch: pytest.MonkeyPatch, what: object, code: int, *, times: int = 1 << 30) -> None:
    """`os.stat` of this name or path fails, so many times."""
    look, left = os.stat, [times]

    def fail(path: Any, **more: Any) -> os.stat_result:
        if path == what and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return look(path, **more)

    patch.setattr(os, "stat", fail)


def segments(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("seg-*.kv"))


def put_aside(store: Path) -> list[str]:
    return [path.name for path in (store / "quarantine").iterdir()]


def found(driver: Driver) -> list[int]:
    return [number for number in STORED if (SCOPE, key(number)) in driver.known]


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("opens", [True, False])
def test_a_file_that_cannot_be_looked_at_stops_no_start(
    store: Path, which: int, monkeypatch: pytest.MonkeyPatch, *, opens: bool
) -> None:
    name = segments(store)[which]
    with monkeypatch.context() as patch:
        fail_stat(patch, name, errno.EUCLEAN)
        disk = Disk() if opens else OpenFails(name, errno.EUCLEAN)
        driver = Driver(store, disk=disk).recovered()
    if opens:
        assert found(driver) == list(STORED), "what it holds was never asked of its name"
    else:
        assert len(STORED) - 7 <= len(found(driver)) < len(STORED), "the others are known"
    assert all(driver.read(found(driver)))
    assert name in segments(store), "nothing is deleted because its size was not known"
    assert driver.write([99]) != [0]
    driver.close()
    again = Driver(store).recovered()
    assert found(again) == list(STORED)
    assert again.has(99)


def test_a_dead_file_that_cannot_be_looked_at_stops_no_start(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = store / "dead-0123456789abcdef.kv"
    dead.touch()
    with monkeypatch.context() as patch:
        fail_stat(patch, dead.name, errno.EUCLEAN)
        Driver(store).recovered().close()
    assert dead.exists()
    Driver(store).recovered().close()
    assert not dead.exists()


def test_a_file_that_proves_too_long_is_put_aside(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = segments(store)[0]
    os.truncate(store / name, SEGMENT_BYTES_LIMIT + PAGE_BYTES)
    fail_stat(monkeypatch, name, errno.EUCLEAN, times=1)
    Driver(store).recovered()
    assert [aside.startswith(f"{name}.too-long.") for aside in put_aside(store)] == [True]


@pytest.mark.parametrize("shared", [False, True])
def test_a_directory_that_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    more: dict[str, Any] = {"shared": shared, "node": "a" if shared else ""}
    Driver(tmp_path / "store", **more).close()

    def fail_names(_directory: Directory, *, keep_bytes: int) -> dict[int, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        if shared:
            fail_stat(patch, tmp_path / "store" / "store", errno.EIO)
        else:
            patch.setattr(Directory, "segments", fail_names)
        with pytest.raises(
            ConfigError, match=r"cannot read .*: Input/output error; see the kernel's"
        ):
            Driver(tmp_path / "store", **more)
    Driver(tmp_path / "store", **more).recovered().close()


def test_a_directory_of_another_user_is_no_disk_to_repair(store: Path) -> None:
    denied = cannot_be_read(store, PermissionError(errno.EACCES, "Permission denied"))
    assert str(denied).endswith("denied; give --file a directory that this user may write to")


@pytest.mark.parametrize("which", [0, -1])
def test_an_error_that_passes_costs_nothing(store: Path, which: int) -> None:
    names = segments(store)
    driver = Driver(store, disk=BadPlaces({names[which]: 2})).recovered()
    assert found(driver) == list(STORED)
    assert put_aside(store) == []
    assert driver.write([99]) != [0]
    again = reopen(driver)
    assert again.read([*STORED, 99]) == [True] * (len(STORED) + 1)
    assert set(names) < set(segments(store)), "what came later has a name of its own"


def test_one_that_stays_costs_that_file_and_is_told(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = segments(store)[1]
    driver = Driver(store, disk=BadPlaces({name: 1 << 30})).recovered()
    assert [aside.startswith(f"{name}.unreadable-5.") for aside in put_aside(store)] == [True]
    assert 0 < len(found(driver)) < len(STORED)
    assert all(driver.read(found(driver)))
    assert f"{store / name} cannot be read, though the disk can be: Input/output error" in (
        caplog.messages
    )


def test_a_disk_that_is_away_is_waited_for(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = segments(store)
    # The newest is asked for once more than it would be if nothing else could be read.
    fails = dict.fromkeys(names, 2) | {names[-1]: 5, "store": 2}
    disk = BadPlaces(fails, first={"store": 1})
    driver = Driver(store, disk=disk).recovered()
    assert found(driver) == list(STORED)
    assert put_aside(store) == []
    assert caplog.messages[0].startswith(f"{store} cannot be read at present: Input/output error")


def test_who_waits_for_the_disk_can_be_stopped(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "DISK_PAUSE_S", 10 * PATIENCE_S)
    names = segments(store)
    always = dict.fromkeys([*names, "store"], 1 << 30)
    disk = BadPlaces(always, first={"store": 1})
    driver = Driver(store, disk=disk)
    assert all(disk.failed.acquire(timeout=PATIENCE_S) for _ in range(5))
    driver.close()
    assert segments(store)[: len(names)] == names
    assert put_aside(store) == []
    again = Driver(store).recovered()
    assert found(again) == list(STORED)


class Reclaiming:
    """A full store, the oldest segment of which is asked about and goes."""

    def __init__(self, store: Path) -> None:
        self.store, self.disk = store, BadPlaces({})
        self.driver = Driver(store, disk=self.disk, capacity_bytes=4 * MIB).recovered()
        self.driver.on_reclaim = self.let_go
        self.asked: list[str] = []
        self.oldest = segments(store)[0]

    def let_go(self, event: FileReclaim) -> None:
        self.asked.append(f"seg-{event.segment:08}.kv")
        self.driver.reclaim(event.segment, [])

    def fill(self) -> list[bool]:
        """Whether each of many blocks was written."""
        return [self.driver.write([number]) != [0] for number in range(100, 140)]

    def is_there(self) -> bool:
        return self.oldest in segments(self.store)


def test_a_segment_that_is_to_go_is_not_deleted_unread_while_the_disk_is_away(store: Path) -> None:
    full = Reclaiming(store)
    full.disk.fails = dict.fromkeys([full.oldest, "store"], 1 << 30)
    assert not full.fill()[-1], "no room"
    assert full.is_there()
    assert full.driver.wait(Suspended).writes_only
    full.disk.fails.clear()
    full.driver.clock.advance_ms(60_000)
    assert full.driver.write([200]) != [0]
    assert not full.is_there()
    assert full.oldest in full.asked, "what it holds is asked about, if it can be known"


@pytest.mark.parametrize("times", [1, 1 << 30])
def test_a_segment_that_cannot_be_read_goes_and_is_offered_before_if_the_disk_came_back(
    store: Path, times: int
) -> None:
    full = Reclaiming(store)
    full.disk.fails = {full.oldest: times}  # and the directory can be read right after
    full.fill()
    assert not full.is_there()
    assert (full.asked[0] == full.oldest) == (times == 1)
    assert (full.oldest in full.asked) == (times == 1)


def test_what_was_cleared_stays_away_when_the_note_of_it_is_read_late(store: Path) -> None:
    driver = Driver(store).recovered()
    driver.void(None, None)
    assert driver.tier.wait_for_voids(PATIENCE_S)
    driver.close()
    newest = segments(store)[-1]
    again = Driver(store, disk=BadPlaces({newest: 3})).recovered()
    assert found(again) == []
