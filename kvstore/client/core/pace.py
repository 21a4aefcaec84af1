"""Cost of computing a token and of copying one from dram on this engine, measured as it runs.

A step that computes many tokens has a number, which ranks report when they have run it. Its time
begins with its plan, or with the report of the step before if that one was still running (async
scheduling, vLLM's default), and ends with its own report. Ranks time their copies. Both estimates
are medians of the last few values, so that one slow step does not count.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STEP_TOKENS_MIN = 256
"""Fewest tokens of a step that is timed: shorter ones are mostly overhead and decoding."""
STEPS_MAX = 32
"""Steps that have been planned and not reported; no engine plans as far ahead."""
SAMPLES = 15
LOADS_MIN = 3
"""Fewest loads for an estimate: the first copies touch memory for the first time."""


SOURCE_EVERY = 1024
SOURCE_TRIED = 32
"""Loads in a row, of each SOURCE_EVERY, that try the other source: enough for whole batches."""
SOURCE_MEMORY = 256
"""Loads after which an old one counts for a third."""
SOURCE_GAIN = 0.9
"""The other source takes over if it needs less than this share of the time of the one in use."""


class Pace:
    """Nanoseconds per computed token; `guess_ns` until a step was measured."""

    def __init__(self, guess_ns: int) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._guess_ns = guess_ns
        self.is_known = False
        """Whether this engine, or another of its space, has measured."""
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=STEPS_MAX)
        """(number, tokens, time of the plan) of each step that is not reported yet, in order."""
        self._last = 0
        """Number of the last step."""
        self._ended_ns = 0
        """When a step was reported the last time."""

    def planned(self, tokens: int, now_ns: int) -> int:
        """Count a planned step that computes `tokens` tokens. Returns the number by which ranks
        report it; 0: it is too short to be timed."""
        if tokens < STEP_TOKENS_MIN:
            return 0
        self._last += 1
        self._steps.append((self._last, tokens, now_ns))
        return self._last

    def reported(self, step: int, now_ns: int) -> bool:
        """A rank has run the step of this number. True if it gave a measurement, as the first
        report of each does."""
        while self._steps and self._steps[0][0] <= step:
            number, tokens, begin_ns = self._steps.popleft()
            if number == step:
                self._samples.append((now_ns - max(begin_ns, self._ended_ns)) / tokens)
                self._ended_ns, self.is_known = now_ns, True
                return True
        return False

    def in_flight_ns(self, now_ns: int) -> float:
        """Estimated time until the steps that were planned and not reported have ended."""
        if not self._steps:
            return 0.0
        begin_ns = max(self._steps[0][2], self._ended_ns)
        tokens = sum(tokens for _, tokens, _ in self._steps)
        return max(0.0, tokens * self.ns_per_token - (now_ns - begin_ns))

    def told(self, guess_ns: int) -> None:
        """Take another engine's measurement: a better guess."""
        self._guess_ns, self.is_known = guess_ns, True

    @property
    def measured_ns(self) -> int:
        """Measured nanoseconds per token; 0: none yet."""
        return round(median(self._samples)) if self._samples else 0

    @property
    def ns_per_token(self) -> float:
        """The measured value, or the guess before there is one."""
        return median(self._samples) if self._samples else float(self._guess_ns)


class LoadPace:
    """Nanoseconds per token copied from dram; 0, as if it were free, until some were measured."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._guess_ns = 0

    def loaded(self, tokens: int, duration_ns: int) -> None:
        """Count a rank's copy of `tokens` tokens, which took `duration_ns`."""
        if tokens > 0:
            self._samples.append(duration_ns / tokens)

    def told(self, guess_ns: int) -> None:
        """Take another engine's measurement: a better guess."""
        self._guess_ns = guess_ns

    @property
    def measured_ns(self) -> int:
        """Measured nanoseconds per token; 0: none before LOADS_MIN loads."""
        return round(median(self._samples)) if len(self._samples) >= LOADS_MIN else 0

    @property
    def ns_per_token(self) -> float:
        """The measured value, or the guess before there is one."""
        return self.measured_ns or float(self._guess_ns)


class SourcePace:
    """Choice between hbm and dram as the source of verified loads, by their measured times."""

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
        """Count a load of `size_bytes` that took `duration_ns`, its share of its batch's time. Only
        sums are compared: loads of a batch are seen to end together, so one alone says nothing."""
        fade = 1 - 1 / SOURCE_MEMORY
        self._spent_ns[is_hbm] = fade * self._spent_ns[is_hbm] + duration_ns
        self._bytes[is_hbm] = fade * self._bytes[is_hbm] + size_bytes

    def _choose(self) -> None:
        if all(self._bytes.values()):
            hbm, dram = (self._spent_ns[each] / self._bytes[each] for each in (True, False))
            used, other = (hbm, dram) if self._prefers_hbm else (dram, hbm)
            self._prefers_hbm ^= other < used * SOURCE_GAIN
