"""Waiting until a node and the engine on it have come to rest, as benchmarks need it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstore.cli.ask import NodeClient
from kvstore.demo.engine import VllmServer
from kvstore.engine import NodeReport, TierReport
from kvstore.testing.process import NodeProcess

TIMEOUT_S: Final = 60.0


def settled(engine: VllmServer, node: NodeProcess, enough: Callable[[int, int], bool]) -> int:
    """Wait until the engine is attached, all of dram is there, and `enough` of (blocks in dram,
    blocks on disk). Returns the blocks on disk.

    Raises:
        TimeoutError: it took too long.
    """
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.closing(NodeClient(node.socket)) as client:
        while time.monotonic() < deadline:
            engine.warm_up()  # an idle engine looks for nobody
            sessions = sum(row.sessions for row in client.rows("nodes", NodeReport))
            tiers = {row.tier: row for row in client.rows("tiers", TierReport)}
            ready = tiers["dram"].ready_bytes == tiers["dram"].capacity_bytes
            if sessions and ready and enough(tiers["dram"].blocks, tiers["file"].blocks):
                return tiers["file"].blocks
            threading.Event().wait(0.05)
    raise TimeoutError("The node did not come to rest; see its log.")
