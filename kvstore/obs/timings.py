"""Durations: counts by time, two to an octave, and percentiles out of them.

Bounded memory and no locks: one thread adds. A percentile is at most 41 % above the true one, which
is the width of a bucket. /metrics has wider ones, `TRANSFERS` and `TTFTS`: series cost an operator
more than counts cost us. Does not cover: names and help of metrics (`metrics`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.ports import Clock
from kvstore.units import NS_PER_S

if TYPE_CHECKING:
    from kvstore.obs.metrics import Buckets

BUCKETS: Final = 56
"""Number of upper bounds, from 1 µs on, among them 1 s; the last is 181 s, whose bucket counts
longer durations, too.
"""
BOUNDS_NS: Final = tuple(round(NS_PER_S * 2 ** (n / 2 - 20)) for n in range(BUCKETS))
STEPS: Final = range(0, 46, 4)
"""Buckets of /metrics for steps of a node: 1 µs, and each factor of four above it, to 4 s."""
TRANSFERS: Final = range(14, BUCKETS - 1, 4)
"""Buckets in /metrics for transfers: 122 µs to 128 s."""
TTFTS: Final = range(28, BUCKETS - 1, 2)
"""Buckets in /metrics for times to the first token: 16 ms, and each factor of two above it, to 128
s.
"""


class Timings:
    """Counts of durations of one kind, and bytes moved in them."""

    __slots__ = ("count", "counts", "size_bytes", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.count = 0
        self.total_ns = 0
        self.size_bytes = 0

    def add(self, took_ns: int, size_bytes: int = 0) -> None:
        """Count one duration, and the bytes moved in it."""
        self.counts[min(bisect.bisect_left(BOUNDS_NS, took_ns), BUCKETS - 1)] += 1
        self.count += 1
        self.total_ns += took_ns
        self.size_bytes += size_bytes

    def percentile_ns(self, percent: float) -> int:
        """Duration below which `percent` of all lie, rounded up to a bucket's bound; 0: nothing was
        added.
        """
        wanted, seen = math.ceil(self.count * percent / 100), 0
        for bound, count in zip(BOUNDS_NS, self.counts, strict=True):
            seen += count
            if seen >= wanted > 0:
                return bound
        return 0

    def row(self, labels: Sequence[str], of: range) -> Buckets:
        """(labels, upper bound in seconds → durations up to it, sum in seconds) for /metrics, with
        these buckets and one of all.
        """
        found = {BOUNDS_NS[n] / NS_PER_S: sum(self.counts[: n + 1]) for n in of}
        return labels, found | {math.inf: self.count}, self.total_ns / NS_PER_S

    @property
    def bytes_per_s(self) -> int:
        """Rate over all durations; 0: nothing was added."""
        return int(self.size_bytes * NS_PER_S / self.total_ns) if self.total_ns else 0


class Stopwatch:
    """Times the consecutive parts of one fetch."""

    def __init__(self, timings: Mapping[str, Timings], clock: Clock) -> None:
        self._timings, self._clock = timings, clock
        self._begin_ns = self._lap_ns = clock.now_ns()

    def lap(self, kind: str, size_bytes: int = 0) -> None:
        """A part of this kind has ended: count its time, and the bytes moved."""
        now_ns = self._clock.now_ns()
        self._timings[kind].add(now_ns - self._lap_ns, size_bytes)
        self._lap_ns = now_ns

    def end(self, kind: str, size_bytes: int) -> None:
        """The fetch has ended: count its whole time, and the bytes moved."""
        self._timings[kind].add(self._clock.now_ns() - self._begin_ns, size_bytes)
