"""One socket of the attach door, and what the door counts. Does not cover: reading and sending
(`kvstore.node.attach`)."""

from __future__ import annotations

import socket
from collections import deque

from kvstore.engine import OwnerKey
from kvstore.net.turns import NODE, Party
from kvstore.node.refused import RefusalCounts
from kvstore.types import ConnectionId

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
        """By when it must have introduced itself."""
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0
        self.party = party
        self.owner: OwnerKey | None = None
        """The engine that it is a process of."""
        self.left_when_exited = RANK_COUNT_MAX
        """So many datagrams are still read once its process is gone: others may hold the socket."""

    @property
    def introduced(self) -> bool:
        return self.pidfd is not None
