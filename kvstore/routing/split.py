"""Local or remote prefill, and the queue of remote ones.

    uncached tokens, prefill queue, decode load ─▶ `where` ─▶ remote: `PrefillLanes` ─▶ a prefiller

| uncached ≥           | decode streams ≥ | prefill queue < | prefill |
|----------------------|------------------|-----------------|---------|
| 256 (`uncached_min`) | –                | 10              | remote  |
| 64                   | 8                | 10              | remote  |
| otherwise            |                  |                 | local   |

The first threshold is learned: a remote prefill that took longer than the local one was predicted
to take raises it, a faster one lowers it, in steps of a few percent and within bounds. The second
follows in proportion.

Rule 1 of the lanes: shorter buckets first; a prompt that waited AGING_S counts as one of the next
shorter bucket, so that a long one waits at most (buckets × AGING_S) behind shorter ones that came
later.
Rule 2: the short lane is never behind a very long prompt: with two prefillers and more, one takes
none of the buckets from the third on while the others do. A single prefiller takes both, since the
engine's chunks interleave them.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvstore.routing.policy import PolicySplit
from kvstore.units import NS_PER_S

if TYPE_CHECKING:
    from kvstore.routing.requests import OpenRequest

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
_SLACK: Final = 100
"""A heap is swept when more than half of its entries, and more than this, are gone."""
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


class PrefillLanes:
    """Queue of one pool's remote prefills, in lanes by length."""

    def __init__(self) -> None:
        self._lanes: list[list[tuple[int, int, str]]] = [[] for _ in range(len(BUCKET_TOKENS) + 1)]
        """A heap by (priority, number) for each bucket, shortest prompts first."""
        self._waiting: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def bucket(self, uncached: float) -> int:
        """Bucket of a prompt by its uncached tokens; 0: the shortest."""
        return bisect.bisect_left(BUCKET_TOKENS, uncached)

    def add(self, opened: OpenRequest, now_ns: int) -> None:
        """Queue a remote prefill, by its `uncached` tokens, which stay as they are meanwhile."""
        assert opened.laned_ns is None
        opened.laned_ns = now_ns
        self._waiting[opened.request_id] = opened
        heap = self._lanes[self.bucket(opened.uncached)]
        if len(heap) > 2 * len(self._waiting) + _SLACK:
            heap[:] = [each for each in heap if each[2] in self._waiting]
            heapq.heapify(heap)
        request = opened.request
        priority = 0 if request.tenant else request.priority  # no tenant goes before another
        heapq.heappush(heap, (priority, opened.number, opened.request_id))

    def remove(self, opened: OpenRequest) -> None:
        """Take a request out; no error if it is not queued."""
        if self._waiting.pop(opened.request_id, None) is not None:
            opened.laned_ns = None

    def uncached(self) -> float:
        """Uncached tokens of all queued prompts together."""
        return sum(opened.uncached for opened in self._waiting.values())

    def order(self, now_ns: int) -> list[OpenRequest]:
        """First request of each lane, in the order in which they are due: by bucket less aging,
        then by arrival.
        """
        heads = []
        for bucket, heap in enumerate(self._lanes):
            while heap and heap[0][2] not in self._waiting:
                heapq.heappop(heap)
            if heap:
                opened = self._waiting[heap[0][2]]
                assert opened.laned_ns is not None
                aged = bucket - int((now_ns - opened.laned_ns) / NS_PER_S / AGING_S)
                heads.append((aged, opened.laned_ns, opened.number, opened))
        return [opened for *_, opened in sorted(heads, key=lambda head: head[:3])]

    def may_take(self, uncached: float, busy: Mapping[str, tuple[int, float]]) -> set[str]:
        """Prefillers that may take a prompt. Args: `busy`: prefiller → (requests there, uncached
        tokens of the longest)."""
        room = {name for name, (count, _) in busy.items() if count < PREFILLER_REQUESTS_MAX}
        if self.bucket(uncached) < _LONG_BUCKET or len(busy) == 1:
            return room
        has_long = {n for n, (_, longest) in busy.items() if self.bucket(longest) >= _LONG_BUCKET}
        return room & has_long if len(busy) - len(has_long) <= 1 else room
