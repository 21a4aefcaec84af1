"""One parent directory, several nodes: found, read, forgotten; unfinished segments too."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.errors import ConfigError
from kvstore.tier_events import FileGone, FileKnown, FileReclaim, WriteFile
from kvstore.tiers.file.catalog import FOREIGN_BASE
from kvstore.tiers.file.directory import Directory
from kvstore.tiers.file.parts import FileJob, Leaving
from kvstore.tiers.file.tier import look_pause_s
from kvstore.units import MIB, NS_PER_S
from tests.unit.tiers.file.kit import PATIENCE_S, SCOPE, Driver, FaultyDisk, key, u64


def shared(parent: Path, node: str, **settings: Any) -> Driver:
    """A node that looks at its peers when it is told to."""
    more = {"shared": True, "poll_interval_ms": 1 << 30, **settings}
    return Driver(parent, node=node, **more).recovered()


@pytest.fixture
def nodes(tmp_path: Path) -> list[Driver]:
    return [shared(tmp_path, name) for name in ("a", "b")]


def test_an_unfinished_segment_is_read_as_it_grows(nodes: list[Driver]) -> None:
    a, b = nodes
    a.write([1, 2])
    b.look()
    assert b.read([1, 2]) == [True, True]
    assert b.known[SCOPE, key(1)] >> 32 >= FOREIGN_BASE
    a.write(range(3, 12))
    b.tier.look_at_peers()
    new = [event for event in b.take() if isinstance(event, FileKnown)]
    keys = b"".join(event.keys for event in new)
    assert sorted(keys[i : i + 32] for i in range(0, len(keys), 32)) == list(map(key, range(3, 12)))
    assert b.read(range(1, 12)) == [True] * 11


def test_a_node_writes_nowhere_else_and_sees_itself_once(nodes: list[Driver]) -> None:
    a, b = nodes
    (place,) = a.write([1])
    a.look()
    assert a.known == {(SCOPE, key(1)): place}
    b.tier.look_at_peers()
    assert sorted(p.name for p in (b.config.directory / "b").iterdir()) == [
        "lock",
        "quarantine",
        "store",
    ]


def test_a_segment_that_vanishes_is_gone_and_a_read_of_it_a_miss(nodes: list[Driver]) -> None:
    a, b = nodes
    a.write([1])
    b.look()
    for path in (a.config.directory / "a").glob("seg-*.kv"):
        path.unlink()
    assert b.read([1]) == [False]
    b.seen.clear()
    b.tier.look_at_peers()
    (gone,) = [event for event in b.take() if isinstance(event, FileGone)]
    assert u64(gone.locations) == [b.known[SCOPE, key(1)]]


@pytest.mark.parametrize("what", ["the directory", "what is in it"])
def test_a_node_that_begins_again_is_seen_anew(tmp_path: Path, what: str) -> None:
    a = shared(tmp_path, "a")
    b = shared(tmp_path, "b")
    a.write([1, 2])
    b.look()
    (segment,) = (tmp_path / "a").glob("seg-*.kv")
    size = segment.stat().st_size
    a.close()
    if what == "the directory":
        shutil.rmtree(tmp_path / "a")
    else:
        for path in (tmp_path / "a").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    a = shared(tmp_path, "a")
    a.write([3, 4])
    assert segment.stat().st_size == size, "the same name, the same size"
    os.utime(segment, (1, 1))
    b.seen.clear()
    b.look()
    assert [u64(event.locations) for event in b.seen if isinstance(event, FileGone)] == [
        [b.known[SCOPE, key(1)], b.known[SCOPE, key(2)]]
    ]
    assert b.read([3, 4]) == [True, True]


def test_a_node_that_leaves_is_forgotten(nodes: list[Driver], tmp_path: Path) -> None:
    a, b = nodes
    a.write([1])
    b.look()
    a.close()
    (tmp_path / "a").rename(tmp_path.parent / f"{tmp_path.name}-a")
    b.seen.clear()
    b.tier.look_at_peers()
    assert [type(event) for event in b.take()] == [FileGone]
    assert not [name for name in open_files() if name.endswith("-a")]


@pytest.mark.parametrize(("code", "is_gone"), [(errno.ESTALE, True), (errno.EIO, False)])
def test_a_node_whose_open_directory_cannot_be_looked_at_ends_no_looking(
    nodes: list[Driver], monkeypatch: pytest.MonkeyPatch, code: int, *, is_gone: bool
) -> None:
    a, b = nodes
    a.write([1])
    b.look()
    assert b.tier._peers is not None
    theirs, look = b.tier._peers._peers["a"].fd, os.fstat

    def fail(fd: int) -> os.stat_result:
        if fd == theirs:
            raise OSError(code, os.strerror(code))
        return look(fd)

    b.seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        b.tier.look_at_peers()
    assert [type(event) for event in b.take()] == ([FileGone, FileKnown] if is_gone else [])
    assert b.read([1]) == [True], "it was met again, or never left"


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def test_foreign_nodes_that_are_none(nodes: list[Driver], tmp_path: Path) -> None:
    _, b = nodes
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "file").touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "seg-00000001.kv").write_bytes(bytes(50_000))
    (tmp_path / "c" / "seg-00000002.kv").symlink_to("/etc/passwd")
    b.tier.look_at_peers()
    assert b.take() == []
    assert b.tier._peers is not None
    assert sorted(b.tier._peers._peers) == ["a", "c"], "others are not kept open"


def test_a_node_needs_a_name(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", "-x"):
        with pytest.raises(ConfigError, match="node name"):
            Driver(tmp_path, shared=True, node=name)


def test_a_reclaimed_segment_can_be_read_until_its_grace_is_over(tmp_path: Path) -> None:
    a = shared(tmp_path, "a", capacity_bytes=4 * MIB)
    b = shared(tmp_path, "b")
    a.write(range(7))
    b.look()
    assert b.read([0]) == [True]
    a.on_reclaim = lambda event: a.reclaim(event.segment, [])
    number = 7
    while not list((tmp_path / "a").glob("dead-*")):
        a.write([number])
        number += 1
        assert number < 100, "nothing was reclaimed"
    assert b.read(range(7)) == [True] * 7, "b has it open"
    a.tier.look_at_peers()
    assert list((tmp_path / "a").glob("dead-*")), "the grace is not over"
    a.clock.advance_ms(10_001)
    a.tier.look_at_peers()
    assert not list((tmp_path / "a").glob("dead-*"))


def test_a_slow_delete_keeps_neither_writes_nor_reads_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = shared(tmp_path, "a", capacity_bytes=4 * MIB)
    asked: list[int] = []

    def let_one_go(event: FileReclaim) -> None:
        asked.append(event.segment)
        if len(asked) == 1:
            a.reclaim(event.segment, [])

    a.on_reclaim = let_one_go
    number = 0
    while not a.tier._catalog.hidden_bytes:
        a.write([number])
        number += 1
        assert number < 100, "nothing was reclaimed"
    remove, is_deleting, may_go_on = Directory.remove, threading.Event(), threading.Event()

    def hang(directory: Directory, name: str) -> None:
        is_deleting.set()
        assert may_go_on.wait(PATIENCE_S)
        remove(directory, name)

    monkeypatch.setattr(Directory, "remove", hang)
    a.clock.advance_ms(10_001)
    taken_bytes = a.tier.taken_bytes
    looking = threading.Thread(target=a.tier.look_at_peers)
    looking.start()
    try:
        assert is_deleting.wait(PATIENCE_S)
        assert a.tier._lock.acquire(timeout=PATIENCE_S / 4), "held while a file is deleted"
        a.tier._lock.release()
        assert a.tier.taken_bytes == taken_bytes, "it takes its room until it is gone"
        waiting = FileJob(cast("WriteFile", None), 0)
        assert a.tier._log._waits(waiting), "room is coming"
    finally:
        may_go_on.set()
        looking.join()
    assert not list((tmp_path / "a").glob("dead-*"))
    assert a.tier.taken_bytes < taken_bytes


def test_no_more_foreign_segments_are_kept_than_told(tmp_path: Path) -> None:
    a = shared(tmp_path, "a")
    a.write(range(14))
    disk = FaultyDisk()
    b = shared(tmp_path, "b", foreign_segments_max=1, disk=disk)
    b.look()
    disk.calls.clear()
    b.tier.look_at_peers()
    assert ("open", 0) not in disk.calls, "what is too much is not opened again and again"
    assert len(list((tmp_path / "a").glob("seg-*.kv"))) == 2
    assert len({place >> 32 for place in b.known.values()}) == 1
    assert b.read(range(7, 14)) == [True] * 7, "the latest one"


def test_who_is_told_to_stop_looking_stops_and_goes_on_there(
    nodes: list[Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    a.write([1])
    peers = b.tier._peers
    assert peers is not None
    asked: list[int] = []

    def refuse(_known: object, *, own: bool) -> None:
        assert not own
        asked.append(1)
        raise Leaving

    with monkeypatch.context() as patch:
        patch.setattr(b.tier._outbox, "known", refuse)
        with pytest.raises(Leaving):
            peers.look()
    assert asked == [1]
    b.look()
    assert b.read([1]) == [True]


@pytest.mark.parametrize("what", ["the parent", "the node's directory", "the node's name"])
def test_what_cannot_be_looked_at_for_a_moment_is_not_gone(
    nodes: list[Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a, b = nodes
    a.write([1])
    b.look()
    listdir, look = os.listdir, os.stat

    def fail_listdir(path: Any) -> list[str]:
        if (what == "the parent") == (path == tmp_path) and what != "the node's name":
            raise OSError(errno.EIO, "EIO")
        return list(listdir(path))

    def fail_stat(path: Any, **more: Any) -> os.stat_result:
        if what == "the node's name" and path == tmp_path / "a":
            raise OSError(errno.EIO, "EIO")
        return look(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.file.discovery.os.listdir", fail_listdir)
        patch.setattr("kvstore.tiers.file.discovery.os.stat", fail_stat)
        b.seen.clear()
        b.tier.look_at_peers()
    assert b.take() == []
    assert b.read([1]) == [True]


@pytest.mark.parametrize(
    ("took_s", "pause_s"), [(0.01, 3.0), (1.0, 10.0), (6.0, 60.0), (3600.0, 60.0)]
)
def test_looks_at_others_are_rare_where_they_are_long_but_no_outage_is_paid_for_tenfold(
    took_s: float, pause_s: float
) -> None:
    assert look_pause_s(3.0, int(took_s * NS_PER_S)) == pause_s
