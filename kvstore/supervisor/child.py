"""One node process, as its supervisor sees it; what is kept of it, and when another one is started.

A process that ended is replaced at once, with its memory. After two in a row that never served the
next one begins without memory, which may be the cause. Deaths that come soon after each other have
growing pauses between them, and after DEATHS_MAX of them the whole node ends, for its pod or unit
to be started again.

A refused start (a port or a directory that is taken just now) is no such death: memory that served
before is not its cause, and an end of the node would gain nothing. The start is repeated, with the
memory, until it succeeds.

Kept for the next process are memory, pidfds of ranks, and places (`control.PLACES`). Does not
cover: start and end of any child (`net.process`), messages to and from it, what is kept when
(`supervisor`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import struct
import time
from functools import partial
from typing import Final, NamedTuple

from kvstore.net.process import Child, Spawned, spawn
from kvstore.supervisor import control
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_S

_HEARTBEAT: Final = slice(24, 32)
"""Bytes of the heartbeat in a generation page."""
_log = logging.getLogger(__name__)

spawn_process: Final = partial(spawn, ("-P", "-m", "kvstore.node.process"))


class Process(Child):
    """One node process."""

    def __init__(self, spawned: Spawned) -> None:
        super().__init__(spawned)
        # Blocking, with a limit of the kernel's: a timeout of Python's would make receiving wait.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))
        self.began_ns = time.monotonic_ns()
        self.prepared: control.Prepared | None = None
        self.serving_since_ns = 0
        self.deadline_ns = 0
        """Limit for its answer, service or end; 0: none."""
        self.has_begun = self.was_killed = self.hangs_told = False
        self.asked_to_end = 0
        """The signal that was sent for it; 0: none."""
        self.disk_hangs = False
        """Whether the disk tier hangs, by the last report of the process."""

    @property
    def is_mute(self) -> bool:
        """Whether it had loaded its code, was killed, and had touched nothing until then."""
        return self.was_killed and self.prepared is not None and not self.has_begun

    def was_a_life(self, status: int) -> bool:
        """Whether the next process must differ from it in generations and numbers of connections.

        One that never served has given out none, and is not counted: repeated failed starts would
        use the numbers up."""
        never_served = self.is_mute or status == control.EXIT_REFUSED
        return self.serving_since_ns != 0 or not never_served

    def kill(self) -> None:
        """Send SIGKILL, which ends the process at once unless it hangs in the kernel."""
        self.was_killed = True
        self.signal(signal.SIGKILL)


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────
# Pure.

SOON_NS: Final = 30 * NS_PER_S
"""A process that served for longer did not die of its start."""
DEATHS_MAX: Final = 8
"""Deaths in a row, each soon after its start."""
WARM_ATTEMPTS_MAX: Final = 2
"""Processes in a row that never served, after which the next one begins without memory."""
REFUSAL_PAUSES_NS: Final = tuple(NS_PER_S * seconds for seconds in (1, 2, 5, 10, 30))
"""Pauses after refused starts."""
PAUSES_NS: Final = (0, 0, NS_PER_S // 10, NS_PER_S // 2, NS_PER_S, 2 * NS_PER_S, 5 * NS_PER_S)


class Again(NamedTuple):
    """Start another process."""

    pause_ns: int
    keep: bool
    """Whether it gets the memory of the previous process."""


class Restarts:
    """Restarts of one node."""

    def __init__(self) -> None:
        self._soon = 0
        self._unready = 0
        self._refusals = 0

    def refused(self) -> Again:
        """A process refused to start; its memory is not the reason."""
        pause_ns = REFUSAL_PAUSES_NS[min(self._refusals, len(REFUSAL_PAUSES_NS) - 1)]
        self._refusals += 1
        return Again(pause_ns, keep=True)

    def ended(self, *, served_ns: int) -> Again | None:
        """A process ended unasked after `served_ns` of service; 0: never served. Returns None after
        DEATHS_MAX in a row: no process serves for long."""
        self._refusals = 0
        self._unready = 0 if served_ns else self._unready + 1
        self._soon = 1 if served_ns > SOON_NS else self._soon + 1
        if self._soon > DEATHS_MAX:
            return None
        pause_ns = PAUSES_NS[min(self._soon, len(PAUSES_NS)) - 1]
        return Again(pause_ns, keep=self._unready < WARM_ATTEMPTS_MAX)


def told(status: int) -> str:
    """An exit status, negative for a signal, as an operator reads it."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


# ── kept ─────────────────────────────────────────────────────────────────────────────────────────


class Kept(control.HeldDescriptors):
    """Descriptors held for the next node process, and its generation page."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = 0
        self._page: mmap.mmap | None = None

    def attached(self, number: int, hello: bytes, pidfd: int) -> None:
        if self.memory:
            self.writers[number] = hello, pidfd
        else:  # no later process gets the memory that this rank writes to
            os.close(pidfd)

    def cannot_keep_a_writer(self) -> None:
        """The next process could reuse slots that this rank may write to: drop the memory."""
        if self.memory:
            _log.error(
                "too many open files, or too little memory, to remember a rank: the node goes on,"
                " but its memory ends with its process; raise 'ulimit -n'"
            )
        self.forget()

    def released(self, number: int) -> None:
        if number in self.writers:
            os.close(self.writers.pop(number)[1])

    def take_page(self, fd: int) -> None:
        """Map a generation page writable. The one before is void: no slot has generation 0.

        Raises:
            OSError: no room for its mapping; the one before stays.
        """
        try:
            page = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        if self._page is not None:
            self._page[PAGE_BYTES:] = bytes(len(self._page) - PAGE_BYTES)
            self._page.close()
        self._page = page

    def heartbeat(self) -> bytes:
        return self._page[_HEARTBEAT] if self._page is not None else b""
