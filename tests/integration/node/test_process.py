"""The node as a process: start, stop, what it leaves, what it listens on, who may start it."""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import msgspec
import psutil
import pytest

from kvstore import __version__
from kvstore.client.link import Lost
from kvstore.node.turns import ThreadPriority
from kvstore.obs.metrics import METRICS
from kvstore.testing.process import NodeFailed, NodeProcess, children_of
from kvstore.testing.raw_engine import BLOCK_BYTES, BLOCK_TOKENS, EngineGone, RawEngine, make_keys
from kvstore.units import NS_PER_S
from kvstore.wire.messages import Story
from tests.integration.node.conftest import eventually
from tests.kit.gauges import descriptors, look, page, samples

pytestmark = pytest.mark.slow


def place_of(thread: int) -> tuple[int, int]:
    """Its class among threads, and its nice value."""
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)


def preferred() -> tuple[int, int]:
    """The place that the kernel gives here to who asks, tried in a thread that ends."""
    found = []

    def ask() -> None:
        ThreadPriority(0)
        found.append(place_of(threading.get_native_id()))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return found[0]


def test_the_loop_is_preferred_and_no_other_thread(started: NodeProcess) -> None:
    node = started
    assert page(node, "/metrics")[0] == 200  # the threads that answer are there
    assert eventually(lambda: place_of(node.pid) == preferred())
    threads = {int(task.name) for task in Path(f"/proc/{node.pid}/task").iterdir()} - {node.pid}
    assert len(threads) > 3
    assert {place_of(thread) for thread in threads} == {place_of(0)}


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.by_exec)]
)
def test_a_stop_is_clean_and_waits_for_nobody(node: NodeProcess, number: signal.Signals) -> None:
    port = int(node.metrics_url.split(":")[2].split("/")[0])
    with RawEngine(node.socket) as engine, socket.create_connection(("127.0.0.1", port)) as slow:
        engine.open()
        slow.send(b"GET /met")
        node.process.send_signal(number)
        assert node.process.wait(10) == 0, "with an engine attached and a slow reader of metrics"
        assert select.select([engine.scheduler], [], [], 5)[0]
        assert any(isinstance(message, Lost) for message in engine.scheduler.receive())
    assert [p.name for p in node.directory.iterdir()] == ["node.log"]
    assert "Traceback" not in node.log


def test_memory_outlives_a_killed_node_and_its_heart_has_stopped(node: NodeProcess) -> None:
    with RawEngine(node.socket) as engine:
        engine.open()
        keys = make_keys(3)
        engine.store(keys)
        reply = engine.lease_stored(keys)
        generations = engine.ranks[0].generations
        assert generations is not None
        node.kill()
        beat_ns = generations.heartbeat_ns()
        assert engine.read(reply) == [engine.contents(key) for key in keys]
        assert eventually(lambda: time.monotonic_ns() - beat_ns > 250_000_000)
        assert generations.heartbeat_ns() == beat_ns


def test_two_nodes_on_one_socket(node: NodeProcess, tmp_path: Path) -> None:
    with pytest.raises(NodeFailed) as caught:
        NodeProcess.start(tmp_path)
    assert caught.value.code == 2
    assert f"another kvstore node is running on {node.socket}" in caught.value.stderr
    with RawEngine(node.socket) as engine:
        engine.open()
        assert engine.session


@pytest.mark.parametrize("option", ["--socket", "--events"])
def test_a_file_is_not_replaced_by_a_socket(tmp_path: Path, option: str) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    value = f"ipc://{path}" if option == "--events" else str(path)
    with pytest.raises(NodeFailed, match=f"is no socket: choose another {option}"):
        NodeProcess.start(tmp_path, flags=[option, value])
    assert path.read_text() == "data"


# ── surroundings ─────────────────────────────────────────────────────────────────────────────────


def test_it_listens_on_loopback_and_its_own_sockets_only(started: NodeProcess) -> None:
    node, process = started, psutil.Process(started.pid)

    def inet() -> list[tuple[str, str]]:
        return [(c.laddr.ip, c.status) for c in process.net_connections(kind="inet")]

    assert eventually(lambda: inet() == [("127.0.0.1", "LISTEN")]), inet()
    made = {Path(str(c.laddr)).name for c in process.net_connections(kind="unix")} - {""}
    assert made == {"node.sock", "node.sock.rpc"}
    for name in made:
        assert stat.S_IMODE((node.directory / name).stat().st_mode) == 0o600


