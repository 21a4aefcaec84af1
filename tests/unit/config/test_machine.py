"""A disk that cannot hold the file tier is said at the start, not when it is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import machine
from kvstore.config.machine import refuse_what_cannot_hold, warn_of_too_little_room
from kvstore.errors import ConfigError
from kvstore.tiers.file.config import CAPACITY_BYTES_MIN, FileConfig
from kvstore.units import GIB, KIB


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileConfig:
    """200 GiB of it are wanted, 76 GiB are free."""
    free(monkeypatch, 76 * GIB)
    monkeypatch.setattr(machine, "file_system_bytes", lambda _: 1000 * GIB)
    return FileConfig(directory=tmp_path / "tier", capacity_bytes=200 * GIB)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(machine, "file_system_free_bytes", lambda _: size)


def hold(directory: Path, size: int) -> None:
    directory.mkdir()
    (directory / "segment").write_bytes(bytes(size))


def test_too_little_room_is_a_warning_with_the_numbers(
    disk: FileConfig, caplog: pytest.LogCaptureFixture
) -> None:
    hold(disk.directory, 64 * KIB)
    refuse_what_cannot_hold(disk)
    warn_of_too_little_room(disk)
    (line,) = caplog.messages
    assert "may grow to 200 GiB, but has 64 KiB and its file system 76 GiB free" in line


def test_what_is_there_already_counts(
    disk: FileConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that starts again on a disk that it has filled itself."""
    hold(disk.directory, 64 * KIB)
    free(monkeypatch, 200 * GIB - 64 * KIB)
    warn_of_too_little_room(disk)
    assert not caplog.messages
    free(monkeypatch, CAPACITY_BYTES_MIN - 64 * KIB)
    refuse_what_cannot_hold(disk)


def test_a_full_disk_is_refused(disk: FileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, CAPACITY_BYTES_MIN - 1)
    with pytest.raises(ConfigError, match="its file system is full: make room for at least 2 MiB"):
        refuse_what_cannot_hold(disk)


def test_a_mount_that_did_not_come_up_is_refused(tmp_path: Path) -> None:
    """Else its directories would be made on the disk of the system."""
    file = FileConfig(directory=tmp_path / "nvme" / "tier", capacity_bytes=4 << 20)
    with pytest.raises(ConfigError, match=r"nvme does not exist: mount its disk, make it, or"):
        refuse_what_cannot_hold(file)
    shared = FileConfig(directory=tmp_path / "tier", capacity_bytes=4 << 20, shared=True, node="n")
    refuse_what_cannot_hold(shared)
    assert list(tmp_path.iterdir()) == []
