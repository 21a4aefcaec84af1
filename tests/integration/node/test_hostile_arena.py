"""An engine turns the arena's descriptor against the node: it costs the node neither its process
nor what it holds."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.supervisor.sockets import ask_for_upgrade
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.integration.node.conftest import eventually
from tests.integration.node.hostile import Hostile, lock, punch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

COUNT = 20


@pytest.mark.parametrize("kind", [fcntl.F_RDLCK, fcntl.F_WRLCK], ids=["read", "write"])
@pytest.mark.parametrize("end", ["killed", "upgraded"])
def test_a_lock_on_the_arena_is_nobodys_business(tmp_path: Path, kind: int, end: str) -> None:
    keys = make_keys(COUNT)
    with NodeProcess.start(tmp_path) as node:
        with RawEngine(node.socket) as engine, Hostile(node.socket) as hostile:
            engine.open()
            engine.store(keys)
            engine.lease_stored(keys)
            hostile.does(lock, kind)
        # Its process is gone, and its lock is not: the open file is the supervisor's, too.
        if end == "killed":
            node.crash()
        else:
            assert f": {COUNT} blocks" in ask_for_upgrade(node.socket)
        with RawEngine(node.socket, timeout_s=30) as engine:
            engine.open()
            assert engine.read(engine.lease(keys)) == [engine.contents(key) for key in keys]
        assert "lost" not in node.log


ROUNDS = 20


def is_right(engine: RawEngine, keys: list[bytes]) -> tuple[int, int]:
    """Of what is leased of these keys: blocks, and those that a reader that verifies them takes."""
    reply = engine.lease(keys)
    blocks = engine.read(reply)
    good = sum(
        engine._checksum(0, key, np.frombuffer(block, np.uint64)) == engine.checksum(0, key)
        for key, block in zip(keys, blocks, strict=False)
    )
    assert good == sum(
        block == engine.contents(key) for key, block in zip(keys, blocks, strict=False)
    ), "its checksum is right and its bytes are not"
    engine.release(reply)
    return len(blocks), good


def test_an_arena_full_of_holes_costs_blocks_and_never_the_node(tmp_path: Path) -> None:
    flags = ["--file", f"{tmp_path / 'files'}:64MiB", "--scrub", "1GiB"]
    old, spared = make_keys(COUNT), make_keys(COUNT, seed="spared")
    with NodeProcess.start(tmp_path, dram="16MiB", flags=flags) as node:
        pid = node.pid
        with RawEngine(node.socket) as engine, Hostile(node.socket) as hostile:
            engine.open()
            engine.store(old)
            engine.lease_stored(old)
            for number in range(ROUNDS):
                # While it serves, stores, writes to disk, scrubs, and reads from disk what it lost.
                hostile.begin(punch, 50)
                engine.store(make_keys(2, seed=f"round {number}"))
                is_right(engine, old)
                hostile.end()
            assert eventually(lambda: "an attached engine gave" in node.log, timeout_s=60)
            hostile.does(punch, 1)
            engine.store(spared)
            engine.lease_stored(spared)
            assert is_right(engine, spared) == (COUNT, COUNT), "it serves as ever"
            found = re.compile(r"scrub of dram: .* \(first: ")
            assert eventually(lambda: found.search(node.log) is not None, timeout_s=60)
        assert node.pid == pid, "the same process"
        assert "Traceback" not in node.log
        assert node.stop() == 0
