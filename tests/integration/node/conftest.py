"""Real node processes, one for each test or module, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvstore.client.index import IndexUnavailable
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectStub
from kvstore.testing.process import NodeProcess, popen_tied
from tests.kit.gauges import descriptors


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess.start(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node for all tests of a module that leave it as it was, started as users start it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.testing.process.launch", popen_tied)
        node = NodeProcess.start(tmp_path_factory.mktemp("node"))
    with node:
        yield node


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach. Not in pytest's: tests that run beside this one would
    share the modes of its parents."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def peer_descriptors(node: NodeProcess) -> tuple[int, int]:
    """How many (sockets, pidfds) the node has open."""
    names = descriptors(node.pid)
    sockets = sum(name.startswith("socket:") for name in names)
    return sockets, sum("pidfd" in name for name in names)


def resident_bytes(node: NodeProcess) -> int:
    """Memory of the node itself, the arena left out."""
    info = psutil.Process(node.pid).memory_info()
    return int(info.rss - info.shared)


def rows(node: NodeProcess, topic: str) -> list[dict[str, Any]]:
    """What `kvstore inspect TOPIC` asks a node for, without the command."""
    with grpc.insecure_channel(f"unix:{node.socket}.rpc") as channel:
        answer = InspectStub(channel).Rows(pb.RowsRequest(topic=topic), timeout=30)
    found: list[dict[str, Any]] = json.loads(answer.rows)
    return found


def tiers(node: NodeProcess) -> dict[str, dict[str, Any]]:
    """Its tiers, by name."""
    return {tier["tier"]: tier for tier in rows(node, "tiers")}


def has_all_dram(node: NodeProcess) -> bool:
    """Whether all of it is ready: before, what comes from a disk may find no room."""
    dram = tiers(node)["dram"]
    return bool(dram["ready_bytes"] == dram["capacity_bytes"])


def eventually(check: Callable[[], bool], *, timeout_s: float = 60.0) -> bool:
    """True when `check` is, seen a tenth of the wait later at most; for what another process does
    in its own time. An index that is late, on a machine that others use too, has not answered yet.
    """
    begun_s = time.monotonic()
    pause = threading.Event()
    while True:
        with contextlib.suppress(IndexUnavailable):
            if check():
                return True
        waited_s = time.monotonic() - begun_s
        if waited_s > timeout_s:
            return False
        pause.wait(min(max(waited_s / 10, 0.01), 0.25))
