"""Messages of any thread for the thread of a loop that sleeps on descriptors.

    any thread ── put ──▶ Mailbox ── take ──▶ the loop's thread
    any thread ── set ──▶ Wake ──── clear ──▶ …, where what it looks at has a queue of its own

Covers: locks and the eventfd. Does not cover: work for an asyncio loop, which has
`call_soon_threadsafe`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Wake:
    """A descriptor that is readable from `set` to the next `clear`. After `close` both do nothing,
    so that a late thread does not write to another file that got the descriptor's number."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()
        """Reentrant: a signal's handler may call `set` while its thread is in `set`."""

    def fileno(self) -> int:
        """The descriptor to wait on; -1 once closed."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable. Safe in a signal handler."""
        with self._lock:
            while self._fd >= 0:
                # Python tries every call again that a signal interrupted, but not this one.
                with contextlib.suppress(InterruptedError):
                    os.eventfd_write(self._fd, 1)
                    return

    def clear(self) -> None:
        """End the readable state; called before looking for work, so that no wake is lost."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


class Mailbox(Generic[_T]):
    """Messages in order, each taken once."""

    def __init__(self, count_max: int = sys.maxsize) -> None:
        self._count_max = count_max
        self._waiting: deque[_T] = deque()
        self._lock: contextlib.AbstractContextManager[object] = threading.Lock()
        self._wake = Wake()
        self.has_ended = False
        """Whether `end` was called, so that nothing more comes; the loop checks this before each
        wait."""

    def fileno(self) -> int:
        """Readable while messages wait, and once when it ends."""
        return self._wake.fileno()

    # ── of any thread ────────────────────────────────────────────────────────────────────────────

    def put(self, *messages: _T) -> bool:
        """Add messages. False: none was added, because the mailbox has ended or `count_max`
        messages wait."""
        with self._lock:
            if self.has_ended or len(self._waiting) >= self._count_max:
                return False
            self._waiting += messages
            if messages:
                self._wake.set()
        return True

    def end(self) -> None:
        """Nothing is put from now on; what waits can be taken. Safe in a signal handler."""
        self.has_ended = True
        self._wake.set()

    # ── of the loop's thread ─────────────────────────────────────────────────────────────────────

    def take(self) -> Iterator[_T]:
        """Take waiting messages one by one, each when the iterator reaches it: neither a caller
        that stops early nor a call that fails loses one."""
        while True:
            with self._lock:
                if len(self._waiting) <= 1:
                    self._wake.clear()
                if not self._waiting:
                    return
                message = self._waiting.popleft()
            yield message

    def close(self) -> None:
        """End it, and close the descriptor."""
        self.end()
        with self._lock:
            self._wake.close()
