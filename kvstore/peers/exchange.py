"""Between the node's loop and the asyncio loop of what concerns other nodes.

    node's loop     Executor ─carry_out(command)─▶ call_soon_threadsafe ─▶ handler     asyncio loop
                    Attach ◀─read()─ deque ◀─────────────── post(event) ─┘

Neither waits for the other. Does not cover: what is done about a command (`lender`, `borrower`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.engine.events import Event, PeerCommand, PeerEvent

READ_EVENTS_MAX: Final = 64
"""At a time: engines are served in between."""


class Exchange:
    """Both directions. `handle` is called on the asyncio loop, once a command, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[PeerCommand], None]
    ) -> None:
        self._loop = loop
        self._handle = handle
        self._events: deque[PeerEvent] = deque()
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False

    # ── of the node's loop ───────────────────────────────────────────────────────────────────────

    def fileno(self) -> int:
        """Readable when `read` has something."""
        return self._fd

    def read(self, _mask: int) -> Iterator[Event]:
        """Events that were posted, a part of them at a time."""
        for _ in range(READ_EVENTS_MAX):
            with self._lock:
                if not self._events:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._fd)
                    return
                event = self._events.popleft()
            yield event

    def carry_out(self, command: PeerCommand) -> None:
        """Hand it over."""
        with contextlib.suppress(RuntimeError):  # the asyncio loop has ended, and the node ends
            self._loop.call_soon_threadsafe(self._handle, command)

    # ── of any thread ────────────────────────────────────────────────────────────────────────────

    def post(self, event: PeerEvent) -> None:
        """Have the engine take it."""
        with self._lock:
            if self._is_closed:
                return
            self._events.append(event)
            os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Nothing is taken any more."""
        with self._lock:
            self._is_closed = True
            os.close(self._fd)
