"""The queue for the disk: blocks that watches wait for, the shortest rest first.

    enter ──first──▶ drop (its reads begun) … ──empty, or its watch is over: leave──▶ over

Shortest remaining processing time has the least mean wait (Schrage, 1968), and a long prompt keeps
nobody from the disk. A prompt that shorter ones pass for too long is computed: its engine waits no
longer, and it leaves the queue.

Costs of a call grow with the blocks of its read and READS_COUNTED, not with the table.
Does not cover: reads, room (`files`), watches (`arrivals`), how long reads take (`pace`).
"""

from __future__ import annotations

import bisect
import itertools
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvstore.engine.memory.table import NO_ROWS, Keys, Rows
from kvstore.engine.moves.arrivals import Flags, Name
from kvstore.engine.sessions.askers import Asker

READS_COUNTED: Final = 1024
"""Most reads that an estimate adds up: nobody waits for so many."""
STALE_MAX: Final = 64
"""Most places of reads that are over, beyond one for each read."""


class QueuedRead(msgspec.Struct):
    """Blocks on disk that one watch waits for and that are not being read yet, in chain order."""

    name: Name
    number: int
    asker: Asker
    keys: Keys
    rows: Rows
    """Their rows when they were queued, [S][n]; a row may be that of another block by now."""
    new_bytes: int
    """Bytes that no other read had when this one was entered."""

    @property
    def slots_bytes(self) -> int:
        """Size of the slots of one block, in all shards."""
        return sum(self.asker.slot_sizes)

    @property
    def size_bytes(self) -> int:
        """Size of the slots of all blocks."""
        return len(self.keys) * self.slots_bytes


class _QueuePlace(NamedTuple):
    size_bytes: int
    """When it was entered: what a read has less by now was at the front."""
    number: int
    name: Name


class ReadQueue:
    """Queued reads by name, one for each, and their order."""

    def __init__(self, row_count_max: int) -> None:
        self._reads: dict[Name, QueuedRead] = {}
        self._order: list[_QueuePlace] = []
        """Sorted; with places of reads that are over."""
        self._numbers = itertools.count(1)
        self._queued = np.zeros(row_count_max + 1, dtype=np.int32)
        """Number of the reads that each row is in; none for row -1."""
        self._mark = np.zeros(row_count_max + 1, dtype=bool)
        """Flags of the rows of one read, while `has` looks at it."""

    def __len__(self) -> int:
        return len(self._reads)

    def enter(self, name: Name, asker: Asker, keys: Keys, rows: Rows) -> None:
        """Queue these blocks, at least one, instead of those of an earlier read of this name."""
        old = self._reads.get(name)
        if old is not None and np.array_equal(old.rows, rows):
            return
        self.leave(name)
        new_bytes = int(np.count_nonzero(self._queued[rows[0]] == 0)) * sum(asker.slot_sizes)
        read = QueuedRead(name, next(self._numbers), asker, keys, rows, new_bytes)
        self._reads[name] = read
        self._queued[rows] += 1
        if len(self._order) > 2 * len(self._reads) + STALE_MAX:
            self._order = [place for place in self._order if self._at(place)]
        bisect.insort(self._order, _QueuePlace(read.size_bytes, read.number, name))

    def leave(self, name: Name) -> None:
        """End the read of this name, if there is one."""
        if (read := self._reads.pop(name, None)) is not None:
            self._queued[read.rows] -= 1

    def drop(self, read: QueuedRead, count: int) -> None:
        """Take the first blocks out of the queue; the read is over with the last one."""
        self._queued[read.rows[:, :count]] -= 1
        read.keys, read.rows = read.keys[count:], read.rows[:, count:]
        if not len(read.keys):
            del self._reads[read.name]

    @property
    def first(self) -> QueuedRead | None:
        """The next read; None: nobody waits."""
        over = itertools.takewhile(lambda place: self._at(place) is None, self._order)
        del self._order[: sum(1 for _ in over)]
        return self._at(self._order[0]) if self._order else None

    def _at(self, place: _QueuePlace) -> QueuedRead | None:
        """The read of a place; None: it is over."""
        read = self._reads.get(place.name)
        return read if read is not None and read.number == place.number else None

    def has(self, name: Name, rows: Rows) -> Flags:
        """Flags of the rows that this watch has queued itself: other watches may end before theirs
        are read."""
        own = self._reads[name].rows if name in self._reads else NO_ROWS
        self._mark[own] = True
        flags: Flags = self._mark[rows]
        self._mark[own] = False
        return flags

    def bytes_until(self, name: Name) -> int:
        """Bytes to be read until the last block of this read is there, those of reads before it
        included, each block about once; 0: none of its blocks is queued."""
        own = self._reads.get(name)
        if own is None:
            return 0
        places = self._order[:READS_COUNTED]
        before = itertools.takewhile(lambda place: place.number != own.number, places)
        reads = [own, *filter(None, map(self._at, before))]
        return max(sum(min(each.new_bytes, each.size_bytes) for each in reads), own.size_bytes)

    def check(self) -> None:
        """Raise AssertionError if a count is wrong."""
        queued = np.zeros_like(self._queued)
        for read in self._reads.values():
            queued[read.rows] += 1
            assert len(read.keys) == read.rows.shape[1] > 0, "a read without blocks"
            assert any(place.number == read.number for place in self._order), "without a place"
        assert bool((self._queued == queued).all()), "a block in a read that is over"
