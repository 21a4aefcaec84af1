"""Names that are not what they should be, or go meanwhile; descriptors are not kept for ever; the
last note is there after a restart, or an older one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.file import catalog as catalog_module
from kvstore.tiers.file.catalog import Catalog, Segment
from kvstore.tiers.file.directory import NOTE_BYTES_MAX, Directory, segment_name
from kvstore.types import PAGE_BYTES
from kvstore.wire.segment import SegmentHead
from tests.unit.tiers.file.kit import Driver, FaultyDisk, reopen

SEGMENT = segment_name(1)


@pytest.fixture
def directory(tmp_path: Path, disk: FaultyDisk) -> Iterator[Directory]:
    made = Directory(tmp_path, disk, direct=False)
    yield made
    made.close()


def test_a_quarantine_that_is_a_file_becomes_a_directory(tmp_path: Path, disk: FaultyDisk) -> None:
    Directory(tmp_path, disk, direct=False).close()
    (tmp_path / "quarantine").rmdir()
    (tmp_path / "quarantine").touch()
    Directory(tmp_path, disk, direct=False).close()
    assert (tmp_path / "quarantine").is_dir()


def test_a_note_that_cannot_be_read_is_none(directory: Directory, disk: FaultyDisk) -> None:
    directory.keep_note(b"a" * PAGE_BYTES)
    disk.fail["preadv"] = lambda _: OSError(errno.EIO, "broken")
    assert directory.note() == b""
    del disk.fail["preadv"]
    assert directory.note() == b"a" * PAGE_BYTES


def test_a_segment_that_went_by_itself_needs_nothing(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.remove(SEGMENT)
    assert caplog.messages == []


def test_what_cannot_be_moved_stays_and_is_mentioned(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    path = directory.path / SEGMENT
    directory.put_aside(SEGMENT, "damaged", keep_bytes=1 << 20)
    directory.hide(SEGMENT)
    path.mkdir()
    directory.remove(SEGMENT)
    assert path.is_dir()
    assert caplog.messages == [
        f"{path} is moved aside: damaged",
        f"{path} stays where it is: No such file or directory",
        f"{path} cannot be renamed: No such file or directory",
        f"{path} cannot be deleted: Is a directory",
    ]


def test_a_quarantine_that_was_taken_away_takes_nothing(directory: Directory) -> None:
    (directory.path / "quarantine" / "old").write_bytes(bytes(PAGE_BYTES))
    assert directory.aside_bytes() == PAGE_BYTES
    (directory.path / "quarantine").rename(directory.path / "looked at")
    assert directory.aside_bytes() == 0


class Opened:
    """A catalog of so many segments, each with its number as its only byte."""

    def __init__(self, path: Path, disk: FaultyDisk, count: int) -> None:
        self.folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.catalog = Catalog(disk, capacity_bytes=1 << 20, direct=False)
        self.segments = []
        for number in range(1, count + 1):
            (path / segment_name(number)).write_bytes(bytes([number]))
            head = SegmentHead(bytes(16), bytes(16), number)
            segment = Segment(number, head, segment_name(number), self.folder_fd, 1)
            self.segments.append(segment)
            self.catalog.add(segment)

    def first_byte(self, segment: Segment) -> int:
        with self.catalog.reading(segment) as file:
            return os.pread(file.fd, 1, 0)[0]


def test_only_so_many_segments_are_kept_open_and_none_is_closed_under_a_reader(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_OPEN_MAX", 2)
    its = Opened(tmp_path, disk, 5)
    with its.catalog.reading(its.segments[0]) as held:
        assert [its.first_byte(segment) for segment in its.segments[1:]] == [2, 3, 4, 5]
        assert len(_descriptors_in(tmp_path)) == 4, "the folder, the one being read, the last two"
        assert os.pread(held.fd, 1, 0) == b"\1"
    its.catalog.close()
    os.close(its.folder_fd)
    assert _descriptors_in(tmp_path) == []


def test_no_descriptor_is_closed_while_others_wait_for_the_catalog(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one of a deleted file frees its extents, and the node's loop asks the catalog."""
    monkeypatch.setattr(catalog_module, "_OPEN_MAX", 2)
    its, close, were_held = Opened(tmp_path, disk, 4), os.close, []

    def look(fd: int) -> None:
        were_held.append(its.catalog._lock.locked())
        close(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", look)
        with its.catalog.reading(its.segments[0]):
            its.catalog.remove(1)
        for segment in its.segments[1:]:
            its.first_byte(segment)
        its.catalog.remove(3)
        its.catalog.close()
    assert were_held == [False] * 4, "a reader's last, one too many, removed, at the end"
    os.close(its.folder_fd)


def _descriptors_in(folder: Path) -> list[str]:
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [name for name in names if name.startswith(str(folder))]


# ── the node's note ──────────────────────────────────────────────────────────────────────────────


PAGE = 4096


def test_the_last_note_is_there_after_a_restart(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    assert driver.tier.note == b""
    for letter in (b"a", b"b"):
        driver.tier.keep_note(letter * PAGE)
    driver = reopen(driver)
    assert driver.tier.note == b"b" * PAGE
    driver.close()
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "learned",
        "lock",
        "quarantine",
        "store",
    ]


def test_a_note_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    disk = FaultyDisk()
    driver = Driver(tmp_path / "store", disk=disk).recovered()
    driver.tier.keep_note(b"a" * PAGE)
    driver = reopen(driver, disk=disk)
    disk.fail["fsync"] = lambda _: OSError(errno.EIO, "broken")
    driver.tier.keep_note(b"b" * PAGE)
    driver.close()
    del disk.fail["fsync"]
    again = Driver(tmp_path / "store").recovered()
    assert again.tier.note == b"a" * PAGE


def test_a_note_that_is_no_file_is_none(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.close()
    (tmp_path / "store" / "learned").mkdir()
    again = Driver(tmp_path / "store").recovered()
    assert again.tier.note == b""
    again.tier.keep_note(b"a" * PAGE)


def test_a_directory_with_nothing_but_a_note_is_taken(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "learned").write_bytes(b"a" * 100)
    driver = Driver(tmp_path / "store").recovered()
    assert driver.tier.note == b"a" * 100


def test_no_more_is_read_of_a_note_than_one_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "learned").write_bytes(b"a" * (NOTE_BYTES_MAX + PAGE))
    assert Driver(tmp_path / "store").recovered().tier.note == b"a" * NOTE_BYTES_MAX
