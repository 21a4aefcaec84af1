"""Wait until a node and its engine are at rest, for benchmarks."""

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
    """Wait until the engine is attached, all of dram is ready, and `enough` of (blocks in dram,
    blocks on disk). Returns the blocks on disk.

    Raises:
        TimeoutError: not within TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.closing(NodeClient(node.socket)) as client:
        while time.monotonic() < deadline:
            engine.warm_up()  # an idle engine does not attach
            sessions = sum(row.sessions for row in client.rows("nodes", NodeReport))
            tiers = {row.tier: row for row in client.rows("tiers", TierReport)}
            ready = tiers["dram"].ready_bytes == tiers["dram"].capacity_bytes
            if sessions and ready and enough(tiers["dram"].blocks, tiers["file"].blocks):
                return tiers["file"].blocks
            threading.Event().wait(0.05)
    raise TimeoutError("The node did not come to rest; see its log.")
