"""The file tier of a real node: what was written is there after any restart, and only that."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.scenarios import slow_disk
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_BYTES, RawEngine, make_keys
from kvstore.wire.load import decode_learned
from tests.integration.node.conftest import eventually, has_all_dram, tiers
from tests.kit.command import kvstore
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

SIZE = "64MiB"


def start(
    directory: Path, files: Path, *, dram: str = "16MiB", how: str = "", flags: Sequence[str] = ()
) -> NodeProcess:
    """A node with a disk tier, once it has all of its dram. `how`: options of --file."""
    directory.mkdir(exist_ok=True)
    file = f"{files}:{SIZE}{how}"
    node = NodeProcess.start(directory, dram=dram, flags=["--file", file, *flags])
    with contextlib.ExitStack() as stack:
        stack.push(node)
        assert eventually(lambda: has_all_dram(node))
        stack.pop_all()
    return node


def written(node: NodeProcess, count: int) -> bool:
    return eventually(lambda: tiers(node)["file"]["blocks"] == count)


def whole(keys: Sequence[bytes], engine: RawEngine) -> list[bytes]:
    return [engine.contents(key) for key in keys]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restarted_node_serves_what_was_written(tmp_path: Path, end: str) -> None:
    keys = make_keys(40)
    with start(tmp_path / "a", tmp_path / "files") as node, RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        assert written(node, 40)
        if end == "kill":
            node.kill()
    with start(tmp_path / "a", tmp_path / "files") as node, RawEngine(node.socket) as engine:
        engine.open()
        assert written(node, 40)
        reply = engine.lease(keys)
        assert engine.read(reply) == whole(keys, engine)
        assert tiers(node)["dram"]["blocks"] == 40


def test_what_was_cleared_stays_away_after_a_restart(tmp_path: Path) -> None:
    keys = make_keys(10)
    with start(tmp_path / "a", tmp_path / "files") as node, RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        assert written(node, 10)
        assert cleared(node).returncode == 0
        assert written(node, 0)
        engine.store(keys[:2])
        assert written(node, 2)
    with start(tmp_path / "a", tmp_path / "files") as node, RawEngine(node.socket) as engine:
        engine.open()
        assert written(node, 2)
        assert len(engine.lease(keys).slots) == 2 * 4


def test_a_clear_that_a_full_disk_cannot_note_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", disk], check=True)
    try:
        with start(tmp_path / "a", disk) as node, RawEngine(node.socket) as engine:
            engine.open()
            engine.store(make_keys(4))
            assert written(node, 4)
            (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
            done = cleared(node)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith("kvstore: 4 blocks are forgotten, but the disk of ")
            assert written(node, 0)
            (disk / "ballast").unlink()
            assert cleared(node).returncode == 0, "asked again with room"
            node.kill()
        with start(tmp_path / "a", disk) as node:
            assert tiers(node)["file"]["blocks"] == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_what_was_learned_outlives_the_node(tmp_path: Path) -> None:
    files = tmp_path / "files"
    with start(tmp_path / "a", files) as node, RawEngine(node.socket) as engine:
        engine.open()
        engine.store(make_keys(4))
        assert written(node, 4)
    assert not (files / "learned").exists(), "nothing was measured"
    with start(tmp_path / "a", files) as node, RawEngine(node.socket) as engine:
        engine.open()
        assert written(node, 4)
        engine.release(engine.lease(make_keys(4)))
    found = json.loads((files / "learned").read_text())["learned"]
    assert found["disk_ns_per_mib"] > 0
    (files / "learned").write_text("{")
    with start(tmp_path / "a", files) as node:
        assert node.log.count("measurements of an earlier start are discarded") == 1


def cleared(node: NodeProcess) -> subprocess.CompletedProcess[str]:
    return kvstore("clear", "--socket", str(node.socket))


def fsck(directory: Path, *flags: str) -> tuple[int, str]:
    done = kvstore("fsck", str(directory), *flags)
    return done.returncode, done.stdout + done.stderr


def test_fsck_tells_damage_and_moves_it_aside(tmp_path: Path) -> None:
    keys, files = make_keys(8), tmp_path / "files"
    with start(tmp_path / "a", files) as node, RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        assert written(node, 8)
        sixth = engine.contents(keys[5])
        status, text = fsck(files, "--quarantine")
        assert (status, "node" in text) == (2, True), "not while a node is running"
    assert fsck(files)[0] == 0
    (segment,) = [f for f in files.iterdir() if f.is_file() and sixth in f.read_bytes()]
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().find(sixth) + 77)
        file.write(b"!")
    status, text = fsck(files)
    assert status == 1
    assert segment.name in text
    assert fsck(files, "--quarantine")[0] == 1
    assert fsck(files)[0] == 0, "what was damaged is aside"
    with start(tmp_path / "a", files) as node:
        assert written(node, 7), "and what was good is kept"
    assert fsck(tmp_path / "nowhere")[0] == 2


def metric(node: NodeProcess, name: str) -> float:
    return samples(node)[f"kvstore_{name}"]


def test_second_sight_keeps_what_is_named_once_off_the_disk(tmp_path: Path) -> None:
    keys, flags = make_keys(40), ["--file-admission", "second-sight", "--policy", "reuse"]
    with (
        start(tmp_path / "a", tmp_path / "files", flags=flags) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        engine.store(keys)
        engine.lease_stored(keys)
        assert (tiers(node)["file"]["blocks"], tiers(node)["file"]["not_admitted"]) == (0, 40)
        engine.hint(keys[:10])
        assert written(node, 10)
        assert [tiers(node)[t]["policy"] for t in ("dram", "file")] == ["reuse", "second-sight"]
        assert metric(node, 'file_blocks_not_written_total{reason="admission"}') == 40
        assert "kvstore_file_budget_left_bytes" not in samples(node)
        node.kill()
    with start(tmp_path / "a", tmp_path / "files", flags=flags) as node:
        assert written(node, 10), "and nothing else was"


def test_a_used_up_budget_stops_writes_and_no_loads(tmp_path: Path) -> None:
    keys, record, budget = make_keys(200), 68 << 10, 2 << 20
    limit = ["--slab", "1MiB", "--file-writes-per-day", "2MiB"]
    with (
        start(
            *(tmp_path / "a", tmp_path / "files"),
            dram="4MiB",
            flags=limit,
        ) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()

        def dealt_with(count: int) -> bool:
            reasons = [f'not_written_total{{reason="{why}"}}' for why in ("admission", "budget")]
            names = ("written_total", *reasons)
            return sum(metric(node, f"file_blocks_{name}") for name in names) == count

        for begin in range(0, len(keys), 10):
            engine.store(keys[begin : begin + 10])
            assert eventually(lambda count=begin + 10: dealt_with(count))  # type: ignore[misc]
        file = tiers(node)["file"]
        assert 3 * budget // 4 <= file["blocks"] * record <= budget
        assert file["blocks"] + file["not_admitted"] + file["over_budget"] == len(keys)
        assert file["not_admitted"] == metric(
            node, 'file_blocks_not_written_total{reason="admission"}'
        )
        left = metric(node, "file_budget_left_bytes")
        assert left == pytest.approx(budget - file["blocks"] * record, abs=record)
        # Dram lost them long ago.
        assert engine.read(engine.lease(keys[:10])) == whole(keys[:10], engine)
        assert eventually(lambda: budget - spent(tmp_path / "files") <= left + budget // 32)
        node.kill()
    with start(tmp_path / "b", tmp_path / "files", dram="4MiB", flags=limit) as node:
        assert metric(node, "file_budget_left_bytes") <= left + budget // 16, "a new day it is not"


def spent(directory: Path) -> int:
    """What the note beside the segments says was written of the day's budget."""
    note = directory / "learned"
    return decode_learned(note.read_bytes()).spent.size_bytes if note.exists() else 0


def test_the_disk_that_a_benchmark_slows_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_disk, "WORK", tmp_path)
    pace, keys = tmp_path / "pace", make_keys(4)
    pace.write_text("5000")  # nanoseconds per byte
    with slow_disk.start_node(pace, "tiny") as node, RawEngine(node.socket) as engine:
        engine.open()
        begun_s = time.monotonic()
        engine.store(keys)
        assert written(node, len(keys))
    assert time.monotonic() - begun_s > len(keys) * BLOCK_BYTES * 5000 / 1e9
