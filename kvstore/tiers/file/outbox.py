"""Events on their way to the driver: a list behind a lock, and an eventfd that says "look".

Thread safe. Bounded by what is under way: a job has at most three events, a reclaim one; the flood
at start, `FileKnown`, waits for the driver (`known`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from kvstore.mailbox import Wake
from kvstore.tier_events import FileGone, FileKnown, FileMoved, FileReclaim, FileTierEvent
from kvstore.wire.record import Void

KNOWN_MAX: Final = 4
"""`FileKnown` events that wait for the driver; then recovery waits too. Few, since the end of a
read waits behind them."""
_LONG: Final = (FileGone, FileKnown, FileMoved, FileReclaim)


class Outbox:
    """`fileno` is readable while there is something to take."""

    def __init__(self) -> None:
        self._wake = Wake()
        self.fileno = self._wake.fileno
        self._lock = threading.Condition()
        self._events: deque[FileTierEvent] = deque()
        self._known_count = 0
        self._voids: list[Void] = []
        self._is_recovering = True
        self._is_closed = False

    def put(self, events: Iterable[FileTierEvent]) -> None:
        with self._lock:
            self._add(list(events))

    def known(self, event: FileKnown, *, own: bool) -> bool:
        """Hand over blocks that were found, waiting for the driver if need be. False: closed, stop.

        With `own`, records of this node, they are left out if a void that came after recovery had
        begun covers them: it covers all that recovery finds.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._is_closed or self._known_count < KNOWN_MAX)
            if self._is_closed:
                return False
            if not (own and any(void.covers(event.scope) for void in self._voids)):
                self._add([event])
            return True

    def void(self, void: Void) -> None:
        """Drop the `FileKnown` events that this void covers: those that wait to be taken, and those
        of this node that recovery has yet to find."""
        with self._lock:
            if self._is_recovering:
                self._voids.append(void)
            events, self._events = self._events, deque()
            for event in events:
                if isinstance(event, FileKnown) and void.covers(event.scope):
                    self._known_count -= 1
                else:
                    self._events.append(event)
            self._lock.notify_all()

    def recovered(self) -> None:
        """Recovery is over: voids need not be remembered here."""
        with self._lock:
            self._is_recovering = False
            self._voids.clear()

    def take(self) -> Iterator[FileTierEvent]:
        """Events in order, up to the first that is long for the engine: it must serve others in
        between. Each is taken when it is asked for, and `fileno` stays readable while there is
        more: neither a caller that stops early nor a call that fails loses one. Never blocks."""
        event: FileTierEvent | None = None
        while not isinstance(event, _LONG):
            with self._lock:
                if len(self._events) <= 1:
                    self._wake.clear()
                if not self._events:
                    return
                event = self._events.popleft()
                if isinstance(event, FileKnown):
                    self._known_count -= 1
                    self._lock.notify_all()
            yield event

    def stop(self) -> None:
        """End all waits in `known`, which returns False from now on."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    def close(self) -> None:
        """Close the descriptor; what is left can still be taken."""
        self.stop()
        self._wake.close()

    def _add(self, events: list[FileTierEvent]) -> None:
        self._events += events
        self._known_count += sum(isinstance(event, FileKnown) for event in events)
        if events:
            self._wake.set()
