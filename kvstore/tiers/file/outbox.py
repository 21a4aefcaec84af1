"""Events on their way to the driver: a list behind a lock, and an eventfd that says "look".

Thread safe. Bounded by what is under way: a job has at most three events, a reclaim one; the flood
at start, `Known`, waits for the driver (`known`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Final

from kvstore.tiers.file.events import FileEvent, Known
from kvstore.wire.record import Void

KNOWN_MAX: Final = 4
"""`Known` events that wait for the driver; then recovery waits too. Few, since a driver takes them
all at once and its step should be short."""


class Outbox:
    """`fd` is readable while there is something to take."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Condition()
        self._events: list[FileEvent] = []
        self._known_count = 0
        self._voids: list[Void] = []
        self._is_recovering = True
        self._is_closed = False

    def put(self, events: Iterable[FileEvent]) -> None:
        with self._lock:
            self._add(list(events))

    def known(self, event: Known, *, own: bool) -> bool:
        """Hand over, waiting for the driver if need be. False: closed, stop.

        Records of this node are left out when a void came after recovery had begun: it covers all
        that recovery finds.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._is_closed or self._known_count < KNOWN_MAX)
            if self._is_closed:
                return False
            if not (own and any(void.covers(event.scope) for void in self._voids)):
                self._known_count += 1
                self._add([event])
            return True

    def void(self, void: Void) -> None:
        """Nothing that it covers is announced any more, not even what waits to be taken."""
        with self._lock:
            if self._is_recovering:
                self._voids.append(void)
            kept = [e for e in self._events if not (isinstance(e, Known) and void.covers(e.scope))]
            self._known_count -= len(self._events) - len(kept)
            self._events = kept
            self._lock.notify_all()

    def recovered(self) -> None:
        """Recovery is over: voids need not be remembered here."""
        with self._lock:
            self._is_recovering = False
            self._voids.clear()

    def take(self) -> list[FileEvent]:
        """All events so far, in order. Never blocks."""
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.fd)
            events, self._events = self._events, []
            self._known_count = 0
            self._lock.notify_all()
            return events

    def stop(self) -> None:
        """Nobody waits in `known` any more."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    def close(self) -> None:
        """Close the descriptor; what is left can still be taken."""
        self.stop()
        with self._lock:
            os.close(self.fd)
            self.fd = -1

    def _add(self, events: list[FileEvent]) -> None:
        self._events += events
        if events and self.fd >= 0:
            ring(self.fd)


def ring(fd: int) -> None:
    """Make an eventfd readable. Python tries every call again that a signal interrupted, but not
    this one."""
    while True:
        try:
            os.eventfd_write(fd, 1)
        except InterruptedError:
            continue
        return
