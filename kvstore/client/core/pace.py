"""What computing a token costs on this engine, learned from its steps.

A step that computes many tokens is timed from its plan to the ranks' report; the median of the last
few counts, so that one slow step says nothing. An engine that plans a step before the last one has
reported (async scheduling) looks faster than it is: then less is loaded than could be, never more.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STEP_TOKENS_MIN = 256
"""Shorter steps are mostly overhead and decoding."""
SAMPLES = 15


class Pace:
    """Nanoseconds per computed token; `guess_ns` until a step was measured."""

    def __init__(self, guess_ns: int) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._guess_ns = guess_ns
        self._tokens = 0
        self._begin_ns = 0

    def planned(self, tokens: int, now_ns: int) -> None:
        """A step that computes so many tokens begins."""
        self._tokens, self._begin_ns = tokens, now_ns

    def reported(self, now_ns: int) -> None:
        """The ranks have run it."""
        if self._tokens >= STEP_TOKENS_MIN:
            self._samples.append((now_ns - self._begin_ns) / self._tokens)
        self._tokens = 0

    @property
    def ns_per_token(self) -> float:
        """The estimate."""
        return median(self._samples) if self._samples else float(self._guess_ns)
