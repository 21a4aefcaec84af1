"""How long the disk takes, learned from every read: the estimate that requests decide by.

A read is timed from question to answer, queue, seeks and checksums included, over the bytes that
were under way with it. The slowest of the last few counts: a disk that became slow is known after
one read, and one that recovered after READS. While a read takes much longer than it should, nobody
is told to wait: whoever asks then computes.

Does not cover: who waits how long (`kvstore.client.core.costs`), deadlines of I/O.
"""

from __future__ import annotations

from collections import deque

from kvstore.units import KIB, MIB, NS_PER_MS
from kvstore.wire.learned import DISK_NS_PER_MIB_MIN

READS = 4
SMALL_READ_BYTES = 256 * KIB
"""A shorter read is mostly latency: it takes as long as this."""
NS_PER_BYTE_GUESS = 1.0
"""Of a read, until the first one was measured."""
DOUBT_NS = 5 * NS_PER_MS
"""A read that takes so much longer than twice its time puts the disk in doubt."""
DOUBTFUL_MS = 1 << 31
"""The estimate then: longer than anybody waits."""


class _Read:
    __slots__ = ("ahead_bytes", "begin_ns", "size_bytes")

    def __init__(self, size_bytes: int, ahead_bytes: int, begin_ns: int) -> None:
        self.size_bytes = size_bytes
        self.ahead_bytes = max(ahead_bytes, SMALL_READ_BYTES)
        """With its own: what the disk has to bring until this read is done."""
        self.begin_ns = begin_ns


class DiskPace:
    """Time per byte of one file tier. A read that nobody waits for any more is not under way."""

    def __init__(self, learned_ns_per_mib: int = 0) -> None:
        self._guess = learned_ns_per_mib / MIB or NS_PER_BYTE_GUESS
        self._samples: deque[float] = deque(maxlen=READS)
        self._reads: dict[int, _Read] = {}
        self._bytes = 0

    @property
    def ns_per_byte(self) -> float:
        return max(self._samples, default=self._guess)

    @property
    def measured_ns_per_mib(self) -> int:
        """For the next start; 0: nothing was learned."""
        return round(max(self._samples) * MIB) if self._samples else 0

    def begun(self, job: int, size_bytes: int, now_ns: int) -> None:
        """A read was asked of the disk."""
        self._bytes += size_bytes
        self._reads[job] = _Read(size_bytes, self._bytes, now_ns)

    def ended(self, job: int, now_ns: int, *, counts: bool) -> None:
        """It ended or is late; `counts`: how long it took says something about the disk."""
        read = self._reads.pop(job, None)
        if read is None:
            return
        self._bytes -= read.size_bytes
        if counts:
            seen = (now_ns - read.begin_ns) / read.ahead_bytes
            self._samples.append(max(seen, DISK_NS_PER_MIB_MIN / MIB))

    def estimate_ms(self, now_ns: int) -> int:
        """How long what is being read now will take."""
        oldest = next(iter(self._reads.values()), None)
        if oldest is not None:
            expected_ns = 2 * oldest.ahead_bytes * self.ns_per_byte + DOUBT_NS
            if now_ns - oldest.begin_ns > expected_ns:
                return DOUBTFUL_MS
        return int(max(self._bytes, SMALL_READ_BYTES) * self.ns_per_byte / NS_PER_MS) + 1
