"""KV events of a real node: an outside indexer knows what is held, whatever happens to either."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvstore.installation import lacking
from kvstore.testing.process import NodeFailed, NodeProcess, stop_process
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine, make_keys
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore
from tests.kit.event_indexer import Indexer
from tests.kit.processes import event_endpoints

pytestmark = pytest.mark.slow

TCP = ("--events", "tcp://127.0.0.1:0", "--node-name", "n1")


def knows(indexer: Indexer, medium: str, keys: list[bytes]) -> bool:
    """Whether the indexer comes to hold exactly these keys."""

    def asks() -> bool:
        indexer.listen(timeout_s=0.0)
        indexer.catch_up()
        return indexer.keys(medium) == set(keys)

    return eventually(asks)


def clear(node: NodeProcess) -> None:
    assert kvstore("clear", "--socket", str(node.socket)).returncode == 0


def test_what_is_stored_evicted_and_cleared_is_told(tmp_path: Path) -> None:
    keys = make_keys(40)
    with (
        NodeProcess.start(tmp_path, dram="1MiB", flags=TCP) as node,  # 16 slots
        RawEngine(node.socket, tenant="team", model="llama") as engine,
        Indexer(*event_endpoints(node)) as indexer,
    ):
        engine.open()
        engine.store(keys[:3])
        assert knows(indexer, "CPU", keys[:3])
        engine.store(keys[3:])
        engine.lease_stored(keys[-1:])

        def knows_the_last() -> bool:
            indexer.catch_up()
            return keys[-1] in indexer.keys("CPU")

        assert eventually(knows_the_last)
        assert 0 < len(indexer.held) <= 16
        assert {(tenant, shard) for _, tenant, _, shard, _ in indexer.held} == {
            ("team", (0, 4, 0, 4))
        }
        assert indexer.hashes["CPU"] == {
            int.from_bytes(key[-8:], "big") for key in indexer.keys("CPU")
        }
        clear(node)
        assert knows(indexer, "CPU", [])
        assert indexer.hashes["CPU"] == set()
        assert indexer.incarnation in node.ready_line
        assert indexer.snapshots == 0


def test_live_events_come_by_themselves_and_say_whose_they_are(tmp_path: Path) -> None:
    flags = [*TCP, "--event-hashes", "bytes"]
    with (
        NodeProcess.start(tmp_path, flags=flags) as node,
        RawEngine(node.socket, model="llama") as engine,
        Indexer(*event_endpoints(node)) as indexer,
    ):
        engine.open()
        stored: list[bytes] = []

        def heard() -> bool:  # stores until the subscription has arrived at the node
            more = make_keys(1, seed=str(len(stored)))
            engine.store(more)
            stored.extend(more)
            indexer.listen(timeout_s=0.1)
            return "kv@n1@llama" in indexer.topics

        assert eventually(heard)
        assert knows(indexer, "CPU", stored)
        at_the_start = {"kv@n1@"}  # all is cleared then, of any model
        assert indexer.topics - at_the_start == {"kv@n1@llama"}
        assert indexer.hashes["CPU"] == set(stored)
        (batch, *_) = (payload for number, payload in indexer._ask(bytes(8)) if number == 1)
        about = msgspec.msgpack.decode(batch)[1][0]["kvstore"]
        assert (about["node"], about["label"]) == ("n1", "llama")
        assert about["block_tokens"] == BLOCK_TOKENS


def test_blocks_on_disk_are_told_and_told_again_after_a_restart(tmp_path: Path) -> None:
    keys = make_keys(5)
    flags = [
        *("--events", f"ipc://{tmp_path}/events", "--event-hashes", "int"),
        *("--file", f"{tmp_path}/files:64MiB"),
    ]
    with (
        NodeProcess.start(tmp_path, flags=flags) as node,
        RawEngine(node.socket) as engine,
        Indexer(*event_endpoints(node)) as indexer,
    ):
        engine.open()
        engine.store(keys)
        assert knows(indexer, "STORAGE", keys)
        assert indexer.keys("CPU") == set(keys)
        first = indexer.incarnation
        for name in ("events", "events.replay"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert node.stop() == 0
        assert not (tmp_path / "events").exists()
        with (
            NodeProcess.start(tmp_path, flags=flags) as again,
            Indexer(*event_endpoints(again)) as late,
        ):
            assert knows(late, "STORAGE", keys)
            assert late.keys("CPU") == set()
            assert late.incarnation != first
            # Who remembers the old node asks for a number that was never there.
            indexer.next_number = 0
            assert knows(indexer, "STORAGE", keys)
            assert indexer.keys("CPU") == set()


DEAF = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
print("connected", flush=True)
socket.recv()
print("hears", flush=True)
sys.stdin.read()
"""


def test_a_subscriber_that_is_stopped_or_killed_slows_nobody(tmp_path: Path) -> None:
    keys = make_keys(30)
    with (
        NodeProcess.start(tmp_path, flags=TCP) as node,
        RawEngine(node.socket) as engine,
        Indexer(*event_endpoints(node)) as indexer,
        subprocess.Popen(
            [sys.executable, "-c", DEAF, event_endpoints(node)[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as deaf,
    ):
        assert deaf.stdout is not None
        engine.open()
        try:
            assert deaf.stdout.readline() == "connected\n"
            stop_process(deaf.pid)
            engine.store(keys[:10])
            assert knows(indexer, "CPU", keys[:10])
            deaf.send_signal(signal.SIGKILL)
            assert deaf.wait(10) == -signal.SIGKILL
            engine.store(keys[10:])
            assert knows(indexer, "CPU", keys)
        finally:
            deaf.kill()
    assert "Traceback" not in node.log


def test_a_killed_node_leaves_an_address_that_the_next_one_takes(tmp_path: Path) -> None:
    flags = ["--events", f"ipc://{tmp_path}/events"]
    with NodeProcess.start(tmp_path, flags=flags) as node:
        node.kill()
    with (
        NodeProcess.start(tmp_path, flags=flags) as node,
        Indexer(*event_endpoints(node)) as indexer,
    ):
        assert knows(indexer, "CPU", [])
        assert indexer.incarnation


def test_a_taken_address_is_one_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with NodeProcess.start(tmp_path, flags=TCP) as node:
        with pytest.raises(NodeFailed, match="choose another --events") as caught:
            NodeProcess.start(other, flags=["--events", event_endpoints(node)[0]])
        assert caught.value.code == 2
        assert caught.value.stderr.count("\n") == 1


def test_without_pyzmq_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError\n")
    command = [
        *(sys.executable, "-m", "kvstore.cli.main", "node", "--dram", "1MiB", "--metrics", "off"),
        *("--socket", str(tmp_path / "node.sock"), "--events", "tcp://127.0.0.1:0"),
    ]
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr == f"kvstore: {lacking('--events', 'pyzmq', 'events')}\n"
