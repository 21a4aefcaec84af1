"""Eviction of the least recently used slot. `OldestFirst` keeps the order.

Wrong for scans larger than the tier: a workload that reads everything once evicts the reused
blocks; `reuse` is for that.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.memory.policy.port import NONE, MayGo, Members, Prints, Stamps, Words

# ── oldest ────────────────────────────────────────────────────────────────────────────────────────
# Slots in the order of their stamps, without moving anything when a stamp changes.
#
# A touch writes stamps and does nothing else: 4 µs for 512. Victims come from a queue, the oldest
# slots in order, made by one look over all stamps when the last queue is used up: 8 ms for a
# million slots, which buys some 30 thousand victims. Every candidate outside the queue is younger
# than all in it: stamps only grow, and one that does not is inserted at its place (`note`). An
# entry whose stamp changed since is skipped: the order has no error. A slot that may not be evicted
# (leased) is passed over and keeps its place; one leased when the queue was made waits for the next
# queue.
#
# Measured against a ring of (slot, stamp) that every touch appends to: 4 µs for 512 touches instead
# of 18, no 48 bytes a slot, and no stop while a ring of 4 million entries is compacted.

_ALL = slice(None)
_CHUNK_MIN = 256
_QUEUE_MIN = 1024
_QUEUE_SHARE = 32
_SAMPLE = 4096


class OldestFirst:
    """The oldest of some slots.

    Args:
        stamps: one per word; 0 = the slot holds nothing.
        among: mask of candidates, one bool per word.
    """

    def __init__(self, stamps: Stamps, *, among: Members) -> None:
        self._stamps = stamps
        self._among = among
        self._queue: Words = NONE
        self._queue_stamps: Stamps = NONE

    def take(self, count: int, may_go: MayGo) -> Words:
        """Up to `count` slots that may go now, oldest first; none only if no slot may go. The
        caller keeps each from being taken again: by another stamp, or by removing it from
        `among`."""
        go = self._look(count, may_go)
        if not len(go):
            return NONE
        words, end = self._queue[go], int(go[-1]) + 1
        stays = self._stamps[self._queue[:end]] == self._queue_stamps[:end]
        stays[go] = False
        passed_over = np.flatnonzero(stays)
        taken = self._queue[passed_over], self._queue_stamps[passed_over]
        self._queue, self._queue_stamps = self._queue[end:], self._queue_stamps[end:]
        if len(passed_over):
            self._queue = np.concatenate([taken[0], self._queue])
            self._queue_stamps = np.concatenate([taken[1], self._queue_stamps])
        return words

    def peek(self, count: int, may_go: MayGo) -> Stamps:
        """Stamps of the slots that `take` would return next, without taking them."""
        go = self._look(count, may_go)
        return self._queue_stamps[go]

    def note(self, words: Words, stamps: Stamps) -> None:
        """Take note of new stamps of slots: those older than the end of the queue are inserted into
        it."""
        if not len(self._queue) or not len(words):
            return
        older = stamps < self._queue_stamps[-1]
        if not older.any():
            return
        words, stamps = words[older], stamps[older]
        if len(self._queue) + len(words) > 2 * len(self._stamps):
            # Entries of slots that were emptied otherwise pile up: all is looked at anew.
            self._queue = self._queue_stamps = NONE
            return
        order = np.argsort(stamps)
        at = np.searchsorted(self._queue_stamps, stamps[order])
        self._queue = np.insert(self._queue, at, words[order])
        self._queue_stamps = np.insert(self._queue_stamps, at, stamps[order])

    def _look(self, count: int, may_go: MayGo) -> Words:
        """Indexes into the queue of up to `count` slots that may go, in order; none only if no slot
        may go."""
        assert count > 0, "nothing is asked for"
        chunk = max(_CHUNK_MIN, 2 * count)
        while len(self._queue) or self._refill(count, may_go):
            begin = 0
            while begin < len(self._queue):
                # Chosen when the queue was made, and to be looked at again: things change.
                words = self._queue[begin : begin + chunk]
                current = self._stamps[words] == self._queue_stamps[begin : begin + chunk]
                go = np.flatnonzero(current & may_go(words))[:count]
                if len(go):
                    return begin + go
                if begin or current.any():
                    begin += chunk
                else:
                    self._queue, self._queue_stamps = (
                        self._queue[chunk:],
                        self._queue_stamps[chunk:],
                    )
            self._queue = self._queue_stamps = NONE
        return NONE

    def _refill(self, count: int, may_go: MayGo) -> bool:
        """Fill the queue with the oldest slots that may go now. Returns False if there are none."""
        may = may_go(_ALL) & self._among() & (self._stamps > 0)
        words = np.flatnonzero(may)
        size = max(count, _QUEUE_MIN, len(words) // _QUEUE_SHARE)
        if size < len(words):
            # Where the oldest end is estimated from a sample: exact where it cuts, about right in
            # how many that are, and a third of the cost of a partition.
            sample = np.sort(self._stamps[words[:: len(words) // _SAMPLE + 1]])
            limit = sample[size * len(sample) // len(words)]
            words = np.flatnonzero(may & (self._stamps <= limit))
        stamps = self._stamps[words]
        order = np.argsort(stamps)
        self._queue, self._queue_stamps = words[order], stamps[order]
        return len(words) > 0


# ── lru ───────────────────────────────────────────────────────────────────────────────────────────


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
            self._stamps[words] *= -1
            victims.append(words)
            missing -= len(words)
        return np.concatenate(victims) if victims else NONE

    def oldest_stamp(self) -> int | None:
        stamps = self._stamps[self._members() & (self._stamps > 0)]
        return int(stamps.min()) if len(stamps) else None
