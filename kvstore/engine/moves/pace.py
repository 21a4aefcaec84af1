"""How long the disk takes, or another node, learned from every read: the estimate that requests
decide by.

A read is timed from question to answer, queue, seeks and checksums included, over the bytes that
were under way with it. The slowest of the last few counts: a disk that became slow is known after
one read, and one that recovered after READS. A read under way counts with the time it has taken
already, and while one takes much longer than it should, nobody is told to wait.

Does not cover: who waits how long (`kvstore.client.core.costs`), deadlines of I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

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


class _TimedRead:
    __slots__ = ("ahead_bytes", "begin_ns", "size_bytes")

    def __init__(self, size_bytes: int, ahead_bytes: int, begin_ns: int) -> None:
        self.size_bytes = size_bytes
        self.ahead_bytes = max(ahead_bytes, SMALL_READ_BYTES)
        """With its own: what the disk has to bring until this read is done."""
        self.begin_ns = begin_ns


class ReadPace:
    """What reads from one place take: a file tier's disk, another node."""

    def __init__(self, learned_ns_per_mib: int = 0) -> None:
        self._guess = (MIB, learned_ns_per_mib or int(NS_PER_BYTE_GUESS * MIB))
        self._samples: deque[tuple[int, int]] = deque(maxlen=READS)
        """Bytes and nanoseconds."""
        self._reads: dict[int, _TimedRead] = {}
        self._bytes = 0

    @property
    def measured_ns_per_mib(self) -> int:
        """For the next start; 0: nothing was learned."""
        return round(max(ns / size for size, ns in self._samples) * MIB) if self._samples else 0

    def ns_per_byte(self, now_ns: int) -> float:
        """Of the slowest read, one under way included."""
        return max(ns / size for size, ns in [*self._learned(), *self._so_far(now_ns)])

    def begun(self, job: int, size_bytes: int, now_ns: int) -> None:
        """A read was asked of the disk."""
        self._bytes += size_bytes
        self._reads[job] = _TimedRead(size_bytes, self._bytes, now_ns)

    def ended(self, job: int, now_ns: int, *, counts: bool) -> None:
        """It truly ended; `counts`: how long it took says something about the disk."""
        read = self._reads.pop(job)
        self._bytes -= read.size_bytes
        if counts:
            least_ns = read.ahead_bytes * DISK_NS_PER_MIB_MIN // MIB
            self._samples.append((read.ahead_bytes, max(now_ns - read.begin_ns, least_ns)))

    def estimate_ms(self, now_ns: int) -> int:
        """How long what is being read now will take."""
        for size, ns in self._so_far(now_ns):
            if ns > 2 * _expected_ns(self._learned(), size) + DOUBT_NS:
                return DOUBTFUL_MS
        samples = [*self._learned(), *self._so_far(now_ns)]
        return int(_expected_ns(samples, max(self._bytes, SMALL_READ_BYTES)) / NS_PER_MS) + 1

    def _learned(self) -> list[tuple[int, int]]:
        return list(self._samples) or [self._guess]

    def _so_far(self, now_ns: int) -> list[tuple[int, int]]:
        """The oldest read under way, as if it ended now."""
        oldest = next(iter(self._reads.values()), None)
        return [(oldest.ahead_bytes, now_ns - oldest.begin_ns)] if oldest else []


def _expected_ns(samples: Iterable[tuple[int, int]], size_bytes: int) -> float:
    """A longer read than one that was measured takes longer in proportion; a shorter one is quicker
    by the root of that only, because a part of every read is latency, and which part is not known.
    """
    return max(ns * max(size_bytes / size, math.sqrt(size_bytes / size)) for size, ns in samples)
