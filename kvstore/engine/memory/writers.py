"""Writer of each slot, and slots of each writer: both answers cost their own length.

A look at the whole column takes 13 ms with 1 TiB of slots, and any rank could ask for one with a
datagram. So each writer has a list of its granted slots; returned ones are dropped from the list
when they are half of it. Does not cover: the journal, states (`slots`).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.port import NONE, Words
from kvstore.engine.memory.table import tallied

_SPARE = 1024
"""A list is not cleaned for fewer returned slots."""


class _Given:
    """Slots granted to one writer; some are returned, or granted twice."""

    __slots__ = ("batches", "size")

    def __init__(self) -> None:
        self.batches: list[Words] = []
        self.size = 0

    def add(self, words: Words) -> None:
        self.batches.append(words)
        self.size += len(words)


class Writers:
    """Writers by word, and slots by writer; writer 0 is none."""

    def __init__(self, word_count: int) -> None:
        self.column = np.zeros(word_count, dtype=np.int64)
        self.counts: Counter[int] = Counter()
        """Number of slots of each writer that has any."""
        self._given: dict[int, _Given] = {}

    def name(self, words: Words, writer: int) -> None:
        """Set the writer of distinct slots."""
        if not len(words):
            return
        before = self.column[words]
        self.column[words] = writer
        for old, count in tallied(before[before != 0]):
            self.counts[old] -= count
            if not self.counts[old]:
                del self.counts[old]
                self._given.pop(old, None)
        if writer:
            self._give(words, writer)

    def adopt(self, words: Words, writers: NDArray[np.int64]) -> None:
        """Set the writers of slots, before any other call."""
        self.column[words] = writers
        for writer, _ in tallied(writers[writers != 0]):
            self._give(words[writers == writer], writer)

    def of(self, writer: int) -> Words:
        """Slots of this writer, ascending."""
        if not self.counts.get(writer):
            return NONE
        return self._tidied(writer)

    def _give(self, words: Words, writer: int) -> None:
        self.counts[writer] += len(words)
        given = self._given.setdefault(writer, _Given())
        given.add(words)
        if given.size > 2 * self.counts[writer] + _SPARE:
            self._tidied(writer)

    def _tidied(self, writer: int) -> Words:
        words: Words = np.unique(np.concatenate(self._given[writer].batches))
        words = words[self.column[words] == writer]
        tidy = self._given[writer] = _Given()
        tidy.add(words)
        return words
