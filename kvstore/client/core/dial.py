"""A connection to the node in time: when to connect, and when to hang up. Pure.

    DOWN ──connected──▶ GREETED ──welcomed──▶ WELCOMED
      ▲── ended, refused, no heartbeat for long: from every state, with back-off ──┘

The scheduler and every rank have one. Times are the process's monotonic nanoseconds; heartbeats are
stamps of the node's clock, and the offset between the two clocks is estimated.

Covers: back-off, late greetings, heartbeats. Does not cover: sessions (`attachment`, `rank`), the
socket (`kvstore.client.link`).
"""

from __future__ import annotations

import enum
from typing import Final

from kvstore.units import NS_PER_MS, NS_PER_S

RETRY_NS_MIN: Final = 50 * NS_PER_MS
RETRY_NS_MAX: Final = 1000 * NS_PER_MS
REFUSED_RETRY_NS: Final = 10 * NS_PER_S
GREETING_NS_MAX: Final = 10 * NS_PER_S
"""Longest wait for a Welcome: another node may serve the path by then."""
GONE_TIMES: Final = 8
"""Silence for this many times the heartbeat's limit ends the connection."""


class DialState(enum.Enum):
    """Progress of a connection."""

    DOWN = "down"
    GREETED = "greeted"
    WELCOMED = "welcomed"


class Dial:
    """See the module."""

    def __init__(self, heartbeat_timeout_ms: int) -> None:
        self.state = DialState.DOWN
        self.since_ns = 0
        """Start of the state."""
        self.silent_since_ns = 0
        """Discovery of a heartbeat older than its limit; 0: the node beats."""
        self._limit_ns = heartbeat_timeout_ms * NS_PER_MS
        self._retry_at_ns = 0
        self._retry_ns = RETRY_NS_MIN
        self._clock_offset_ns = 0
        self._last_beat_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether the caller is to connect."""
        return self.state is DialState.DOWN and now_ns >= self._retry_at_ns

    def connected(self, now_ns: int) -> None:
        """The socket is connected and the Hello is on its way."""
        assert self.state is DialState.DOWN, self.state
        self._enter(DialState.GREETED, now_ns)

    def welcomed(self, now_ns: int, node_now_ns: int) -> None:
        """The node answered, when its clock showed `node_now_ns`."""
        assert self.state is DialState.GREETED, self.state
        self._clock_offset_ns = now_ns - node_now_ns
        self._enter(DialState.WELCOMED, now_ns)

    def served(self) -> None:
        """The node serves this process: the next back-off is a short one again."""
        self._retry_ns = RETRY_NS_MIN

    def ended(self, now_ns: int) -> None:
        """The socket ended, or could not be connected."""
        self._enter(DialState.DOWN, now_ns)
        self._retry_at_ns = now_ns + self._retry_ns
        self._retry_ns = min(self._retry_ns * 2, RETRY_NS_MAX)

    def refused(self, now_ns: int) -> None:
        """The node sent Refused."""
        self._enter(DialState.DOWN, now_ns)
        self._retry_at_ns = now_ns + REFUSED_RETRY_NS

    def restart(self, now_ns: int) -> None:
        """Connect anew at once."""
        self._enter(DialState.DOWN, now_ns)
        self._retry_at_ns = now_ns

    def check_heartbeat(self, now_ns: int, heartbeat_ns: int) -> str:
        """Reason to hang up now, or nothing. `heartbeat_ns`: the node's last beat, 0 if unknown."""
        match self.state:
            case DialState.GREETED if now_ns - self.since_ns > GREETING_NS_MAX:
                return "the node does not answer"
            case DialState.WELCOMED if heartbeat_ns:
                age_ns = self._age_ns(now_ns, heartbeat_ns)
                if age_ns > GONE_TIMES * self._limit_ns:
                    return "the node's heartbeat stopped"
        return ""

    def _age_ns(self, now_ns: int, heartbeat_ns: int) -> int:
        # Clocks differ between time namespaces. Every look bounds the offset from above (it is
        # offset + age); the smallest bound seen is the offset to within one beat. A Welcome that
        # lay unread for seconds alone would make the node look that much younger.
        self._clock_offset_ns = min(self._clock_offset_ns, now_ns - heartbeat_ns)
        if self.silent_since_ns and heartbeat_ns != self._last_beat_ns:
            # A new beat, whatever the clocks say: if they drifted apart, this is the offset.
            self._clock_offset_ns = now_ns - heartbeat_ns
        self._last_beat_ns = heartbeat_ns
        age_ns = now_ns - heartbeat_ns - self._clock_offset_ns
        if age_ns <= self._limit_ns:
            self.silent_since_ns = 0
        elif not self.silent_since_ns:
            self.silent_since_ns = now_ns
        return age_ns

    def _enter(self, state: DialState, now_ns: int) -> None:
        self.state, self.since_ns, self.silent_since_ns = state, now_ns, 0
