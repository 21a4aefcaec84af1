"""The thread that keeps an idle engine attached.

The scheduler's half looks at its socket in the steps of the engine, and an idle engine makes none:
after a restart of the node its next request would miss. So this thread looks ten times a second,
whenever the engine has not. Methods of the connector and this thread take turns (`TURN`): the
thread skips a look rather than wait, and the engine waits for one look at most.

Covers: turns, forks (a child has no such thread, and finds nothing half done), the end. Does not
cover: the look itself, and its back-off (`scheduler_side`, `client.core.attachment`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

TICK_S: Final = 0.1
END_S_MAX: Final = 1.0
TURN: Final = threading.RLock()
"""One lock for all connectors of this process: they work on one thread anyway."""
os.register_at_fork(before=TURN.acquire, after_in_parent=TURN.release, after_in_child=TURN.release)


class Attendant:
    """See the module."""

    def __init__(
        self, attend: weakref.WeakMethod[Callable[[], object]], *, tick_s: float = TICK_S
    ) -> None:
        """`attend`: one look, which raises nothing; when its owner is gone, so is the thread."""
        self._attend = attend
        self._tick_s = tick_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-attend", daemon=True)

    def start(self) -> None:
        """Begin to look. Once."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; from any thread."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(END_S_MAX)

    def _run(self) -> None:
        while not self._stopped.wait(self._tick_s):
            if TURN.acquire(blocking=False):
                try:
                    attend = self._attend()
                    if attend is None or self._stopped.is_set():
                        return
                    attend()
                    del attend
                finally:
                    TURN.release()
