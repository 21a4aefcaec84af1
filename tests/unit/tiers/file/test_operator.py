"""What an operator is told of a directory: sentences that say what is wrong and what to do."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.fsck import fsck, reports_as_json, stores_in
from kvstore.errors import ConfigError
from kvstore.tier_events import Resumed, Suspended
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.parts import Health
from kvstore.units import KIB, MIB
from tests.unit.tiers.file.kit import Driver, FaultyDisk, key, reopen

NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


# ── clear ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_clear_that_the_disk_cannot_note_is_known_not_to_be_durable(
    tmp_path: Path, call: str
) -> None:
    disk = FaultyDisk()
    driver = Driver(tmp_path / "store", disk=disk).recovered()
    driver.write([1])
    disk.fail[call] = lambda _: NO_ROOM
    driver.void(None, None)
    assert not driver.tier.wait_for_voids(20)
    del disk.fail[call]
    driver.void(None, None)
    assert driver.tier.wait_for_voids(20), "asked again with the disk mended"
    driver.close()
    again = Driver(tmp_path / "store").recovered()
    assert again.known == {}


def test_a_void_that_failed_is_written_with_the_next_segment(tmp_path: Path) -> None:
    disk = FaultyDisk()
    driver = Driver(tmp_path / "store", disk=disk).recovered()
    driver.write([1])
    disk.fail["pwritev"] = lambda _: NO_ROOM
    driver.void(None, None)
    assert not driver.tier.wait_for_voids(20)
    del disk.fail["pwritev"]
    driver.clock.advance_ms(100_000)
    assert 0 not in driver.write([2])
    assert driver.tier.wait_for_voids(20)
    driver.close()
    again = Driver(tmp_path / "store").recovered()
    assert {name for _, name in again.known} == {key(2)}


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    disk = FaultyDisk()
    driver = Driver(tmp_path / "store", disk=disk).recovered()
    driver.write([1])
    disk.hang.add("pwritev")
    driver.start_write([2])
    assert disk.hanging.acquire(timeout=20)
    driver.void(None, None)  # waits behind a write
    assert not driver.tier.wait_for_voids(0.01)
    disk.release.set()
    assert driver.tier.wait_for_voids(20)


# ── start ────────────────────────────────────────────────────────────────────────────────────────


def test_a_smaller_capacity_says_what_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tmp_path / "store").recovered()
    for number in range(60):
        driver.write([number])
    driver.close()
    assert caplog.messages == []
    Driver(tmp_path / "store", capacity_bytes=3 * MIB).recovered().close()
    # No segment fits beside a larger one that is written and one that stays free.
    smaller: dict[str, Any] = {"capacity_bytes": 2 * MIB, "segment_bytes": 896 * KIB}
    Driver(tmp_path / "store", **smaller).recovered().close()
    some, everything = caplog.messages
    says = f"{tmp_path / 'store'} held more than --file allows now: its oldest blocks are deleted, "
    assert re.fullmatch(re.escape(says) + r"[\d.]+ MiB of [\d.]+ MiB", some)
    assert re.fullmatch(re.escape(says) + r"[\d.]+ MiB and nothing is left", everything)


def test_files_that_were_put_aside_are_mentioned_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Driver(tmp_path / "store").recovered().close()
    (tmp_path / "store" / "quarantine" / "seg-00000001.kv.damaged.00").write_bytes(bytes(8192))
    Driver(tmp_path / "store").recovered().close()
    aside = tmp_path / "store" / "quarantine"
    assert caplog.messages == [
        f"8 KiB of files moved aside to {aside} count against --file: delete them once looked at"
    ]
    said = fsck(tmp_path / "store").text()
    assert f"1 file put aside in {aside}, 8 KiB, count against --file" in said
    assert "; no damage, except for files moved aside\n" in said


def test_a_directory_is_shared_or_it_is_not(tmp_path: Path) -> None:
    Driver(tmp_path / "own").recovered().close()
    with pytest.raises(ConfigError, match=r"own is the store of a single node: leave ',shared'"):
        Driver(tmp_path / "own", shared=True, node="a")
    shared: dict[str, Any] = {"shared": True, "node": "a", "poll_interval_ms": 1 << 30}
    Driver(tmp_path / "parent", **shared).recovered().close()
    # Nothing tells a shared directory from one that a store of a single node lies in.
    for outer, inner in (("parent", "a"), ("", "own")):
        says = f"contains the store {inner}: give --file an empty directory, or add ',shared' if"
        with pytest.raises(ConfigError, match=says):
            Driver(tmp_path / outer)
    Driver(tmp_path / "parent", **shared | {"node": "b"}).recovered()
    with pytest.raises(ConfigError, match=r"b is in use by another node of that name: give each"):
        Driver(tmp_path / "parent", **shared | {"node": "b"})


# ── trouble ──────────────────────────────────────────────────────────────────────────────────────


def test_what_suspends_the_disk_says_what_to_do(tmp_path: Path) -> None:
    config = FileConfig(tmp_path, 8 * MIB, failures_max=1)
    (full,) = Health(config).failed_writing(1, NO_ROOM)
    assert "make room, or restart with a smaller --file" in str(full)
    (broken,) = Health(config).failed_reading(1, OSError(errno.EIO, "Input/output error"))
    assert "the disk fails (Input/output error): see the kernel's log" in str(broken)
    (slow,) = Health(config).failed_reading(1, None)
    assert "does not respond in time: see the kernel's log" in str(slow)
    (slow,) = Health(config).failed_writing(1, None)
    assert "does not write in time: see the kernel's log" in str(slow)


def remove_contents(store: Path) -> None:
    for path in store.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("remove", [shutil.rmtree, remove_contents])
def test_a_directory_that_was_removed_is_made_again(
    tmp_path: Path, remove: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    driver = Driver(store).recovered()
    driver.on_reclaim = lambda ask: driver.reclaim(ask.segment, [])
    for number in range(40):
        driver.write([number])
    driver.read([0])  # a reader holds the segment open
    remove(store)
    for number in range(100, 300):
        assert 0 not in driver.write([number]), "past the capacity: what is gone takes no room"
    assert driver.read([5]) == [False]
    assert driver.read([299]) == [True]
    assert caplog.messages == [f"{store} was removed, with its blocks, and is made again"]
    with pytest.raises(ConfigError, match="is in use by another node"):
        Driver(store)
    driver = reopen(driver)
    assert key(299) in {name for _, name in driver.known}
    assert key(5) not in {name for _, name in driver.known}


def test_segments_outlive_a_lock_that_was_removed(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1])
    (tmp_path / "store" / "lock").unlink()
    driver.write([2])
    assert driver.read([1, 2]) == [True, True]
    driver = reopen(driver)
    assert {name for _, name in driver.known} == {key(1), key(2)}


def test_a_clear_of_a_directory_that_was_removed_is_durable(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1])
    driver = reopen(driver)  # no segment is open now
    shutil.rmtree(tmp_path / "store")
    driver.void(None, None)
    assert driver.tier.wait_for_voids(20)
    driver = reopen(driver)
    assert driver.known == {}


def test_a_directory_is_not_made_again_on_another_file_system(tmp_path: Path) -> None:
    """Of a disk that is not mounted any more, it would be made on the one below."""
    mounted, mount = tmp_path / "disk", tmp_path / "mount"
    mounted.mkdir()
    mount.symlink_to(mounted)
    driver = Driver(mount / "store", failures_max=1).recovered()
    driver.write([1])
    shutil.rmtree(mounted / "store")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as below:
        mount.unlink()
        mount.symlink_to(below)
        assert driver.write([2]) == [0]
        open_fds = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            driver.clock.advance_ms(100_000)
            assert driver.write([2]) == [0]
        assert len(os.listdir("/proc/self/fd")) == open_fds
        assert os.listdir(below) == []
    (why,) = {event.reason for event in driver.seen if isinstance(event, Suspended)}
    assert why == (
        f"it was removed and cannot be made again: {mount} is on another file system now: mount"
        " the disk"
    )
    mount.unlink()
    mount.symlink_to(mounted)
    driver.clock.advance_ms(100_000)
    assert 0 not in driver.write([3])
    driver.wait(Resumed)
    assert driver.read([3]) == [True]


def test_a_place_that_another_node_took_is_left_to_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    driver = Driver(store, failures_max=1).recovered()
    shutil.rmtree(store)
    other = Driver(store).recovered()
    open_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert driver.write([1]) == [0]
        driver.clock.advance_ms(100_000)
    assert len(os.listdir("/proc/self/fd")) == open_fds
    assert "in use by another node" in driver.wait(Suspended).reason
    assert 0 not in other.write([1])
    driver.close()
    assert other.read([1]) == [True]


# ── fsck ─────────────────────────────────────────────────────────────────────────────────────────


def damaged(tmp_path: Path) -> Path:
    """A store with one segment and a damaged record in it."""
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1, 2])
    driver.close()
    (segment,) = (tmp_path / "store").glob("*.kv")
    with segment.open("r+b") as file:
        file.seek(2 * 4096 + 100)
        byte = file.read(1)
        file.seek(2 * 4096 + 100)
        file.write(bytes([byte[0] ^ 1]))
    return tmp_path / "store"


def test_fsck_says_how_to_save_what_is_good(tmp_path: Path) -> None:
    store = damaged(tmp_path)
    hint = "to keep what is good and move the rest aside: "
    assert f"{hint}kvstore fsck {store} --quarantine" in fsck(store).text()
    node = Driver(store).recovered()
    assert f"{hint}stop the node, then kvstore fsck {store} --quarantine" in fsck(store).text()
    with pytest.raises(ConfigError, match="is in use by a node: stop it before --quarantine"):
        fsck(store, quarantine=True)
    node.close()
    assert hint not in fsck(store, quarantine=True).text()


def test_fsck_explains_a_segment_that_is_not_closed(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.write([1])
    report = fsck(tmp_path / "store")
    said = report.text()
    assert report.status == 0
    assert "1 not closed; no damage" in said
    assert "is not closed is no damage: a node is running and writes to one" in said
    (segment,) = (tmp_path / "store").glob("*.kv")
    copy = segment.read_bytes()
    driver.close()
    said = fsck(tmp_path / "store").text()
    assert "1 segment, 1 record, " in said
    assert "0 not closed; no damage" in said
    assert "not closed is" not in said
    assert "no trace" not in said
    segment.write_bytes(copy)
    said = fsck(tmp_path / "store").text()
    assert "is not closed is no damage: a node was killed" in said
    assert "cut off the end of such a segment would leave no trace" in said


def test_fsck_takes_a_lock_that_cannot_be_tried_for_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(tmp_path / "store").recovered().close()
    assert not fsck(tmp_path / "store").node_runs

    def refuse(_fd: int, _how: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS: it is not open for writing

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert fsck(tmp_path / "store").node_runs


def test_fsck_of_a_shared_directory_is_that_of_its_parts(tmp_path: Path) -> None:
    for node in "ab":
        Driver(tmp_path, shared=True, node=node, poll_interval_ms=1 << 30).recovered().close()
    assert stores_in(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert stores_in(tmp_path / "a") == [tmp_path / "a"]
    assert fsck(tmp_path / "a").status == 0


def test_fsck_of_another_directory_says_so_to_people_and_programs(tmp_path: Path) -> None:
    report = fsck(tmp_path)
    sentence = f"{tmp_path} is no disk tier: give the directory of a node's --file"
    assert (report.status, report.text()) == (2, sentence)
    assert fsck(tmp_path / "nothing").status == 2
    (row,) = json.loads(reports_as_json([report]))["directories"]
    assert row["files"] == [sentence]


def test_fsck_for_a_program(tmp_path: Path) -> None:
    store = damaged(tmp_path)
    report = fsck(store)
    (row,) = json.loads(reports_as_json([report]))["directories"]
    assert row["directory"] == str(store)
    assert (row["status"], row["records"], row["problems"]) == (1, 1, {"damaged records": 1})
    assert row["files"] == ["seg-00000001.kv: 1 damaged record"]
    assert set(row) == {
        *("directory", "status", "segments", "records", "record_bytes", "file_bytes", "torn"),
        *("problems", "files", "moved", "quarantine_files", "quarantine_bytes", "node_runs"),
    }


def test_fsck_calls_nothing_damaged_that_is_only_being_written(tmp_path: Path) -> None:
    """It looks again at where a node appends; damage stays, what was under way does not."""
    driver = Driver(tmp_path / "store").recovered()
    (place,) = driver.write([1])
    (segment,) = (tmp_path / "store").glob("*.kv")
    at = (place & 0xFFFF_FFFF) * 4096 + 5000
    whole = segment.read_bytes()

    class Settling(FaultyDisk):
        looks = 0

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            if offset == (place & 0xFFFF_FFFF) * 4096 and len(buffers[0]) > 4096:
                self.looks += 1
                if self.looks == 3:
                    segment.write_bytes(whole)
            return super().preadv(fd, buffers, offset)

    with segment.open("r+b") as file:
        file.seek(at)
        file.write(b"\0not yet\0")
    assert fsck(tmp_path / "store", disk=Settling()).status == 0
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(b"\0never\0")
    assert dict(fsck(tmp_path / "store").problems) == {"damaged records": 1}