def test_without_metrics_it_has_no_tcp_socket_at_all(tmp_path: Path) -> None:
    with NodeProcess.start(tmp_path, flags=["--metrics", "off"]) as node:
        assert psutil.Process(node.pid).net_connections(kind="inet") == []


def test_it_leaves_no_name_in_shared_memory_and_keeps_prompts_out_of_cores(
    started: NodeProcess,
) -> None:
    node = started
    assert "/dev/shm" not in Path(f"/proc/{node.pid}/maps").read_text()
    targets = set(descriptors(node.pid))
    assert not [target for target in targets if target.startswith("/dev/shm")]
    assert {"/memfd:kvstore-arena (deleted)", "/memfd:kvstore-generations (deleted)"} <= targets
    smaps = Path(f"/proc/{node.pid}/smaps").read_text().split("memfd:kvstore-arena")[1]
    flags = next(line for line in smaps.splitlines() if line.startswith("VmFlags"))
    assert {"dc", "dd"} <= set(flags.split()), "neither copied on fork nor dumped"


def test_its_memory_is_the_arena_and_little_more(started: NodeProcess) -> None:
    node = started
    assert eventually(lambda: samples(node)['kvstore_ready_bytes{tier="dram"}'] == 64 << 20)
    info = psutil.Process(node.pid).memory_info()
    assert info.shared >= 64 << 20, "its own cgroup pays"
    assert info.rss < (64 << 20) + (128 << 20)


RUN_AS = """
import os, signal, sys
from kvstore.cli import main
from kvstore.node import node, process
from kvstore.supervisor import control, supervisor
from kvstore.net.process import Spawned, pair
import encodings.idna
def spawn():
    ours, its = pair()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        signal.set_wakeup_fd(-1)
        os._exit(process.main([str(its.detach()), str(parent)]))
    its.close()
    return Spawned(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ours)
def supervise(config, settings):
    start = supervisor.start_of(config, settings)
    sys.exit(supervisor.Supervisor(start, spawn=spawn).run())
supervisor.supervise = supervise
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
main.main()
"""
"""Changes user after the imports, and forks what is a program of its own otherwise: a venv below a
private home cannot be read by another user."""


