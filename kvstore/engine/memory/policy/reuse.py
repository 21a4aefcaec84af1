"""Blocks that served a second request outlive those that did not, eight times over.

Two classes, each in order of use: *fresh* blocks, which no request after their own has used, and
*reused* ones. The next victim is the one with the greater age, where the age of a reused block
counts an eighth: a scan evicts fresh blocks before reused ones, and blocks out of use leave, too. A
key that was evicted and comes back while it is remembered (`RecentKeys`) starts as reused.

The idea is S3-FIFO's (Yang et al., SOSP 2023): demote blocks seen once quickly, and remember their
keys. S3-FIFO lacks the order of chains. S3-FIFO and SIEVE evict in order of insertion, and the
start of a chain was inserted first: it goes before the turns of the chat that hang on it. Here the
start goes last: a block is used only together with those before it, so if it is reused they are,
and they are younger. The one exception is a key that was forgotten before its time.

Measured by `bench/scenarios/policies.py`: weights of 1/4 to 1/16 are within some points of each
other, each best somewhere; one that two memories of gone keys steer, as in ARC, was no better.
Wrong where most blocks are used exactly twice, or the cache holds nearly all that comes back: then
`lru` wins by up to two points. Cost over `lru`: 9 bytes a slot and 4 for the keys that went, and in
a pool of a million slots, by the median, some 70 µs for each insert or use of 512 and 0.25 ms for
each pop; the pop that looks over all slots takes some ms more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.lru import OldestFirst
from kvstore.engine.memory.policy.port import NONE, Mask, MayGo, Members, Prints, Stamps, Words

# ── recent ────────────────────────────────────────────────────────────────────────────────────────
# Keys seen lately, in two bytes each: a bounded set that forgets the oldest first.
#
# A table of buckets of eight 16-bit fingerprints. A key goes to the front of its bucket and pushes
# the last one out, without time stamps and sweeps: the set ages by use.
#
# Sized for n keys, after m other keys that were added since:
# - `may_contain` of a key that was added is True with probability P(Poisson(8 m / n) <= 7): 0.999
#   at m = n / 4, 0.95 at n / 2, 0.45 at n, 0.01 at 2 n. A key pushed out early is one more "not
#   seen".
# - `may_contain` of a key that never was is True with probability at most 8 / 65,535 = 0.00012.
#
# The seed keeps a chooser of keys from choosing collisions. Bytes: 2 n, rounded up to a power of
# two of buckets. Does not cover: use of the answers (`reuse`, `disk`).

WAYS: Final = 8
_BUCKETS_MIN = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _TOP = np.uint64(32), np.uint64(48)

Buckets = NDArray[np.int64]
Marks = NDArray[np.uint16]
"""Fingerprints, never 0: 0 is an empty place."""


class RecentKeys:
    """A bounded set of keys.

    Args:
        key_count: approximate number of keys remembered.
        seed: any number; another one makes other collisions.
    """

    def __init__(self, *, key_count: int, seed: int) -> None:
        buckets = max(_BUCKETS_MIN, -(-key_count // WAYS))
        self._mask = np.uint64((1 << (buckets - 1).bit_length()) - 1)
        self._table = np.zeros((int(self._mask) + 1, WAYS), dtype=np.uint16)
        self._seed = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)

    def _places(self, prints: Prints) -> tuple[Buckets, Marks]:
        mixed = (prints ^ self._seed) * _FIRST
        mixed = (mixed ^ (mixed >> _HALF)) * _SECOND
        marks = np.maximum((mixed >> _TOP).astype(np.uint16), np.uint16(1))
        return (mixed & self._mask).astype(np.int64), marks

    def may_contain(self, prints: Prints) -> Mask:
        """Mask of keys that were added lately. Errors of both kinds occur; the comment above has
        their probabilities."""
        buckets, marks = self._places(prints)
        found: Mask = (self._table[buckets] == marks[:, None]).any(axis=1)
        return found

    def add(self, prints: Prints) -> None:
        """Remember these, the last of them as the latest."""
        buckets, marks = self._places(prints)
        while len(buckets):
            # Two of a batch may meet in one bucket: first the first, in the next round the second.
            _, first = np.unique(buckets, return_index=True)
            at = buckets[first]
            old = self._table[at]
            self._table[at] = _to_front(old, marks[first])
            if len(first) == len(buckets):
                return
            rest = np.ones(len(buckets), dtype=bool)
            rest[first] = False
            buckets, marks = buckets[rest], marks[rest]


def _to_front(rows: Marks, marks: Marks) -> Marks:
    """`rows` of buckets, each with its mark in front: moved there if the row has it, else in place
    of the row's last mark."""
    same = rows == marks[:, None]
    # Where the gap is that closes when the mark is put in front.
    gap = np.where(same.any(axis=1), same.argmax(axis=1), WAYS - 1)
    shifted = np.empty_like(rows)
    shifted[:, 0] = marks
    shifted[:, 1:] = np.where(np.arange(1, WAYS) <= gap[:, None], rows[:, :-1], rows[:, 1:])
    return shifted


