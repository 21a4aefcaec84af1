"""`python bench/sparse_node.py node …`: kvstore with more dram than the machine has.

Pages of the arena are taken when they are written to, not ahead; so a node can know a million
blocks whose bytes nobody ever wrote. For measuring metadata.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from kvstore.arena import Arena
from kvstore.cli import main
from kvstore.config import node as config
from kvstore.config.node import NodeConfig
from kvstore.net.process import spawn
from kvstore.node import process
from kvstore.supervisor import child, supervisor
from kvstore.supervisor.supervisor import Supervisor, start_of
from kvstore.units import TIB


def supervise(made: NodeConfig, settings: dict[str, Any]) -> NoReturn:
    """In this process: its node processes are this program again."""
    start = start_of(made, settings)
    sys.exit(Supervisor(start, spawn=lambda: spawn((__file__, "process"))).run())


if __name__ == "__main__":
    setattr(Arena, "populate", lambda _arena, _begin, _end: None)  # noqa: B010
    setattr(config, "available_memory", lambda: (TIB, "nobody"))  # noqa: B010
    setattr(child, "SOON_NS", 0)  # noqa: B010 -- killed as often as anybody likes
    setattr(supervisor, "supervise", supervise)  # noqa: B010 -- it would replace this program
    if sys.argv[1] == "process":
        sys.exit(process.main(sys.argv[2:]))
    main.main()
