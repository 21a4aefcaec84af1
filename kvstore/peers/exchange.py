"""Commands and events between the node's loop and the asyncio loop that serves other nodes.

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
"""Most events read at a time: engines are served in between."""


class Exchange:
    """Both directions between the two loops. `handle` is called on the asyncio loop, once for each
    command, in order."""

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
        """Pass a command to `handle` on the asyncio loop."""
        with contextlib.suppress(RuntimeError):  # the asyncio loop has ended, and the node ends
            self._loop.call_soon_threadsafe(self._handle, command)

    # ── of any thread ────────────────────────────────────────────────────────────────────────────

    def post(self, event: PeerEvent) -> None:
        """Pass an event to the engine."""
        self._events.put(event)

    def close(self) -> None:
        """Close the mailbox; no event is passed on any more."""
        self._events.close()
