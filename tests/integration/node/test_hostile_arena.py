"""An engine turns the arena's descriptor against the node: it costs the node neither its process
nor what it holds."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from kvstore.serve.upgrade import ask_for_upgrade
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.integration.node.hostile import Hostile, lock

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
            assert f": {COUNT} blocks" in ask_for_upgrade(node.socket, timeout_s=30)
        with RawEngine(node.socket, timeout_s=30) as engine:
            engine.open()
            assert engine.read(engine.lease(keys)) == [engine.contents(key) for key in keys]
        assert "lost" not in node.log
