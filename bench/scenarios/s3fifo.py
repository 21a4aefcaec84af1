"""S3-FIFO as published (Yang et al., SOSP 2023), behind the port of policies: for comparison only.

Small queue of a tenth, main queue, ghost of as many keys as the cache holds, uses counted up to
three; both queues in order of insertion. Keeps nothing of the order of chains, which is why the
node does not ship it: the start of a chain was inserted before its end.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.memory.policies import (
    NONE,
    POLICIES,
    MayGo,
    Members,
    OldestFirst,
    Prints,
    RecentKeys,
    Stamps,
    Words,
)

SMALL_SHARE = 0.1
USES_MAX = 3


class S3Fifo:
    """Order of one pool's slots."""

    def __init__(self, stamps: Stamps, *, members: Members, slot_count_max: int) -> None:
        self._stamps = stamps
        self._entered: Stamps = np.zeros(len(stamps), dtype=np.int64)
        """Place in its queue; 0 = the slot holds nothing."""
        self._prints: Prints = np.zeros(len(stamps), dtype=np.uint64)
        self._uses = np.zeros(len(stamps), dtype=np.int8)
        self._is_main = np.zeros(len(stamps), dtype=bool)
        self._small = OldestFirst(self._entered, among=lambda: members() & ~self._is_main)
        self._main = OldestFirst(self._entered, among=lambda: members() & self._is_main)
        self._ghost = RecentKeys(key_count=slot_count_max, seed=1)
        self._next = 1

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        self._prints[words] = prints
        self._is_main[words] = self._ghost.may_contain(prints)
        self._uses[words] = 0
        self._enter(words)
        self.touch(words, stamps)

    def resume(self, words: Words, prints: Prints) -> None:
        raise AssertionError("it is for comparison only: no node goes on with it")

    def _enter(self, words: Words) -> None:
        self._entered[words] = np.arange(self._next, self._next + len(words))
        self._next += len(words)
        for queue in (self._small, self._main):
            queue.note(words, self._entered[words])

    def use(self, words: Words, stamps: Stamps) -> None:
        self._uses[words] = np.minimum(self._uses[words] + 1, USES_MAX)
        self.touch(words, stamps)

    def touch(self, words: Words, stamps: Stamps) -> None:
        self._stamps[words] = stamps

    def forget(self, words: Words) -> None:
        self._stamps[words] = 0
        self._entered[words] = 0
        self._is_main[words] = False

    def pop(self, count: int, may_go: MayGo) -> Words:
        victims: list[Words] = []
        missing = count
        while missing > 0:
            held = self._entered != 0
            small = int(np.count_nonzero(held & ~self._is_main))
            over = small - int(SMALL_SHARE * np.count_nonzero(held))
            words = self._small.take(min(missing, max(over, 1)), may_go) if over > 0 else NONE
            if len(words):
                again = self._uses[words] > 1
                self._is_main[words[again]] = True
                self._uses[words[again]] = 0
                self._enter(words[again])
                words = words[~again]
                self._ghost.add(self._prints[words])
            else:
                words = self._main.take(missing, may_go)
                if not len(words):
                    words = self._small.take(missing, may_go)
                if not len(words):
                    break
                again = self._is_main[words] & (self._uses[words] > 0)
                self._uses[words[again]] -= 1
                self._enter(words[again])
                words = words[~again]
            self.forget(words)
            victims.append(words)
            missing -= len(words)
        return np.concatenate(victims) if victims else NONE


def register() -> None:
    """Let engines of this process be configured with `policy="s3fifo"`."""

    POLICIES["s3fifo"] = S3Fifo
