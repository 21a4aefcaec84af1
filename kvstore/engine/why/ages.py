"""Ages of evicted blocks: time since their last use, from their place in the order of use.

    mark ── every second: order so far, time ──▶ marks      order of a victim ──▶ age ──▶ counts

Uses of blocks are numbered (`Slots.stamps`; on disk by location, as a log is written in order), so
a few marks of (number, time) give the time of each, and no use of a block costs anything more.
Marks thin out with their age: about RESOLUTION of them for each doubling, so that an age is at most
1 s and 5 % above the true one. Blocks of an earlier process count as used at the start of this one.
Does not cover: the choice of victims (`policies`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.units import NS_PER_S

BOUNDS_S: Final = (60, 600, 3600, 21_600, 86_400)
"""Upper bounds, in seconds, of the age histogram in /metrics: a minute, ten, an hour, six, a
day."""
GAP_NS: Final = NS_PER_S
MARKS_MAX: Final = 4096
RESOLUTION: Final = 32

Numbers = NDArray[np.int64]


class Ages:
    """Ages of the blocks that one tier evicted, counted by BOUNDS_S."""

    def __init__(self) -> None:
        self._marks = np.zeros((2, MARKS_MAX), dtype=np.int64)
        """Row 0: number of the next use at each mark; row 1: time of the mark in ns."""
        self._count = 0
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Evicted blocks up to each bound and above the one before; the last: above all."""
        self.total_ns = 0

    def mark(self, next_number: int, now_ns: int) -> None:
        """Note that uses from number `next_number` on come later than now. Numbers and times never
        fall."""
        if self._count and now_ns - int(self._marks[1, self._count - 1]) < GAP_NS:
            return
        if self._count == MARKS_MAX:
            self._thin_out(now_ns)
        self._marks[:, self._count] = next_number, now_ns
        self._count += 1

    def evicted(self, numbers: Numbers, now_ns: int) -> None:
        """Count evicted blocks, given the numbers of their last uses."""
        if not self._count:
            self.mark(0, now_ns)
        marks, times = self._marks[:, : self._count]
        at = np.searchsorted(marks, numbers, side="right") - 1
        ages = np.maximum(now_ns - times[np.maximum(at, 0)], 0)
        self.total_ns += int(ages.sum())
        found = np.searchsorted(np.array(BOUNDS_S) * NS_PER_S, ages)
        for place, count in enumerate(np.bincount(found, minlength=len(self.counts)).tolist()):
            self.counts[place] += count

    def _thin_out(self, now_ns: int) -> None:
        """Keep the first mark of all that are about as old."""
        ages = (now_ns - self._marks[1]) / GAP_NS
        octaves = np.floor(np.log2(np.maximum(ages, 1)) * RESOLUTION)
        _, first = np.unique(octaves, return_index=True)
        kept = self._marks[:, np.sort(first)]
        self._count = kept.shape[1]
        self._marks[:, : self._count] = kept
