"""Local or remote prefill, and what remote ones wait for.

    uncached tokens, prefill queue, decode load ─▶ `where` ─▶ remote: a lane ─▶ a prefiller

| uncached ≥           | decode streams ≥ | prefill queue < | prefill |
|----------------------|------------------|-----------------|---------|
| 256 (`uncached_min`) | –                | 10              | remote  |
| 64                   | 8                | 10              | remote  |
| otherwise            |                  |                 | local   |

The first threshold is learned: a remote prefill that took longer than the local one was predicted
to take raises it, a faster one lowers it, in steps of a few percent and within bounds. The second
follows in proportion.

Lanes are queues of `waiting`, one for each bucket of lengths.
Rule 1: shorter buckets first; a prompt that waited AGING_S counts as one of the next shorter
bucket, so that a long one waits at most (buckets × AGING_S) behind shorter ones that came later.
Rule 2: the short lane is never behind a very long prompt: with two prefillers and more, one takes
none of the buckets from the third on while the others do. A single prefiller takes both, since the
engine's chunks interleave them.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping
from typing import Final

from kvstore.routing.policy import PolicySplit

_UP, _DOWN = 1.05, 0.98
"""Factors of the threshold after a remote prefill that did not pay, and after one that did. Slow
down: a remote prefill that does not pay costs two workers.
"""

PREFILLER_REQUESTS_MAX: Final = 4
"""Most requests at a prefiller at once: one is computed, the others hide the way there. The rest
wait in the router, where they can still be overtaken.
"""


BUCKET_TOKENS: Final = (512, 2048, 8192, 32768)
"""Bounds of the queue's length buckets; shorter prompts go first."""
AGING_S: Final = 1.0
"""Waiting time after which a prompt moves to the next shorter bucket."""
LEARNED_LEAST: Final = 64.0
_LONG_BUCKET: Final = 3
"""First bucket of long prompts, by default more than 8,192 tokens, whose prefill others notice."""


class SplitReason(enum.StrEnum):
    """Why the prefill is where it is."""

    NO_PREFILLERS = "no-prefillers"
    OFF = "off"
    """Remote prefill is off, by policy or for the request."""
    SHORT = "short"
    LONG = "long"
    BUSY_DECODE = "busy-decode"
    PREFILL_QUEUE = "prefill-queue"
    FELL_BACK = "fell-back"
    """Prefillers failed or do not fit this request, or the chosen worker is one itself."""

    @property
    def is_remote(self) -> bool:
        """Whether it is a remote prefill."""
        return self in (SplitReason.LONG, SplitReason.BUSY_DECODE)


class PrefillSplit:
    """Thresholds of one pool."""

    def __init__(self, settings: PolicySplit) -> None:
        self.settings = settings
        self.uncached_min = float(settings.uncached_min)

    def where(self, *, uncached: float, streams: float, prefill_queue: float) -> SplitReason:
        """Local or remote, by the table of the module. `prefill_queue`: requests at the least
        loaded prefiller and, of those that wait for one, a prefiller's share.
        """
        settings = self.settings
        busy_min = self.uncached_min * settings.busy_uncached_min / settings.uncached_min
        is_busy = streams >= settings.busy_streams and uncached >= busy_min
        if uncached < self.uncached_min and not is_busy:
            return SplitReason.SHORT
        if prefill_queue >= settings.queue_max:
            return SplitReason.PREFILL_QUEUE
        return SplitReason.LONG if uncached >= self.uncached_min else SplitReason.BUSY_DECODE

    def learn(self, *, uncached: float, remote_s: float, local_s: float) -> None:
        """Adapt the threshold: a remote prefill took `remote_s`, where a local one was predicted to
        take `local_s`. Long prompts are ignored, as they say nothing about the threshold.
        """
        settings = self.settings
        if not settings.is_learned or uncached > 4 * self.uncached_min:
            return
        moved = self.uncached_min * (_UP if remote_s > local_s else _DOWN)
        self.uncached_min = min(max(moved, LEARNED_LEAST), settings.learned_most)


def bucket(uncached: float) -> int:
    """Bucket of a prompt by its uncached tokens; 0: the shortest."""
    return bisect.bisect_left(BUCKET_TOKENS, uncached)


def may_take(uncached: float, busy: Mapping[str, tuple[int, float]]) -> set[str]:
    """Prefillers that may take a prompt. Args: `busy`: prefiller → (requests there, uncached tokens
    of the longest)."""
    room = {name for name, (count, _) in busy.items() if count < PREFILLER_REQUESTS_MAX}
    if bucket(uncached) < _LONG_BUCKET or len(busy) == 1:
        return room
    has_long = {name for name, (_, longest) in busy.items() if bucket(longest) >= _LONG_BUCKET}
    return room & has_long if len(busy) - len(has_long) <= 1 else room
