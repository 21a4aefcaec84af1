"""Parts that the threads of a tier share: breakers of its disk, events on their way to the driver,
jobs of one kind with their limits and deadlines.

Three breakers (`kvstore.breaker`) say whether the disk may be used. Not thread safe: `FileTier`
holds its lock.

| breaker | opened by | while it is open |
|---|---|---|
| reads | reads that fail or are late | neither is tried: a tier that cannot read need not write |
| writes | writes that fail or are late | loads go on: a slow disk loses stores before loads |
| room | want of room on the file system | loads go on |

A write that is let through goes as the probe of all that are open; if it succeeds, the disk works.
EFAULT says nothing against the disk: the slot's memory is not there, which an engine can bring
about (`kvstore.arena`).

Events wait in a mailbox. Bounded by what is under way: a job has at most three events, a reclaim
one; the flood at start, `FileKnown`, waits for the driver (`known`).
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from kvstore.breaker import Breaker, BreakerState
from kvstore.mailbox import Mailbox
from kvstore.ports import Clock
from kvstore.tier_events import (
    FileGone,
    FileKnown,
    FileMoved,
    FileRead,
    FileReclaim,
    FileTierEvent,
    FileWritten,
    ReadFile,
    Resumed,
    Suspended,
    WriteFile,
)
from kvstore.tiers.file.catalog import Catalog
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.directory import Directory
from kvstore.tiers.file.disk import Disk
from kvstore.units import NS_PER_MS
from kvstore.wire.record import Void

_FULL = "its file system is full: make room, or restart with a smaller --file"
_LOOK = "see the kernel's log; it is retried"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Health:
    """Takes the outcomes of I/O, for which it returns events to the driver; answers whether reads
    and writes may be tried."""

    def __init__(self, config: FileConfig) -> None:
        breaker = partial(Breaker, cooldown_ms=config.cooldown_ms)
        failures_max, patience_ms = config.failures_max, config.write_deadline_ms
        self._reads = breaker(failures_max=failures_max, patience_ms=config.read_deadline_ms)
        self._writes = breaker(failures_max=failures_max, patience_ms=patience_ms)
        self._room = breaker(failures_max=1, patience_ms=patience_ms)
        self._all = self._room, self._writes, self._reads

    @property
    def is_well(self) -> bool:
        """Whether the breaker of reads is closed."""
        return not self._reads.is_open

    @property
    def states(self) -> tuple[BreakerState, BreakerState]:
        """For reads, and for writes, which need all breakers: of the one furthest from closed."""
        furthest = max((breaker.state for breaker in self._all), key=[*BreakerState].index)
        return self._reads.state, furthest

    def allows_read(self, now_ns: int) -> bool:
        return self._reads.allows(now_ns)

    def allows_write(self, now_ns: int) -> bool:
        # All or none: a probe that is not sent would never come back.
        may = all(breaker.may_allow(now_ns) for breaker in self._all)
        return may and all(breaker.allows(now_ns) for breaker in self._all)

    def failed_reading(self, now_ns: int, error: OSError | None) -> list[FileTierEvent]:
        """A read failed; None: it passed its deadline."""
        if error is not None and error.errno == errno.EFAULT:
            return self._says_nothing(now_ns, self._reads)
        reason = _failing(error) if error else f"the disk does not respond in time: {_LOOK}"
        return [Suspended(reason, writes_only=False)] if self._reads.failed(now_ns) else []

    def failed_writing(self, now_ns: int, error: OSError | None) -> list[FileTierEvent]:
        """A write failed; None: it passed its deadline."""
        if error is not None and error.errno == errno.EFAULT:
            return self._says_nothing(now_ns, *self._all)
        self._says_nothing(now_ns, self._reads)
        if error is not None and error.errno in _NO_ROOM:
            return [Suspended(_FULL, writes_only=True)] if self._room.failed(now_ns) else []
        reason = _failing(error) if error else f"the disk does not write in time: {_LOOK}"
        return [Suspended(reason, writes_only=True)] if self._writes.failed(now_ns) else []

    def read(self) -> list[FileTierEvent]:
        """A read went well."""
        return [Resumed(writes_only=False)] if self._reads.succeeded() else []

    def wrote(self) -> list[FileTierEvent]:
        """A write went well."""
        closed = [breaker.succeeded() for breaker in (self._room, self._writes)]
        events: list[FileTierEvent] = [Resumed(writes_only=True)] if any(closed) else []
        return events + self.read()

    def room_again(self) -> list[FileTierEvent]:
        """A segment was deleted, so there is room again."""
        is_news = self._room.succeeded() and not self._writes.is_open
        return [Resumed(writes_only=True)] if is_news else []

    @staticmethod
    def _says_nothing(now_ns: int, *breakers: Breaker) -> list[FileTierEvent]:
        """An error that says nothing about the disk: count a probe as failed all the same, so that
        another one is sent."""
        for breaker in breakers:
            if breaker.is_open:
                breaker.failed(now_ns)
        return []


def _failing(error: OSError) -> str:
    if error.errno is None:  # ours, which says what to do
        return str(error)
    return f"the disk fails ({error.strerror or error}): {_LOOK}"


KNOWN_MAX: Final = 4
"""`FileKnown` events that wait for the driver; then recovery waits too. Few, since the end of a
read waits behind them."""
_LONG: Final = (FileGone, FileKnown, FileMoved, FileReclaim)


class Leaving(Exception):
    """The tier is being closed."""


class Outbox(Mailbox[FileTierEvent]):
    """Events on their way to the driver. After `stop` they can still be put, after `close` only
    taken."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = self._changed = threading.Condition()
        self._voids: list[Void] = []
        self._is_recovering = True
        self._is_stopped = False

    def known(self, event: FileKnown, *, own: bool) -> None:
        """Hand over blocks that were found, waiting for the driver if need be. Raises Leaving.

        With `own`, records of this node, they are left out if a void that came after recovery had
        begun covers them: it covers all that recovery finds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._has_room())
            if self._is_stopped:
                raise Leaving
            if not (own and any(void.covers(event.scope) for void in self._voids)):
                self.put(event)

    def _has_room(self) -> bool:
        return sum(isinstance(event, FileKnown) for event in self._waiting) < KNOWN_MAX

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """Drop the `FileKnown` events that a void of this tenant and space covers: those that wait
        to be taken, and those of this node that recovery has yet to find."""
        void = Void(tenant, space, before=0)  # which of them are older is nobody's question
        with self._changed:
            if self._is_recovering:
                self._voids.append(void)
            self._waiting = deque(
                event
                for event in self._waiting
                if not (isinstance(event, FileKnown) and void.covers(event.scope))
            )
            self._changed.notify_all()

    def recovered(self) -> None:
        """Recovery is over: voids need not be remembered here."""
        with self._changed:
            self._is_recovering = False
            self._voids.clear()

    def take(self) -> Iterator[FileTierEvent]:
        """As of a mailbox, up to the first event that is long for the engine: it must serve others
        in between."""
        for event in super().take():
            if isinstance(event, FileKnown):
                with self._changed:
                    self._changed.notify_all()
            yield event
            if isinstance(event, _LONG):
                return

    def stop(self) -> None:
        """End all waits in `known`, which raises Leaving from now on."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        super().close()


