"""Least recently used: which slot is freed next. See `oldest` for how the order is kept.

Wrong for scans larger than the tier: a workload that reads everything once pushes out what is
reused; `reuse` is for that.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.policy.oldest import OldestFirst
from kvstore.engine.policy.port import NONE, MayGo, Members, Prints, Stamps, Words


class Lru:
    """Order of use of one pool's slots.

    Args:
        stamps: shared by all pools, one per word; 0 = the slot holds nothing.
        members: which words lie in this pool now, one bool per word.
    """

    def __init__(self, stamps: Stamps, *, members: Members) -> None:
        self._stamps = stamps
        self._members = members
        self._oldest = OldestFirst(stamps, among=members)

    def insert(self, words: Words, first_stamp: int, prints: Prints) -> None:
        self.touch(words, first_stamp)

    def use(self, words: Words, first_stamp: int) -> None:
        self.touch(words, first_stamp)

    def touch(self, words: Words, first_stamp: int) -> None:
        self._stamps[words] = np.arange(first_stamp, first_stamp + len(words))

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
