"""The node process dies or is replaced: memory stays, engines attach again, no byte is wrong."""

from __future__ import annotations

import contextlib
import fcntl
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvstore.errors import AttachError
from kvstore.supervisor.sockets import ask_for_upgrade
from kvstore.testing.process import NodeProcess, children_of, stop_process
from kvstore.testing.raw_engine import EngineGone, RawEngine, make_keys
from kvstore.types import PAGES_PER_GENERATION
from kvstore.wire.messages import generations_array, slots_array
from tests.amounts import amount
from tests.integration.node.conftest import eventually, rows, tiers
from tests.integration.node.test_attach import victim
from tests.kit.command import kvstore
from tests.kit.gauges import page, samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 18


def dram(node: NodeProcess) -> dict[str, Any]:
    return tiers(node)["dram"]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.by_exec), signal.SIGTERM],
    ids=lambda each: each.name,
)
def test_what_was_in_memory_is_served_by_the_next_process(
    node: NodeProcess, number: signal.Signals
) -> None:
    keys = make_keys(40)
    with RawEngine(node.socket, rank_count=2) as engine:
        engine.open()
        engine.store(keys)
        engine.lease_stored(keys)
    old = node.pid
    node.crash(number)
    with RawEngine(node.socket, rank_count=2, timeout_s=30) as engine:
        engine.open()
        reply = engine.lease(keys)
        for rank in range(2):
            assert engine.read(reply, rank=rank) == [
                engine.contents(key, rank=rank) for key in keys
            ]
        sums = [engine.checksum(column, key) for key in keys for column in range(2)]
        assert reply.checksums == b"".join(sums), "whoever reads them first verifies them"
        engine.store(make_keys(3, seed="new"))
        assert engine.lease_stored(make_keys(3, seed="new")).checksums == b""
    assert node.pid != old
    assert page(node, "/healthz") == (200, "ok\n")
    metrics = samples(node)  # where they were
    assert metrics["kvstore_restarts_total"] == 1
    assert metrics["kvstore_blocks_kept_total"] == 80
    assert metrics["kvstore_restart_gap_seconds"] > 0
    (row,) = rows(node, "nodes")
    assert (row["restarts"], row["blocks_kept"]) == (1, 80)
    assert "80 blocks (5 MiB) were kept in memory" in node.log
    assert node.stop() == 0
    assert [p.name for p in node.directory.iterdir()] == ["node.log"]


@pytest.mark.by_exec  # a start takes its time, in which a thief could come
def test_nobody_gets_its_port_or_its_directory_between_two_processes(tmp_path: Path) -> None:
    files, directory = tmp_path / "files", tmp_path / "node"
    directory.mkdir()
    taken: list[str] = []
    is_over = threading.Event()
    with NodeProcess.start(directory, flags=["--file", f"{files}:64MiB"]) as node:
        port = int(node.metrics_url.rpartition(":")[2].partition("/")[0])

        def take_what_can_be_had() -> None:
            with (files / "lock").open("r+") as lock:
                while not (taken or is_over.wait(0.001)):
                    with contextlib.suppress(OSError), socket.socket() as sock:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        sock.bind(("127.0.0.1", port))
                        taken.append("port")
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        taken.append("lock")

        thief = threading.Thread(target=take_what_can_be_had)
        thief.start()
        try:
            node.crash()
            with RawEngine(node.socket, timeout_s=30) as engine:
                engine.open()
            assert page(node, "/healthz") == (200, "ok\n")
        finally:
            is_over.set()
            thief.join()
    assert taken == []


