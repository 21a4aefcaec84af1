"""The exchange between a worker's two threads: plans one way, results the other.

    engine's thread ── submit, keep_off, wait_for_load, take_report ──▶ Handoff ◀── copy thread
                                                                 (one lock, one RankCore, one wake)

The lock is held for bookkeeping only, never while bytes move. Covers: locking, waiting, waking.
Does not cover: decisions (`kvstore.client.core.rank`), copying (`copier.py`).
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.client.core.plan import RankReport, StepPlan
from kvstore.client.core.rank import RankCore
from kvstore.mailbox import Wake

SELECT_FD_END = 1024
"""Descriptors from here on are too large for `select`, which alone can wait less than 1 ms."""


class Handoff:
    """One per rank. Methods say which thread may call them."""

    def __init__(self, core: RankCore) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.wake = Wake()
        """Set when there may be something to do. The copy thread clears it before it looks for
        work, so that no wake is lost; it is closed by the thread that saw the copy thread end."""
        self.stopping = False
        self._is_over: Callable[[], bool] | None = None
        """Condition that the engine's thread waits for. The copy thread checks it, since a wake in
        vain costs every block a change of threads."""

    # ── engine's thread ──────────────────────────────────────────────────────────────────────────

    def submit(self, plan: StepPlan, after: int = 0) -> None:
        """Queue a step's jobs and wake the copy thread. `after`: mark of the engine's work that
        must be done before their copies (`CopyEngine.mark`)."""
        with self._lock:
            self._core.submit(plan, after)
        self.wake.set()

    def keep_off(self, block_ids: Sequence[int], *, timeout_s: float) -> bool:
        """Wait until no store reads these engine blocks, which are about to be overwritten. After
        `timeout_s` such stores are abandoned and the answer is False.

        Right in both cases: bytes read too late are discarded.
        """
        with self._changed:
            if not self._core.fence(block_ids):
                return True
            self.wake.set()
            if self._wait(lambda: not self._core.fence(block_ids), timeout_s):
                return True
            self._core.give_up(block_ids)
            return False

    def settle(self, block_ids: Sequence[int]) -> None:
        """The engine overwrites these blocks already: see `RankCore.settle`."""
        with self._lock:
            self._core.settle(block_ids)

    def wait_for_load(self, timeout_s: float) -> None:
        """Wait until all loads of a request have ended, at most `timeout_s`; no wait if none
        runs."""
        with self._changed:
            self._wait(lambda: self._core.has_loaded_request or not self._core.has_loads, timeout_s)

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        self._is_over = is_over
        try:
            return self._changed.wait_for(is_over, timeout_s)
        finally:
            self._is_over = None

    def take_report(self) -> RankReport:
        """Results since the last call."""
        with self._lock:
            return self._core.take_report()

    def stop(self) -> None:
        """Ask the copy thread to end after the copy in flight."""
        self.stopping = True
        self.wake.set()

    # ── copy thread ──────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def core(self) -> Iterator[RankCore]:
        """Lock the core. At the end the engine's waiting thread wakes if its condition holds."""
        with self._changed:
            yield self._core
            if self._is_over is not None and self._is_over():
                self._changed.notify()

    def await_wake(self, timeout_s: float) -> None:
        """Wait until there may be something to do; finer than a millisecond."""
        if (fd := self.wake.fileno()) < SELECT_FD_END:
            select.select([fd], [], [], timeout_s)
        else:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(1)
        self.wake.clear()
