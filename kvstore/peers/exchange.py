"""Between the node's loop and the asyncio loop of what concerns other nodes.

    node's loop     Executor ─carry_out(command)─▶ call_soon_threadsafe ─▶ handler     asyncio loop
                    Attach ◀─read()─ Mailbox ◀───────────── post(event) ─┘

Neither waits for the other. Does not cover: what is done about a command (`block_server`,
`fetcher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.engine.events import Event, PeerCommand, PeerEvent
from kvstore.mailbox import Mailbox

READ_EVENTS_MAX: Final = 64
"""At a time: engines are served in between."""


class Exchange:
    """Both directions. `handle` is called on the asyncio loop, once a command, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[PeerCommand], None]
    ) -> None:
        self._loop = loop
        self._handle = handle
        self._events = Mailbox[PeerEvent]()

    # ── of the node's loop ───────────────────────────────────────────────────────────────────────

    def fileno(self) -> int:
        """Readable when `read` has something."""
        return self._events.fileno()

    def read(self, _mask: int) -> Iterator[Event]:
        """Events that were posted, a part of them at a time."""
        return itertools.islice(self._events.take(), READ_EVENTS_MAX)

    def carry_out(self, command: PeerCommand) -> None:
        """Hand it over."""
        with contextlib.suppress(RuntimeError):  # the asyncio loop has ended, and the node ends
            self._loop.call_soon_threadsafe(self._handle, command)

    # ── of any thread ────────────────────────────────────────────────────────────────────────────

    def post(self, event: PeerEvent) -> None:
        """Have the engine take it."""
        self._events.put(event)

    def close(self) -> None:
        """Nothing is taken any more."""
        self._events.close()
