"""Whether the disk may be asked, and what the driver is told when that changes.

Two breakers: one for failures and lateness, which stops reads and writes alike, and one for want of
room on the file system, which stops writes only. Not thread safe: `FileTier` holds its lock.
"""

from __future__ import annotations

import errno

from kvstore.tiers.file.breaker import Breaker
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.events import FileEvent, Resumed, Suspended

_FULL = "its file system has no room: make some, or restart with a smaller --file"
_LOOK = "the kernel's log may say why; it is tried again by itself"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Health:
    """Fed with what I/O came to; answers what may be tried."""

    def __init__(self, config: FileConfig) -> None:
        self._disk = Breaker(failures_max=config.failures_max, cooldown_ms=config.cooldown_ms)
        self._room = Breaker(failures_max=1, cooldown_ms=config.cooldown_ms)

    def allows_read(self, now_ns: int) -> bool:
        return self._disk.allows(now_ns)

    def allows_write(self, now_ns: int) -> bool:
        return self._room.allows(now_ns) and self._disk.allows(now_ns)

    def failed(self, now_ns: int, error: OSError) -> list[FileEvent]:
        """A call failed."""
        if error.errno in _NO_ROOM:
            if self._room.failed(now_ns):
                return [Suspended(_FULL, writes_only=True)]
            return []
        return self._count(now_ns, f"the disk fails ({error.strerror or error}): {_LOOK}")

    def late(self, now_ns: int) -> list[FileEvent]:
        """A job passed its deadline."""
        return self._count(now_ns, f"the disk does not answer in time: {_LOOK}")

    def read(self) -> list[FileEvent]:
        """A read went well."""
        return [Resumed(writes_only=False)] if self._disk.succeeded() else []

    def wrote(self) -> list[FileEvent]:
        """A write went well."""
        events: list[FileEvent] = [Resumed(writes_only=True)] if self._room.succeeded() else []
        return events + self.read()

    def room_again(self) -> list[FileEvent]:
        """A segment was deleted."""
        return [Resumed(writes_only=True)] if self._room.succeeded() else []

    def _count(self, now_ns: int, reason: str) -> list[FileEvent]:
        return [Suspended(reason, writes_only=False)] if self._disk.failed(now_ns) else []