def test_an_upgrade_without_its_directory_serves_from_memory_until_it_is_back(
    tmp_path: Path,
) -> None:
    files, directory, away = tmp_path / "files", tmp_path / "node", tmp_path / "away"
    directory.mkdir()
    keys = make_keys(20)
    with NodeProcess.start(directory, flags=["--file", f"{files}:64MiB"]) as node:
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(keys)
            engine.lease_stored(keys)
            files.rename(away)
            files.touch()
            assert "20 blocks" in ask_for_upgrade(node.socket)
        with RawEngine(node.socket, timeout_s=30) as engine:
            engine.open()
            reply = engine.lease(keys)
            assert engine.read(reply) == [engine.contents(key) for key in keys]
        told = page(node, "/healthz")[1]
        assert told.startswith(f"ok, but the disk tier in {files} takes no reads and writes")
        files.unlink()
        away.rename(files)
        assert eventually(lambda: page(node, "/healthz") == (200, "ok\n"), timeout_s=60)


def test_who_reads_under_the_old_process_finds_his_copy_void(node: NodeProcess) -> None:
    keys = make_keys(4)
    with RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        reply = engine.lease_stored(keys)
        generations = engine.ranks[0].generations
        assert generations is not None
        slots = slots_array(reply.slots)
        assert (generations.generations(slots) == generations_array(reply.generations)).all()
        node.crash()
        with RawEngine(node.socket, engine_id="other", timeout_s=30) as other:
            other.open()
            assert not generations.generations(slots).any()
            every = np.arange(0, 64 << 8, PAGES_PER_GENERATION, dtype=np.uint32)
            assert not generations.generations(every).any()


def test_what_a_living_rank_was_granted_stays_out_until_it_attaches_again(
    node: NodeProcess,
) -> None:
    assert eventually(lambda: dram(node)["ready_bytes"] == 64 << 20)
    with RawEngine(node.socket) as engine:
        engine.open()
        granted = dram(node)["slots_granted"]
        engine.wait(lambda: len(engine.credits) == granted)
        node.crash()
        with RawEngine(node.socket, engine_id="other", timeout_s=30) as other:
            other.open()
            assert dram(node)["slots_quarantined"] == granted
            served = {int(slots[0]) for slots, _ in engine.credits}
            other.wait(lambda: bool(other.credits))
            assert not served & {int(slots[0]) for slots, _ in other.credits}
            with RawEngine(node.socket, nonce=engine.nonce) as again:
                again.open()
                assert dram(node)["slots_quarantined"] == 0
    assert eventually(lambda: rows(node, "nodes")[0]["connections"] == 0)


def test_a_rank_that_dies_while_there_is_no_node_gives_its_slots_back(node: NodeProcess) -> None:
    with victim(node, "spawn"):
        # With the supervisor stopped nobody starts another process meanwhile.
        stop_process(node.process.pid)
        node.crash()
    node.process.send_signal(signal.SIGCONT)
    with RawEngine(node.socket, timeout_s=30) as engine:
        engine.open()
        assert eventually(lambda: dram(node)["slots_quarantined"] == 0)


