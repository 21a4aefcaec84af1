"""Durations: counts by time, two to an octave, and percentiles out of them.

Bounded memory and no locks: one thread adds. A percentile is at most 41 % above the true one, which
is the width of a bucket. Does not cover: names and help of metrics (`metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from kvstore.ports import Clock
from kvstore.units import NS_PER_S

FIRST_NS: Final = 1000
PER_OCTAVE: Final = 2
BUCKETS: Final = 52
"""Upper bounds from 1 µs on; the last is 67 s, and counts longer durations, too."""
BOUNDS_NS: Final = tuple(round(FIRST_NS * 2 ** (n / PER_OCTAVE)) for n in range(BUCKETS))


class Timings:
    """Durations of one kind."""

    __slots__ = ("count", "counts", "size_bytes", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.count = 0
        self.total_ns = 0
        self.size_bytes = 0

    def add(self, took_ns: int, size_bytes: int = 0) -> None:
        """Count one duration, and the bytes moved in it."""
        at = math.ceil(math.log2(max(took_ns, FIRST_NS) / FIRST_NS) * PER_OCTAVE)
        self.counts[min(at, BUCKETS - 1)] += 1
        self.count += 1
        self.total_ns += took_ns
        self.size_bytes += size_bytes

    def percentile_ns(self, percent: float) -> int:
        """Upper bound of the shortest `percent` of all; 0: nothing was added."""
        wanted, seen = math.ceil(self.count * percent / 100), 0
        for bound, count in zip(BOUNDS_NS, self.counts, strict=True):
            seen += count
            if seen >= wanted > 0:
                return bound
        return 0

    @property
    def bytes_per_s(self) -> int:
        """Rate over all durations; 0: nothing was added."""
        return int(self.size_bytes * NS_PER_S / self.total_ns) if self.total_ns else 0


class Stopwatch:
    """The parts of one fetch, one after the other."""

    def __init__(self, timings: Mapping[str, Timings], clock: Clock) -> None:
        self._timings, self._clock = timings, clock
        self._begin_ns = self._lap_ns = clock.now_ns()

    def lap(self, kind: str, size_bytes: int = 0) -> None:
        """A part has ended."""
        now_ns = self._clock.now_ns()
        self._timings[kind].add(now_ns - self._lap_ns, size_bytes)
        self._lap_ns = now_ns

    def end(self, kind: str, size_bytes: int) -> None:
        """All of it has."""
        self._timings[kind].add(self._clock.now_ns() - self._begin_ns, size_bytes)
