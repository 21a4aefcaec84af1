"""Cost of computing a token and of copying one from dram on this engine, measured as it runs.

A step that computes many tokens is timed from its plan to the ranks' report. An engine that plans
a step before the last one has reported (async scheduling) looks faster than it is: then fewer
tokens are loaded than could be, never more. Ranks time their copies. Both estimates are medians of
the last few values, so that one slow step does not count.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STEP_TOKENS_MIN = 256
"""Shorter steps are mostly overhead and decoding."""
SAMPLES = 15
LOADS_MIN = 3
"""Fewest loads for an estimate: the first copies touch memory for the first time."""


SOURCE_EVERY = 1024
SOURCE_TRIED = 32
"""Loads in a row that take the other source, among so many: enough for whole batches."""
SOURCE_MEMORY = 256
"""Loads after which an old one counts for a third."""
SOURCE_GAIN = 0.9
"""Share of the time of the one in use that the other one has to take at most."""


class Pace:
    """Nanoseconds per computed token; `guess_ns` until a step was measured."""

    def __init__(self, guess_ns: int) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._guess_ns = guess_ns
        self.is_known = False
        """Whether this engine, or another of its space, has measured."""
        self._tokens = 0
        self._begin_ns = 0

    def planned(self, tokens: int, now_ns: int) -> None:
        """A step that computes so many tokens begins."""
        self._tokens, self._begin_ns = tokens, now_ns

    def reported(self, now_ns: int) -> bool:
        """The ranks have run the step. True if it gave a measurement."""
        tokens, self._tokens = self._tokens, 0
        if tokens >= STEP_TOKENS_MIN:
            self._samples.append((now_ns - self._begin_ns) / tokens)
            self.is_known = True
        return tokens >= STEP_TOKENS_MIN

    def told(self, guess_ns: int) -> None:
        """Take another engine's measurement: a better guess."""
        self._guess_ns, self.is_known = guess_ns, True

    @property
    def measured_ns(self) -> int:
        """0: not yet."""
        return round(median(self._samples)) if self._samples else 0

    @property
    def ns_per_token(self) -> float:
        """The estimate."""
        return median(self._samples) if self._samples else float(self._guess_ns)


class LoadPace:
    """Nanoseconds per token copied from dram; 0, as if it were free, until some were measured."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._guess_ns = 0

    def loaded(self, tokens: int, duration_ns: int) -> None:
        """A rank copied so many tokens."""
        if tokens > 0:
            self._samples.append(duration_ns / tokens)

    def told(self, guess_ns: int) -> None:
        """Take another engine's measurement: a better guess."""
        self._guess_ns = guess_ns

    @property
    def measured_ns(self) -> int:
        """0: not yet."""
        return round(median(self._samples)) if len(self._samples) >= LOADS_MIN else 0

    @property
    def ns_per_token(self) -> float:
        """The estimate."""
        return self.measured_ns or float(self._guess_ns)


class SourcePace:
    """Whether verified loads come from hbm or from dram."""

    def __init__(self) -> None:
        self._spent_ns = {True: 0.0, False: 0.0}
        self._bytes = {True: 0.0, False: 0.0}
        """Sums of loads from hbm (True) and from dram, old ones fading."""
        self._count = 0
        self._prefers_hbm = False

    def takes_hbm(self) -> bool:
        """Whether the next load comes from hbm."""
        is_tried = self._count % SOURCE_EVERY >= SOURCE_EVERY - SOURCE_TRIED
        self._count += 1
        if not is_tried:
            self._choose()
        return self._prefers_hbm != is_tried

    def ended(self, duration_ns: int, size_bytes: int, *, is_hbm: bool) -> None:
        """A load of that size was served for that time, its part of its batch's. Batches that are
        seen to end together say nothing one by one: sums are compared."""
        fade = 1 - 1 / SOURCE_MEMORY
        self._spent_ns[is_hbm] = fade * self._spent_ns[is_hbm] + duration_ns
        self._bytes[is_hbm] = fade * self._bytes[is_hbm] + size_bytes

    def _choose(self) -> None:
        if all(self._bytes.values()):
            hbm, dram = (self._spent_ns[each] / self._bytes[each] for each in (True, False))
            used, other = (hbm, dram) if self._prefers_hbm else (dram, hbm)
            self._prefers_hbm ^= other < used * SOURCE_GAIN
