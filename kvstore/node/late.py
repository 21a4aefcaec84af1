"""A disk tier whose directory cannot be opened when a later process of a node starts.

The first start refuses such a directory. A later process has memory that engines want, so it serves
that; reads and writes are refused as by a disk that fails, and the directory is tried again until
it opens. Then the tier goes on where it is, and blocks cleared meanwhile are void in it.

Does not cover: what the node says of it (`files`), the tier (`kvstore.tiers.file`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvstore.breaker import BreakerState
from kvstore.errors import ConfigError
from kvstore.tier_events import (
    FileCommand,
    FileTierEvent,
    ReadFile,
    Resumed,
    Suspended,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.outbox import Outbox
from kvstore.tiers.file.tier import FileTier
from kvstore.wire.record import Void

RETRY_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
VOIDS_MAX: Final = 1024
"""Most voids kept until the tier opens; more become one that covers everything: a cache may
forget."""
_ANYTHING_OLDER: Final = (1 << 63) - 1


class LateTier:
    """A `FileStore` that refuses jobs until it has a `FileTier`."""

    def __init__(
        self,
        path: Path,
        open_tier: Callable[[Outbox], FileTier],
        why: str,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        """`open_tier` raises ConfigError while the directory cannot be had. `why`: the reason at
        the first attempt."""
        self.path = path
        self._open, self._retry_s = open_tier, retry_s
        self._tier: FileTier | None = None
        self._outbox = Outbox()
        self._outbox.put([Suspended(f"{why}; it is tried again by itself", writes_only=False)])
        self._voids: dict[tuple[str | None, bytes | None], VoidFile] = {}
        self._lock = threading.Lock()
        """Guards the tier and voids: none is lost between its opening and its use."""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._try_again, name="file-late", daemon=True)
        self._thread.start()

    def _try_again(self) -> None:
        while not self._leaving.wait(self._retry_s):
            try:
                tier = self._open(self._outbox)  # may hang with its disk: nobody waits for that
            except (ConfigError, OSError):
                continue
            with self._lock:
                for void in self._voids.values():
                    tier.submit(void)
                self._tier = tier
            self._outbox.put([Resumed(writes_only=False)])
            return

    @property
    def note(self) -> bytes:
        return self._tier.note if self._tier else b""

    @property
    def taken_bytes(self) -> int:
        return self._tier.taken_bytes if self._tier else 0

    @property
    def breakers(self) -> tuple[BreakerState, BreakerState]:
        return self._tier.breakers if self._tier else (BreakerState.OPEN, BreakerState.OPEN)

    def fileno(self) -> int:
        return self._outbox.fileno()

    def take_events(self) -> Iterator[FileTierEvent]:
        return self._outbox.take()

    def submit(self, command: FileCommand) -> bool:
        with self._lock:
            if self._tier is not None:
                return self._tier.submit(command)
            if isinstance(command, VoidFile):
                if len(self._voids) >= VOIDS_MAX:
                    self._voids.clear()
                    command = VoidFile(None, None)
                self._voids[command.tenant, command.space] = command
                self._outbox.void(Void(command.tenant, command.space, _ANYTHING_OLDER))
        return not isinstance(command, WriteFile | ReadFile)

    def wait_for_voids(self, timeout_s: float) -> bool:
        return bool(self._tier and self._tier.wait_for_voids(timeout_s))

    def keep_note(self, note: bytes) -> None:
        if self._tier is not None:
            self._tier.keep_note(note)

    def close(self) -> None:
        self._leaving.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._tier is not None:
            self._tier.close()
        elif not self._thread.is_alive():  # one that hangs in an open ends with the process
            self._outbox.close()