def test_an_unprivileged_node_that_is_not_dumpable_still_checks_pidfds(
    open_directory: Path,
) -> None:
    os.chown(open_directory, 65534, 65534)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", RUN_AS.format(uid=65534), "node"),
            *("--socket", str(open_directory / "node.sock"), "--dram", "1MiB", "--metrics", "off"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "kvstore node ready" in process.stdout.readline()
        (pid, *_) = children_of(process.pid)
        assert psutil.Process(pid).uids().real == 65534
        assert os.stat(f"/proc/{pid}/fd").st_uid == 0, "not dumpable"
        with RawEngine(open_directory / "node.sock") as engine:
            engine.open()
            assert engine.session
    finally:
        process.terminate()
        process.communicate(timeout=10)
    assert process.returncode == 0


# ── pages ────────────────────────────────────────────────────────────────────────────────────────


def test_pages(started: NodeProcess) -> None:
    node = started
    assert page(node, "/healthz") == (200, "ok\n")
    with RawEngine(node.socket) as engine:
        engine.open()
        assert eventually(lambda: samples(node)["kvstore_connections"] == 2), "no others'"
    assert samples(node)["kvstore_loop_failures_total"] == 0
    assert page(node, "/")[1].startswith("<!doctype html>")
    assert page(node, "/favicon.ico")[0] == 404


def test_every_metric_in_the_table_is_exported_and_no_other(started: NodeProcess) -> None:
    exported = set()
    for line in page(started, "/metrics")[1].splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            exported.add((name, kind))
    assert exported == {(metric.name, metric.kind) for metric in METRICS}


def test_what_an_engine_does_is_counted(node: NodeProcess) -> None:
    with RawEngine(node.socket) as engine:
        engine.open()
        engine.store(make_keys(7))
        reply = engine.lease_stored(make_keys(7))
        story = Story("r", prompt_tokens=9 * BLOCK_TOKENS, loaded_tokens=7 * BLOCK_TOKENS)
        its = {"session": engine.session, "leases": [reply.lease], "saved_ns": 3 * NS_PER_S}
        assert engine.scheduler.send(msgspec.structs.replace(story, load_ns=NS_PER_S, **its))
        hit = 'kvstore_blocks_hit_total{tier="dram"}'
        assert eventually(lambda: samples(node)[hit] == 7)
        metrics = samples(node)
    assert metrics["kvstore_stores_sealed_total"] == 7
    assert metrics['kvstore_blocks_missed_total{reason="other"}'] == 2, "not asked for"
    of = '{model="model",tenant="default"}'
    assert metrics["kvstore_prompt_tokens_total" + of] == 9 * BLOCK_TOKENS
    assert metrics["kvstore_loaded_tokens_total" + of] == 7 * BLOCK_TOKENS
    assert metrics["kvstore_stored_bytes_total" + of] == 7 * BLOCK_BYTES
    assert metrics['kvstore_eviction_age_seconds_count{tier="dram"}'] == 0
    of_tier = of.replace("}", ',tier="dram"}')
    assert metrics["kvstore_saved_seconds_total" + of_tier] == 3
    assert metrics["kvstore_spent_seconds_total" + of_tier] == 1
    assert metrics['kvstore_blocks{tier="dram"}'] == 7
    assert metrics['kvstore_slots{state="sealed"}'] == 7
    assert metrics["kvstore_leases"] == 1
    assert metrics["kvstore_sessions"] == 1


def test_a_stopped_loop_is_not_healthy(started: NodeProcess) -> None:
    node = started
    node.pause()
    with pytest.raises(OSError, match="timed out"):
        urllib.request.urlopen(node.metrics_url.replace("metrics", "healthz"), timeout=0.3).read()
    node.resume()
    assert page(node, "/healthz") == (200, "ok\n")


def test_without_its_socket_file_it_is_not_healthy(node: NodeProcess) -> None:
    node.socket.unlink()
    status, text = page(node, "/healthz")
    assert status == 503
    assert text == f"{node.socket} is no longer this node's socket: restart it\n"


# ── configuration ────────────────────────────────────────────────────────────────────────────────


def test_a_taken_metrics_port_leaves_nothing_behind(node: NodeProcess, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    address = node.metrics_url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(NodeFailed, match="choose another --metrics") as caught:
        NodeProcess.start(other, flags=["--metrics", address])
    assert caught.value.code == 2
    assert [p.name for p in other.iterdir()] == ["node.log"]


def test_a_config_file_starts_a_node(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("slab: 128KiB\nallow-uid: 0\nlog-level: warning\n")
    with NodeProcess.start(tmp_path, dram="1MiB", flags=["--config", str(file)]) as node:
        assert "slab=128 KiB file=off dram=1 MiB" in node.ready_line
        stamp, _, line = node.ready_line.partition(" INFO kvstore.node.node: ")
        datetime.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
        assert line.startswith(f"kvstore node ready: version={__version__} socket=")
        assert node.log == "", "a start in which nothing is wrong says nothing at this level"


def test_a_node_ends_with_the_run_that_started_it_however_that_ends(tmp_path: Path) -> None:
    """Of a demo that was killed, a node stayed."""
    run = f"""if True:
        import pathlib, signal
        from kvstore.testing.process import NodeProcess
        node = NodeProcess.start(pathlib.Path({str(tmp_path)!r}))
        print(node.supervisor_pid, node.pid, flush=True)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
        assert len(pidfds) == 2
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 30)[0], "a process of the node lives on"
            os.close(pidfd)


# ── ranks that hold the same shard ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2)])
def test_a_block_is_stored_once_a_shard_and_read_by_every_rank(
    node: NodeProcess, ranks: int, replicas: int
) -> None:
    keys = make_keys(6)
    with RawEngine(node.socket, rank_count=ranks, replicas=replicas) as engine:
        engine.open()
        engine.store(keys)
        reply = engine.lease_stored(keys)
        for rank in range(ranks):
            expected = [engine.contents(key, rank=rank) for key in keys]
            assert engine.read(reply, rank=rank) == expected
        assert look(node).slots_sealed == len(keys) * ranks // replicas
        # One rank of four is enough to end the session.
        engine.ranks[-1].close()
        with pytest.raises(EngineGone, match="the rank detached"):
            engine.wait(lambda: False)
    assert eventually(lambda: look(node).slots_granted == 0)
