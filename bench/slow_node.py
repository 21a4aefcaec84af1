"""`python bench/slow_node.py PACE_FILE node …`: kvstore, with a disk as slow as PACE_FILE says.

The file holds nanoseconds per byte and is read before every call, so the pace can change at any
time. All reads and writes of blocks share one disk: a call waits until those before it are through.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvstore.cli import main
from kvstore.config.node import NodeConfig
from kvstore.net.process import spawn
from kvstore.node import process
from kvstore.supervisor import supervisor
from kvstore.supervisor.supervisor import Supervisor
from kvstore.tiers.file import tier
from kvstore.tiers.file.disk import Disk


class SlowDisk(Disk):
    """The real disk, at a pace."""

    pace_file = Path()

    def __init__(self) -> None:
        self._disk = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._paced(lambda: Disk.preadv(self, fd, buffers, offset))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._paced(lambda: Disk.pwritev(self, fd, buffers, offset))

    def _paced(self, call: Callable[[], int]) -> int:
        with self._disk:
            begun_s = time.monotonic()
            count = call()
            left = count * float(self.pace_file.read_text()) / 1e9 - (time.monotonic() - begun_s)
            if left > 0:
                threading.Event().wait(left)
            return count


def supervise(config: NodeConfig, settings: dict[str, Any]) -> NoReturn:
    """In this process: its node processes are this program again."""
    program = (__file__, str(SlowDisk.pace_file), "process")
    start = supervisor.start_of(config, settings)
    sys.exit(Supervisor(start, spawn=lambda: spawn(program)).run())


if __name__ == "__main__":
    SlowDisk.pace_file = Path(sys.argv.pop(1))
    if sys.argv[1] == "process":
        setattr(tier, "Disk", SlowDisk)  # noqa: B010 -- a name that it does not export
        sys.exit(process.main(sys.argv[2:]))
    setattr(supervisor, "supervise", supervise)  # noqa: B010 -- it would replace this program
    main.main()