class Parts(NamedTuple):
    """Parts of a tier that its threads share."""

    config: FileConfig
    clock: Clock
    disk: Disk
    directory: Directory
    catalog: Catalog
    outbox: Outbox
    health: Health
    lock: threading.Condition
    """Guards queues and jobs; notified when a job ends."""
    leaving: threading.Event
    """Set when the tier is being closed."""


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────

_Order = TypeVar("_Order", WriteFile, ReadFile)


@dataclass(slots=True, eq=False)
class FileJob(Generic[_Order]):
    """An order that waits or runs."""

    order: _Order
    deadline_ns: int
    results: list[int] = field(default_factory=list)
    """Outcomes of its leading blocks, so far: the location of one that was written, 1 for one
    that was read and is intact, else 0."""
    runs: int = 0
    """Number of the parts of a read that wait or run; of a write, 1 while it runs."""
    late: bool = False


class FileJobs(dict[int, FileJob[_Order]]):
    """Jobs of one kind by number, within the limits of the queue. All with the tier's lock held."""

    def __init__(self, parts: Parts, deadline_ms: int) -> None:
        super().__init__()
        self._config, self._clock = parts.config, parts.clock
        self._outbox, self._lock = parts.outbox, parts.lock
        self._deadline_ns = deadline_ms * NS_PER_MS
        self._slots_bytes = 0
        self.is_closed = False
        """Whether every order is refused from now on."""

    def begin(self, order: _Order, allows: Callable[[int], bool]) -> FileJob[_Order] | None:
        """Take an order. None: it is refused, by a limit or by `allows` of the time."""
        now_ns, slots_bytes = self._clock.now_ns(), self._slots_bytes + order.slots_bytes
        if self.is_closed or len(self) >= self._config.queued_jobs_max:
            return None
        if slots_bytes > self._config.queued_bytes_max or not allows(now_ns):
            return None
        assert order.job not in self, "a job's number is unique among those under way"
        self._slots_bytes = slots_bytes
        self[order.job] = job = FileJob(order, now_ns + self._deadline_ns)
        self._lock.notify_all()
        return job

    def overdue(self, now_ns: int) -> list[FileJob[_Order]]:
        """Jobs whose deadline has passed and that are not late yet."""
        return [job for job in self.values() if job.deadline_ns <= now_ns and not job.late]

    def end(self, job: FileJob[_Order], event: FileWritten | FileRead) -> None:
        """Forget a job that has truly ended, with this event."""
        del self[job.order.job]
        self._slots_bytes -= job.order.slots_bytes
        self._outbox.put(event)
        self._lock.notify_all()
