"""How many bytes may be under way from one peer: additive increase, multiplicative decrease. Pure.

The input is completion times. A post with which, counting all posts before it, `queued` bytes are
under way takes

    base + queued / rate   on a link that is ours alone: the least of late times teach both
    more                   on one that others use: then the window is halved, and grows again, a
                           step for each window of bytes, once times are as they were

So others are given way, like LEDBAT (RFC 6817) does. Below one step the window is a duty: one step
at a time, and pauses between them, so that even one step does not crowd a slow link.

The window always suffices for an eighth of the link's known rate. Times look the same for a busy
link and for a busy host, on either side, that lets each post wait for a processor: there giving
way helps nobody, and where posts take a hundred times as long as expected even one step at a time
would be a hundredth of the link. Behind a queue of others this is an eighth of the queue, or less.

Wrong where a link was busy from the first byte on: its times are then the base of comparison, for
EPOCH_NS. Does not cover: which bytes are read next (`reads`).
"""

from __future__ import annotations

from typing import Final

from kvstore.units import NS_PER_S

STEP_BYTES: Final = 1 << 20
START_BYTES: Final = 16 << 20
CEILING_BYTES: Final = 256 << 20
LEAST_BYTES: Final = STEP_BYTES // 4
GROW_BELOW: Final = 1.15
CUT_ABOVE: Final = 1.3
"""A post that takes longer than this times the expected time halves the window. One flow as strong
as ours makes it 2.
"""
SLACK_NS: Final = 4_000_000
"""Delay that a busy host adds to any time, in ns: no reason to give way."""
QUEUE_NS: Final = 10_000_000
"""Time by which the window may exceed what fills the link, in ns: more would hide the queues of
others behind our own.
"""
SHARE: Final = 8
"""The window suffices for at least one part in this many of what the link carries."""
EPOCH_NS: Final = 60 * NS_PER_S
"""Length of an epoch. The least times are those of the current epoch and the one before, since
routes change.
"""


class _Least:
    """Least times of posts in one epoch."""

    def __init__(self) -> None:
        self.ns_per_byte = float("inf")
        self.took_ns = float("inf")
        self.queued_bytes = 0


class Window:
    """Window of one peer, in bytes."""

    def __init__(self) -> None:
        self.size_bytes: float = START_BYTES
        self._slow_start = True
        self._cut_ns = 0
        """Time of the last cut: posts from before it say nothing about the window after it."""
        self._pause_until_ns = 0
        self._epochs = (_Least(), _Least())
        self._epoch_end_ns = 0

    def room_bytes(self, under_way_bytes: int, now_ns: int) -> int:
        """Bytes that may be posted now, in addition to those under way."""
        if self.size_bytes < STEP_BYTES:
            idle = not under_way_bytes and now_ns >= self._pause_until_ns
            return STEP_BYTES if idle else 0
        return max(0, int(self.size_bytes) - under_way_bytes)

    def pause_ns(self, now_ns: int) -> int:
        """Time until which nothing may be posted, whatever ends; 0: no such time."""
        waits = self.size_bytes < STEP_BYTES and now_ns < self._pause_until_ns
        return self._pause_until_ns if waits else 0

    def ended(self, *, size_bytes: int, queued_bytes: int, posted_ns: int, now_ns: int) -> None:
        """A post is done. `queued_bytes` were under way when it was posted, itself included."""
        took_ns = max(1, now_ns - posted_ns)
        self._learn(queued_bytes, took_ns, now_ns)
        expected_ns = self._expected_ns(queued_bytes)
        if took_ns > CUT_ABOVE * expected_ns + SLACK_NS:
            self._cut(posted_ns, now_ns)
        elif took_ns < GROW_BELOW * expected_ns + SLACK_NS:
            step = size_bytes if self._slow_start else STEP_BYTES * size_bytes / self.size_bytes
            self.size_bytes += min(step, size_bytes)
        self.size_bytes = max(self.size_bytes, self._due_bytes(took_ns))
        self.size_bytes = min(self.size_bytes, self._enough_bytes(), CEILING_BYTES)
        if self.size_bytes < STEP_BYTES:
            self._pause_until_ns = now_ns + int(took_ns * (STEP_BYTES / self.size_bytes - 1))

    def failed(self, *, posted_ns: int, now_ns: int) -> None:
        """A post failed: cut the window."""
        self._cut(posted_ns, now_ns)

    def _cut(self, posted_ns: int, now_ns: int) -> None:
        if posted_ns >= self._cut_ns:
            self._cut_ns, self._slow_start = now_ns, False
            self.size_bytes = max(LEAST_BYTES, self.size_bytes / 2)

    def _learn(self, queued_bytes: int, took_ns: int, now_ns: int) -> None:
        if now_ns >= self._epoch_end_ns:
            self._epochs = (self._epochs[1], _Least())
            self._epoch_end_ns = now_ns + EPOCH_NS
        least = self._epochs[1]
        least.ns_per_byte = min(least.ns_per_byte, took_ns / queued_bytes)
        if took_ns < least.took_ns:
            least.took_ns, least.queued_bytes = took_ns, queued_bytes

    def _expected_ns(self, queued_bytes: int) -> float:
        ns_per_byte = min(epoch.ns_per_byte for epoch in self._epochs)
        quickest = min(self._epochs, key=lambda epoch: epoch.took_ns)
        base_ns = max(0.0, quickest.took_ns - quickest.queued_bytes * ns_per_byte)
        return base_ns + queued_bytes * ns_per_byte

    def _due_bytes(self, took_ns: int) -> float:
        """Window that reads at least the share 1 / SHARE of the link, where posts take
        `took_ns`.
        """
        ns_per_byte = min(epoch.ns_per_byte for epoch in self._epochs)
        return took_ns / ns_per_byte / SHARE

    def _enough_bytes(self) -> float:
        """Window that fills the link, with some to spare, in bytes."""
        ns_per_byte = min(epoch.ns_per_byte for epoch in self._epochs)
        return max(2 * STEP_BYTES, (self._expected_ns(0) + QUEUE_NS) / ns_per_byte)
