"""Whether the disk may be used, and the events to the driver when that changes.

Three breakers. Not thread safe: `FileTier` holds its lock.

| breaker | opened by | while it is open |
|---|---|---|
| reads | reads that fail or are late | neither is tried: a tier that cannot read need not write |
| writes | writes that fail or are late | loads go on: a slow disk loses stores before loads |
| room | want of room on the file system | loads go on |

A write that is let through goes as the probe of all that are open; if it succeeds, the disk works.
EFAULT says nothing against the disk: the slot's memory is not there, which an engine can bring
about (`kvstore.arena`).
"""

from __future__ import annotations

import errno

from kvstore.breaker import Breaker, BreakerState
from kvstore.tier_events import FileTierEvent, Resumed, Suspended
from kvstore.tiers.file.config import FileConfig

_FULL = "its file system is full: make room, or restart with a smaller --file"
_LOOK = "see the kernel's log; it is retried"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Health:
    """Takes the outcomes of I/O, for which it returns events to the driver; answers whether reads
    and writes may be tried."""

    def __init__(self, config: FileConfig) -> None:
        def breaker(deadline_ms: int) -> Breaker:
            return Breaker(
                failures_max=config.failures_max,
                cooldown_ms=config.cooldown_ms,
                patience_ms=deadline_ms,
            )

        self._reads = breaker(config.read_deadline_ms)
        self._writes = breaker(config.write_deadline_ms)
        self._room = Breaker(
            failures_max=1, cooldown_ms=config.cooldown_ms, patience_ms=config.write_deadline_ms
        )

    @property
    def is_well(self) -> bool:
        """Whether the breaker of reads is closed."""
        return not self._reads.is_open

    @property
    def reads(self) -> BreakerState:
        return self._reads.state

    @property
    def writes(self) -> BreakerState:
        """State of the breaker furthest from closed, among those that writes need."""
        states = [breaker.state for breaker in (self._room, self._writes, self._reads)]
        order = (BreakerState.OPEN, BreakerState.HALF_OPEN)
        return next((state for state in order if state in states), BreakerState.CLOSED)

    def allows_read(self, now_ns: int) -> bool:
        return self._reads.allows(now_ns)

    def allows_write(self, now_ns: int) -> bool:
        needed = (self._room, self._writes, self._reads)
        # All or none: a probe that is not sent would never come back.
        if not all(breaker.may_allow(now_ns) for breaker in needed):
            return False
        return all(breaker.allows(now_ns) for breaker in needed)

    def failed_reading(self, now_ns: int, error: OSError) -> list[FileTierEvent]:
        """A read failed."""
        if error.errno == errno.EFAULT:
            return self._says_nothing(now_ns, self._reads)
        return self._count_read(now_ns, _failing(error))

    def failed_writing(self, now_ns: int, error: OSError) -> list[FileTierEvent]:
        """A write failed."""
        if error.errno == errno.EFAULT:
            return self._says_nothing(now_ns, self._room, self._writes, self._reads)
        if error.errno in _NO_ROOM:
            self._answer_probe_of_reads(now_ns)
            return [Suspended(_FULL, writes_only=True)] if self._room.failed(now_ns) else []
        return self._count_write(now_ns, _failing(error))

    def late_reading(self, now_ns: int) -> list[FileTierEvent]:
        """A read passed its deadline."""
        return self._count_read(now_ns, f"the disk does not respond in time: {_LOOK}")

    def late_writing(self, now_ns: int) -> list[FileTierEvent]:
        """A write passed its deadline."""
        return self._count_write(now_ns, f"the disk does not write in time: {_LOOK}")

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
        if not self._room.succeeded() or self._writes.is_open:
            return []
        return [Resumed(writes_only=True)]

    def _count_read(self, now_ns: int, reason: str) -> list[FileTierEvent]:
        return [Suspended(reason, writes_only=False)] if self._reads.failed(now_ns) else []

    def _count_write(self, now_ns: int, reason: str) -> list[FileTierEvent]:
        self._answer_probe_of_reads(now_ns)
        return [Suspended(reason, writes_only=True)] if self._writes.failed(now_ns) else []

    @staticmethod
    def _says_nothing(now_ns: int, *breakers: Breaker) -> list[FileTierEvent]:
        """An error that says nothing about the disk: count a probe as failed all the same, so that
        another one is sent."""
        for breaker in breakers:
            if breaker.is_open:
                breaker.failed(now_ns)
        return []

    def _answer_probe_of_reads(self, now_ns: int) -> None:
        if self._reads.is_open:
            self._reads.failed(now_ns)


def _failing(error: OSError) -> str:
    if error.errno is None:  # ours, which says what to do
        return str(error)
    return f"the disk fails ({error.strerror or error}): {_LOOK}"
