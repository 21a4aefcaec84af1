"""`python tests/faults/small_segments.py node …`: kvstore with segments of a few blocks.

So that each few blocks begin, close, sync and reclaim a segment. A disk that failed is tried again
after 10 ms.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from kvstore.cli import main
from kvstore.config import node as config
from kvstore.config.node import NodeConfig
from kvstore.net.process import spawn
from kvstore.node import process
from kvstore.supervisor import supervisor
from kvstore.supervisor.supervisor import Supervisor, start_of
from kvstore.tiers.file.config import FileConfig

SEGMENT_BYTES = 1280 << 10
"""Four blocks of 256 KiB with their pages, and the footer."""


def small_segments(*values: Any, **named: Any) -> FileConfig:
    """As the node makes it, and this."""
    return FileConfig(*values, **{**named, "segment_bytes": SEGMENT_BYTES, "cooldown_ms": 10})


def supervise(node: NodeConfig, settings: dict[str, Any]) -> NoReturn:
    """In this process: its node processes are this program again."""
    start = start_of(node, settings)
    sys.exit(Supervisor(start, spawn=lambda: spawn((__file__, "process"))).run())


if __name__ == "__main__":
    if sys.argv[1] == "process":
        setattr(small_segments, "queued_bytes_max", FileConfig.queued_bytes_max)  # noqa: B010
        setattr(config, "FileConfig", small_segments)  # noqa: B010 -- a name it does not export
        sys.exit(process.main(sys.argv[2:]))
    setattr(supervisor, "supervise", supervise)  # noqa: B010 -- it would replace this program
    main.main()
