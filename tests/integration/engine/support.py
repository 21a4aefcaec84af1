"""What the engine tests share: a node for an engine, what it holds, and waiting with a bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.testing.process import NodeProcess
from tests.integration.node.conftest import eventually
from tests.kit.gauges import look

__all__ = [
    "BLOCK_TOKENS",
    "PATIENT",
    "attached",
    "blocks_in_dram",
    "blocks_on_disk",
    "cache_off_lines",
    "inspect",
    "node_for",
    "wait_until",
]

PATIENT: dict[str, object] = {"lookup_deadline_ms": 1000, "heartbeat_timeout_ms": 5000}
"""Where a test is about content, a busy machine must not turn hits into misses."""

WAIT_S = 60.0
_POLL_S = 0.05


@contextmanager
def node_for(
    engine: VllmServer, directory: Path, *, dram: str = "512MiB", flags: Sequence[str] = ()
) -> Iterator[NodeProcess]:
    """A new node where `engine` looks for one. They have met, and the engine's own cache is empty.

    `directory` has its log.
    """
    flags = ("--socket", str(engine.config.socket), *flags)
    with NodeProcess.start(directory, dram=dram, flags=flags) as node:
        # Before, there are few credits, and what has none is not stored.
        wait_until(lambda: has_all_its_memory(node), "memory has come", seconds=60)
        wait_until(lambda: attached(engine, node), "the engine attached", seconds=60)
        engine.forget()
        yield node


def has_all_its_memory(node: NodeProcess) -> bool:
    """Whether all pages of dram exist."""
    (dram,) = [tier for tier in inspect(node, "tiers") if tier["tier"] == "dram"]
    return bool(dram["ready_bytes"] == dram["capacity_bytes"])


def attached(engine: VllmServer, node: NodeProcess) -> bool:
    """Whether the node serves an engine, which is asked for something meanwhile, and once more: by
    then it has taken the credits that come with a session."""
    engine.warm_up()
    with suppress(OSError):  # it is being replaced
        if look(node).sessions > 0:
            engine.warm_up()
            return True
    return False


def cache_off_lines(engine: VllmServer) -> int:
    """How often it said that there is no node."""
    return engine.log.read_text().count("cache off, requests are computed")


def kvstore(node: NodeProcess, *arguments: str) -> Any:
    """The JSON of a command, as an operator types it; empty when it fails."""
    command = [sys.executable, "-m", "kvstore.cli.main", *arguments, "--json"]
    done = subprocess.run(
        [*command, "--socket", str(node.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def inspect(node: NodeProcess, what: str) -> Any:
    """`kvstore inspect WHAT`."""
    return kvstore(node, "inspect", what)[what]


def blocks_in_dram(node: NodeProcess) -> int:
    """Sealed blocks; of an engine of several ranks, their parts."""
    return look(node).slots_sealed


def blocks_on_disk(node: NodeProcess) -> int:
    """Blocks that the node's file tier holds."""
    return look(node).blocks_file


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_S) -> None:
    """Poll with a bound; fails with what was waited for."""
    assert eventually(condition, timeout_s=seconds), f"not within {seconds} s: {what}"
