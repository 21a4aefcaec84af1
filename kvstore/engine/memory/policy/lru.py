"""Eviction of the least recently used slot. `oldest` keeps the order.

Wrong for scans larger than the tier: a workload that reads everything once evicts the reused
blocks; `reuse` is for that.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.memory.policy.oldest import OldestFirst
from kvstore.engine.memory.policy.port import NONE, MayGo, Members, Prints, Stamps, Words


class Lru:
    """Order of use of one pool's slots.

    Args:
        stamps: shared by all pools, one per word; 0 = the slot holds nothing.
        members: mask of words in this pool, one bool per word.
    """

    def __init__(self, stamps: Stamps, *, members: Members) -> None:
        self._stamps = stamps
        self._members = members
        self._oldest = OldestFirst(stamps, among=members)

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        self.use(words, stamps)

    def resume(self, words: Words, prints: Prints) -> None:
        pass

    def use(self, words: Words, stamps: Stamps) -> None:
        self.touch(words, stamps)
        self._oldest.note(words, stamps)

    def touch(self, words: Words, stamps: Stamps) -> None:
        self._stamps[words] = stamps

    def forget(self, words: Words) -> None:
        self._stamps[words] = 0

    def pop(self, count: int, may_go: MayGo) -> Words:
        victims: list[Words] = []
        missing = count
        while missing > 0 and len(words := self._oldest.take(missing, may_go)):
            self._stamps[words] = 0
            victims.append(words)
            missing -= len(words)
        return np.concatenate(victims) if victims else NONE

    def oldest_stamp(self) -> int | None:
        stamps = self._stamps[self._members() & (self._stamps != 0)]
        return int(stamps.min()) if len(stamps) else None
