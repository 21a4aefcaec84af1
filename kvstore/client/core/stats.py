"""Counters of one scheduler side since the last take: plain numbers that add up across steps."""

from __future__ import annotations

from collections import Counter


class SchedulerStats:
    """Only additions; `take` empties it. Names are the metric names without prefix."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def take(self) -> dict[str, int]:
        counts = dict(self._counts)
        self._counts.clear()
        return counts
