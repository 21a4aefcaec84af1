"""The node's note beside the segments: the last one is there after a restart, or an older one."""

from __future__ import annotations

import errno
from pathlib import Path

from kvstore.tiers.file.directory import NOTE_BYTES_MAX
from tests.unit.tiers.file.kit import Driver, FaultyDisk, reopen

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
