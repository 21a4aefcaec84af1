"""What the engine tests share: what the node holds, and waiting for it with a bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore.testing.models import BLOCK_TOKENS
from kvstore.testing.process import NodeProcess

__all__ = ["BLOCK_TOKENS", "PATIENT", "blocks_in_dram", "blocks_on_disk", "inspect", "wait_until"]

PATIENT: dict[str, object] = {"lookup_deadline_ms": 1000, "heartbeat_timeout_ms": 5000}
"""Where a test is about content, a busy machine must not turn hits into misses."""

WAIT_S = 10.0
_POLL_S = 0.05


def inspect(node: NodeProcess, what: str) -> Any:
    """`kvstore inspect WHAT --json`, as an operator would."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore.serve.main", "inspect", what),
            *("--json", "--socket", str(node.socket)),
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    return json.loads(done.stdout)[what]


def blocks_in_dram(node: NodeProcess) -> int:
    """Sealed blocks."""
    (dram,) = [tier for tier in inspect(node, "tiers") if tier["tier"] == "dram"]
    return int(dram["slots_sealed"])


def blocks_on_disk(node: NodeProcess) -> int:
    """Blocks that the node's file tier holds."""
    (file,) = [tier for tier in inspect(node, "tiers") if tier["tier"] == "file"]
    return int(file["blocks"])


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_S) -> None:
    """Poll with a bound; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        threading.Event().wait(_POLL_S)
