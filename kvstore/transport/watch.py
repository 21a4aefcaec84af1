"""When a transfer worker must be killed, because nothing else can end what it does. Pure.

    posted ──▶ under way ──▶ ended              by its own words
                  │  deadline
                  ▼
               limbo ──▶ the peer is forgotten, and after GRACE_NS without an end: Recycle
                  ▲
    Limbo ────────┘                             it says that it cannot know; at its deadline,
                                                or when too much of the arena is in limbo: Recycle

A transfer worker that does not beat is recycled, too. While this process was stopped itself,
nothing was heard: a look that comes late moves the deadlines of beats, not of transfers.

All that was under way has ended when the transfer worker is dead and reaped; nothing else says so.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.units import NS_PER_S

GRACE_NS: Final = NS_PER_S
SILENT_NS: Final = 5 * NS_PER_S
START_NS: Final = 60 * NS_PER_S
"""Limit until a transfer worker's first message: libraries are loaded, and an arena is
registered.
"""
LOOK_LATE_NS: Final = NS_PER_S
LIMBO_DIVISOR: Final = 16
"""One part in this many of the arena may be in limbo."""
PAUSES_NS: Final = (0, NS_PER_S // 10, NS_PER_S // 2, NS_PER_S, 2 * NS_PER_S, 5 * NS_PER_S)
LONG_NS: Final = 30 * NS_PER_S
"""A transfer worker that served for longer did not die of its start."""


class Recycle(NamedTuple):
    """The transfer worker must be killed, for this reason."""

    reason: str


class _WatchedTransfer:
    def __init__(self, peer: str, size_bytes: int, deadline_ns: int) -> None:
        self.peer, self.size_bytes, self.deadline_ns = peer, size_bytes, deadline_ns
        self.limbo = False
        self.overdue = False


class Watch:
    """Watches the transfer workers of a node, one after the other."""

    def __init__(self, *, arena_bytes: int) -> None:
        self._limbo_max = arena_bytes // LIMBO_DIVISOR
        self._transfers: dict[int, _WatchedTransfer] = {}
        self._silent_at_ns = 0
        """Time at which it will have been silent for too long; 0: there is no transfer worker."""
        self._looked_ns = 0
        self._begun_ns = 0
        self._deaths = 0

    def began(self, now_ns: int) -> None:
        """A transfer worker was started."""
        self._begun_ns = self._looked_ns = now_ns
        self._silent_at_ns = now_ns + START_NS

    def heard(self, now_ns: int) -> None:
        """A message of the transfer worker came."""
        self._silent_at_ns = now_ns + SILENT_NS

    def posted(self, transfer: int, peer: str, *, size_bytes: int, deadline_ns: int) -> None:
        assert transfer not in self._transfers, transfer
        self._transfers[transfer] = _WatchedTransfer(peer, size_bytes, deadline_ns)

    def ended(self, transfer: int) -> None:
        """A transfer has ended, by the word or the death of the transfer worker."""
        self._transfers.pop(transfer, None)

    def in_limbo(self, transfer: int) -> None:
        """The transfer worker reports that it cannot know the end of a transfer."""
        if transfer in self._transfers:
            self._transfers[transfer].limbo = True

    def look(self, now_ns: int) -> set[str] | Recycle:
        """Actions that are due now: the peers to be forgotten, since a transfer is past its
        deadline; or Recycle, to end the transfer worker.
        """
        if now_ns - self._looked_ns > LOOK_LATE_NS:
            self._silent_at_ns = max(self._silent_at_ns, now_ns + SILENT_NS)
        self._looked_ns = now_ns
        if now_ns >= self._silent_at_ns:
            return Recycle("it is silent")
        overdue = set()
        for each in self._transfers.values():
            if now_ns < each.deadline_ns:
                continue
            if each.overdue and now_ns >= each.deadline_ns + GRACE_NS:
                return Recycle(f"a read from {each.peer} has no end")
            if not each.overdue:
                each.overdue = True
                overdue.add(each.peer)
        # The end of these only the transfer worker's death would prove.
        limbo = (each.size_bytes for each in self._transfers.values() if each.limbo)
        if sum(limbo) > self._limbo_max:
            return Recycle("too many reads have no end")
        return overdue

    def next_ns(self) -> int:
        """Time at which to look again at the latest, in ns."""
        times = [each.deadline_ns + GRACE_NS * each.overdue for each in self._transfers.values()]
        return min([*times, self._looked_ns + LOOK_LATE_NS // 2, self._silent_at_ns])

    def died(self, now_ns: int) -> int:
        """The transfer worker is dead and reaped, and all transfers have ended with it. Returns how
        many ns to wait before another is started.
        """
        self._transfers.clear()
        soon = now_ns - self._begun_ns <= LONG_NS
        self._deaths = self._deaths + 1 if soon else 1
        self._silent_at_ns = 0
        return PAUSES_NS[min(self._deaths, len(PAUSES_NS)) - 1]
