"""The node of the kill cycles: started, killed part by part, and brought back.

Of a node two parts can be killed: the process that serves, which another one follows on the same
memory, and the supervisor, with which everything goes. Does not cover: when (`kills`).
"""

from __future__ import annotations

import concurrent.futures
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from kvstore.testing.process import NodeFailed, NodeProcess, children_of
from tests.kit.gauges import descriptors, look, processes

DRAM: Final = "8MiB"
FILE: Final = "256MiB"
SERVING_S: Final = 30.0
"""A restart takes a second, on a busy machine several."""
_POLL_S: Final = 0.005
_ALL_KNOWN: Final = "records of the disk tier are indexed"


class Host:
    """The node: started, killed part by part, and brought back."""

    PARTS: Final = ("node", "supervisor")

    def __init__(self, directory: Path) -> None:
        self.store = directory / "store"
        self._directory = directory
        self._known_before = 0
        self.node = self._start()

    def _start(self) -> NodeProcess:
        self._known_before = self._known_count()
        flags = ("--file", f"{self.store}:{FILE}")
        return NodeProcess.start(self._directory, dram=DRAM, flags=flags)

    def kill(self, part: str) -> None:
        """The supervisor, and all with it; or the node process, which another one follows."""
        self._known_before = self._known_count()
        if part == "supervisor":
            self.node.kill()
        else:
            with suppress(ProcessLookupError):  # its supervisor has given up, and all ended
                self.node.crash()

    def kill_while_starting(self, part: str, mark: str) -> None:
        """Kill it, and the next one as soon as that has `mark` open."""
        self.kill(part)
        if part == "node":
            self._kill_at(mark, self._serving)
            return
        others = children_of(os.getpid())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._start)

            def started() -> list[int]:
                new = [pid for pid in children_of(os.getpid()) if pid not in others]
                return [*new, *[0] * future.done()]

            self._kill_at(mark, started)
        try:
            self.node = future.result()
        except NodeFailed as failed:
            if failed.code != -signal.SIGKILL:
                raise

    def _serving(self) -> list[int]:
        return processes(self.node)[1:2] if self.running else [0]

    def _kill_at(self, mark: str, candidates: Callable[[], list[int]]) -> None:
        """Until one of them has it open and is killed, or there is a 0 among them, or too late."""
        deadline_s = time.monotonic() + SERVING_S
        while time.monotonic() < deadline_s:
            for pid in candidates():
                if pid == 0:
                    return
                family = [pid, *children_of(pid)]
                if any(mark in name for each in family for name in descriptors(each)):
                    with suppress(ProcessLookupError):
                        _kill(family)
                    return
            threading.Event().wait(_POLL_S / 5)

    @property
    def running(self) -> bool:
        return self.node.process.poll() is None

    def restore(self) -> None:
        """Serving again; started, if its supervisor is gone or gave up."""
        deadline_s = time.monotonic() + SERVING_S
        while self.running and time.monotonic() < deadline_s:
            with suppress(OSError):
                look(self.node)
                return
            threading.Event().wait(_POLL_S)
        assert not self.running, f"the node does not serve again: {self.node.log[-2000:]}"
        self.close()
        self.node = self._start()

    @property
    def knows_its_disk(self) -> bool:
        """Whether everything that lay there at its start can be found."""
        return self._known_count() > self._known_before

    def _known_count(self) -> int:
        log = self._directory / "node.log"
        return log.read_text().count(_ALL_KNOWN) if log.exists() else 0

    def close(self) -> None:
        with self.node:
            pass


def _kill(family: list[int]) -> None:
    """Kill a process, and wait until its children have ended, too: a node that has not noticed yet
    that its supervisor was killed still answers `restore`."""
    with ExitStack() as stack:
        pidfds = [os.pidfd_open(pid) for pid in family]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], SERVING_S)[0], "a process outlived its parent"