# ── reuse ─────────────────────────────────────────────────────────────────────────────────────────

REUSED_AGE: Final = 0.125
"""Factor by which the age of a reused block counts, against a fresh one."""
REMEMBERED: Final = 2
"""Number of keys remembered after eviction, as a multiple of the pool's slots."""
_SEED: Final = 0x6B76


class Columns:
    """Prints and flags of reuse, by word. A word lies in one pool, so all pools share these
    columns."""

    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps
        self.prints: Prints = np.zeros(len(stamps), dtype=np.uint64)
        self.is_reused = np.zeros(len(stamps), dtype=bool)


class Reuse:
    """Order of one pool's slots.

    Args:
        columns: of the arena.
        members: mask of words in this pool, one bool per word.
        slot_count_max: slots that the pool can ever have.
    """

    def __init__(self, columns: Columns, *, members: Members, slot_count_max: int) -> None:
        self._stamps = columns.stamps
        self._prints = columns.prints
        self._is_reused = columns.is_reused
        self._members = members
        self._fresh = OldestFirst(self._stamps, among=lambda: members() & ~self._is_reused)
        self._reused = OldestFirst(self._stamps, among=lambda: members() & self._is_reused)
        self._gone = RecentKeys(key_count=REMEMBERED * slot_count_max, seed=_SEED)
        # A queue of nothing would be looked for in all slots each time.
        self._fresh_count = 0
        self._reused_count = 0
        self._now = 0

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        self._prints[words] = prints
        came_back = self._gone.may_contain(prints)
        self._is_reused[words] = came_back
        self._count(+1, came_back)
        self.touch(words, stamps)
        self._fresh.note(words[~came_back], stamps[~came_back])
        self._reused.note(words[came_back], stamps[came_back])

    def resume(self, words: Words, prints: Prints) -> None:
        self._prints[words] = prints
        self._fresh_count += len(words)

    def use(self, words: Words, stamps: Stamps) -> None:
        new = words[~self._is_reused[words]]
        if len(new):
            # A hint may name a key twice; the counts must not believe it.
            first_time = len(np.unique(new))
            self._fresh_count -= first_time
            self._reused_count += first_time
            self._is_reused[new] = True
        self.touch(words, stamps)
        self._reused.note(words, stamps)

    def touch(self, words: Words, stamps: Stamps) -> None:
        self._now = max(self._now, int(stamps.max(initial=0)) + 1)
        self._stamps[words] = stamps

    def forget(self, words: Words) -> None:
        self._count(-1, self._is_reused[words[self._stamps[words] > 0]])
        self._stamps[words] = 0

    def _count(self, sign: int, is_reused: Mask) -> None:
        reused = int(np.count_nonzero(is_reused))
        self._reused_count += sign * reused
        self._fresh_count += sign * (len(is_reused) - reused)

    def pop(self, count: int, may_go: MayGo) -> Words:
        victims: list[Words] = []
        missing = count
        while missing > 0:
            fresh, reused = self._split(missing, may_go)
            if fresh + reused == 0:
                break
            for queue, share in ((self._fresh, fresh), (self._reused, reused)):
                if share:
                    words = queue.take(share, may_go)
                    went = self._stamps[words]
                    self.forget(words)
                    self._stamps[words] = -went
                    victims.append(words)
                    missing -= len(words)  # it may see less of its queue than the split did
        gone = np.concatenate(victims) if victims else NONE
        self._gone.add(self._prints[gone])
        return gone

    def _split(self, count: int, may_go: MayGo) -> tuple[int, int]:
        """Numbers of fresh and of reused blocks among the next victims, at most `count` together.
        Fewer if not all are visible yet; both 0 only when no block may go."""
        fresh = self._fresh.peek(count, may_go) if self._fresh_count else NONE
        reused = self._reused.peek(count, may_go) if self._reused_count else NONE
        ages = np.concatenate([self._now - fresh, (self._now - reused) * REUSED_AGE])
        order = np.argsort(-ages, kind="stable")[:count]
        is_fresh = order < len(fresh)
        for mine, seen in ((is_fresh, len(fresh)), (~is_fresh, len(reused))):
            # Behind the last one in sight there may be more: look again before anything younger.
            if 0 < seen < count and np.count_nonzero(mine[: len(is_fresh)]) == seen:
                is_fresh = is_fresh[: int(np.flatnonzero(mine)[-1]) + 1]
        chosen = int(np.count_nonzero(is_fresh))
        return chosen, len(is_fresh) - chosen

    def oldest_stamp(self) -> int | None:
        stamps = self._stamps[self._members() & (self._stamps > 0)]
        return int(stamps.min()) if len(stamps) else None
