"""One socket of the attach door, and what the door counts. Does not cover: reading and sending
(`kvstore.node.attach`)."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.engine import OwnerKey
from kvstore.net.turns import NODE, Party
from kvstore.types import ConnectionId
from kvstore.units import NS_PER_S

# ── refused ───────────────────────────────────────────────────────────────────────────────────────
# Processes refused at the attach socket: counts, and the last sentence for /healthz.
#
# A process that is refused before it has introduced itself is known by nothing but that sentence.
# All engines ask again after 10 s, so a refusal that nobody repeats is over; one for want of room
# is over when there is room.

TOLD_NS: Final = 30 * NS_PER_S
SILENT: Final = "late"
"""Kind of refusal of a process that connected and sent nothing: it is no engine."""


class RefusalCounts(dict[str, int]):
    """Refusals since the start, by kind."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(dict.fromkeys(kinds, 0))
        self._last: tuple[str, int, Callable[[], bool]] | None = None

    def add(
        self, kind: str, reason: str, now_ns: int, holds: Callable[[], bool] = lambda: True
    ) -> None:
        """Count one; `holds`: whether the reason is still true."""
        self[kind] += 1
        if kind != SILENT:
            self._last = (reason, now_ns, holds)

    def trouble(self, now_ns: int) -> str:
        """The last refusal of what may be an engine; empty when it is long ago."""
        if self._last is None or now_ns - self._last[1] > TOLD_NS or not self._last[2]():
            return ""
        return f"a process that wants to attach is refused: {self._last[0]}"


# ── connection ────────────────────────────────────────────────────────────────────────────────────

RANK_COUNT_MAX = 1024
"""Most datagrams of one rank in one round."""


class AttachCounters:
    """Counters of the attach sockets since the start; read by /metrics."""

    def __init__(self) -> None:
        self.datagrams_received = 0
        self.datagrams_sent = 0
        self.accepted = 0
        self.refused = RefusalCounts("uid", "full", "hello", "late")
        self.ended: dict[str, int] = dict.fromkeys(
            ("closed", "protocol", "overflow", "exited", "engine", "failure"), 0
        )


class AttachSocket:
    """One socket and, once it has introduced itself, the process behind it."""

    def __init__(
        self,
        number: ConnectionId,
        sock: socket.socket | None,
        *,
        deadline_ns: int,
        party: Party = NODE,
    ) -> None:
        self.number = number
        self.socket = sock
        self.pidfd: int | None = None
        self.is_rank = False
        self.engine = ""
        """The engine of a scheduler, as much of its id as is logged."""
        self.deadline_ns = deadline_ns
        """Time by which it must have introduced itself."""
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0
        self.party = party
        self.owner: OwnerKey | None = None
        """The engine that it is a process of."""
        self.left_when_exited = RANK_COUNT_MAX
        """Datagrams still to be read at most once its process is gone: others may hold the
        socket."""

    @property
    def introduced(self) -> bool:
        return self.pidfd is not None