def test_blocks_on_disk_too_are_told_once(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    keys = make_keys(20)
    flags = ["--file", f"{tmp_path / 'files'}:1GiB"]
    with NodeProcess.start(directory, flags=flags) as node:
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(keys)
            engine.lease_stored(keys)
            assert eventually(lambda: rows(node, "tiers")[1]["blocks"] == 20)
        for _ in range(2):
            node.crash()
            with RawEngine(node.socket, timeout_s=30) as engine:
                engine.open()
                assert engine.read(engine.lease(keys)) == [engine.contents(key) for key in keys]
            assert eventually(lambda: [t["blocks"] for t in rows(node, "tiers")] == [20, 20])
        assert rows(node, "nodes")[0]["blocks"] == 20


# ── under load ───────────────────────────────────────────────────────────────────────────────────


class Load:
    """An engine that stores and reads for ever, and looks at every byte."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loaded = 0
        self.attached = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        rng, nonce = random.Random(SEED), ""
        while not self._done.is_set():
            with (
                contextlib.suppress(EngineGone, TimeoutError, AttachError, AssertionError),
                RawEngine(self._node.socket, nonce=nonce, timeout_s=2) as engine,
            ):
                nonce = engine.nonce
                engine.open()
                self.attached += 1
                while not self._done.is_set():
                    self._round(engine, rng)

    def _round(self, engine: RawEngine, rng: random.Random) -> None:
        keys = make_keys(rng.randint(1, 30), seed=str(rng.randrange(60)))
        engine.store(keys)
        reply = engine.lease(keys)
        found = engine.read(reply)
        pages = engine.ranks[0].generations
        assert pages is not None
        slots = slots_array(reply.slots)
        valid = pages.generations(slots) == generations_array(reply.generations)
        for key, data, is_valid in zip(keys, found, valid.tolist(), strict=False):
            if is_valid and data != engine.contents(key):
                self.wrong.append(f"{key[:4].hex()}: {data[:8].hex()}")
        self.loaded += int(valid.sum())
        engine.release(reply)


def progress(load: Load) -> Callable[[], bool]:
    """True once the engine has attached again and loaded something."""
    attached, loaded = load.attached, load.loaded
    return lambda: load.attached > attached and load.loaded > loaded + 50


def killed(node: NodeProcess, rng: random.Random) -> None:
    threading.Event().wait(rng.uniform(0, 0.05))  # anywhere in a step
    node.crash()


def upgraded(node: NodeProcess, _: random.Random) -> None:
    told = ask_for_upgrade(node.socket)
    assert "were kept in memory; service was interrupted for" in told
    assert " 0 blocks" not in told


@pytest.mark.parametrize(
    ("replace", "lives"),
    [(killed, amount(4, nightly=8)), (upgraded, amount(2, nightly=4))],
    ids=["killed", "upgraded"],
)
def test_replaced_again_and_again_under_load_no_byte_is_wrong(
    tmp_path: Path, replace: Callable[[NodeProcess, random.Random], None], lives: int
) -> None:
    rng = random.Random(SEED)
    with NodeProcess.start(tmp_path, dram="32MiB") as node, Load(node) as load:
        assert eventually(lambda: load.loaded > 100, timeout_s=30)
        for life in range(1, lives + 1):
            back = progress(load)
            replace(node, rng)
            assert eventually(back, timeout_s=60)
            assert rows(node, "nodes")[0]["restarts"] == life
        assert load.wrong == []
        assert "all that was in memory is lost" not in node.log
    assert "Traceback" not in node.log


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def upgrade(socket: Path) -> subprocess.CompletedProcess[str]:
    return kvstore("upgrade", "--socket", str(socket))


@pytest.mark.by_exec
def test_the_command_says_what_was_kept(node: NodeProcess) -> None:
    done = upgrade(node.socket)
    assert done.returncode == 0
    assert "serves: 0 blocks (0 B) were kept in memory" in done.stdout
    assert "replaced by the code that is installed now" in node.log
    assert "stopped" not in node.log
    assert node.stop() == 0
    assert "stopped" in node.log


# ── the supervisor ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def processes(started: NodeProcess) -> list[int]:
    """Supervisor, node process and standby."""
    assert eventually(lambda: len(children_of(started.process.pid)) == 2, timeout_s=30)
    return [started.process.pid, *children_of(started.process.pid)]


def test_a_standby_takes_over_and_is_replaced(started: NodeProcess, processes: list[int]) -> None:
    node = started
    _, _, standby = processes
    node.crash()
    assert eventually(lambda: node.pid == standby)
    assert eventually(lambda: len(children_of(node.process.pid)) == 2, timeout_s=30)


def test_the_supervisor_is_small_and_hidden(processes: list[int]) -> None:
    supervisor, *_ = processes
    status = Path(f"/proc/{supervisor}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert int(fields["RssAnon"].split()[0]) < 24 << 10
    assert "kvstore-arena" not in Path(f"/proc/{supervisor}/maps").read_text(), "held, not mapped"
