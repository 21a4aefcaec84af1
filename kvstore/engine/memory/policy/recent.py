"""Keys seen lately, in two bytes each: a bounded set that forgets the oldest first.

A table of buckets of eight 16-bit fingerprints. A key goes to the front of its bucket and pushes
the last one out, without time stamps and sweeps: the set ages by use.

Sized for n keys, after m other keys that were added since:
- `may_contain` of a key that was added is True with probability P(Poisson(8 m / n) <= 7): 0.999 at
  m = n / 4, 0.95 at n / 2, 0.45 at n, 0.01 at 2 n. A key pushed out early is one more "not seen".
- `may_contain` of a key that never was is True with probability at most 8 / 65,535 = 0.00012.

The seed keeps a chooser of keys from choosing collisions. Bytes: 2 n, rounded up to a
power of two of buckets. Does not cover: use of the answers (`reuse`, `disk`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.port import Mask, Prints

WAYS: Final = 8
_BUCKETS_MIN = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _TOP = np.uint64(32), np.uint64(48)

Buckets = NDArray[np.int64]
Marks = NDArray[np.uint16]
"""Fingerprints, never 0: 0 is an empty place."""


class RecentKeys:
    """See the module.

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
        """Mask of keys added lately. Wrong both ways at times: see the module."""
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
    """Each row with its mark in front: moved there if it has it, else in place of the last."""
    same = rows == marks[:, None]
    # Where the gap is that closes when the mark is put in front.
    gap = np.where(same.any(axis=1), same.argmax(axis=1), WAYS - 1)
    shifted = np.empty_like(rows)
    shifted[:, 0] = marks
    shifted[:, 1:] = np.where(np.arange(1, WAYS) <= gap[:, None], rows[:, :-1], rows[:, 1:])
    return shifted
