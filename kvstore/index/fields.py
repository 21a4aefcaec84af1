"""The flat memory of `holdings.py`: where each number lies. `loops.py` has the meaning of each."""

from __future__ import annotations

from typing import Final, Protocol

WORDS: Final = 8
"""32-bit numbers of a key."""

# A row.
ROW: Final = 12
SCOPE: Final = 8
SET: Final = 9
NEWER: Final = 10
OLDER: Final = 11
"""Next older row in the order of use; in free rows: the next free one."""

# A chunk of a set; the last three count in its first chunk only.
CHUNK: Final = 16
MEMBERS: Final = 12
NEXT: Final = 12
"""Next chunk of the set; in memory right behind the members."""
REFS: Final = 13
"""Rows that have this set."""
SIZE: Final = 14
HASH: Final = 15

# A slot.
SLOT: Final = 7
STATE: Final = 0
LOST: Final = 1
"""1: a row that this slot held was evicted."""
LENGTH: Final = 2
"""This number and the next two: leading blocks in hbm, in dram, in file, of the match under way."""
WORST: Final = 5
"""Slowest tier that the match under way needed so far."""
LOST_IN: Final = 6
"""Number of slots of the scope with this number (not of this slot) that have lost a row."""
SLOWEST: Final = 2
"""Number of the slowest tier."""

FREE: Final = 0
SHOWN: Final = 1
HIDDEN: Final = 2
VOID: Final = 3
"""The slot is in no answer, and its rows are to be swept."""

# Of scratch, in parts as long as there are slots: a set being made (1), the answer (ANSWER), the
# slots still in the run (1), the tiers that keep each of them as fast as it is (1).
ANSWER: Final = 5
"""Numbers of one answer: slot, three lengths, lost."""

# Of meta. First a secret for each word of a key.
SECRET_OF_SCOPE: Final = WORDS
SECRET_A: Final = 9
SECRET_B: Final = 10
CELL_COUNT: Final = 11
SET_CELL_COUNT: Final = 12
CHUNK_COUNT: Final = 13
SLOT_COUNT: Final = 14
ENTRY_MAX: Final = 15
ENTRIES: Final = 16
BLOCKS: Final = 17
EVICTED: Final = 18
ROW_FREE: Final = 19
ROW_FRESH: Final = 20
CHUNK_FREE: Final = 21
CHUNK_FRESH: Final = 22
MEMO_FROM: Final = 23
"""The change made in this call turned the set with this number …"""
MEMO_TO: Final = 24
"""… into this one. Both are void once either set is freed."""
SWEPT: Final = 25
"""The next row that the sweep looks at."""
GAP: Final = 26
"""The empty cell at which the last probe ended."""
META: Final = 27

M31: Final = (1 << 31) - 1
"""Mask of 31 bits: a number of so many bits can be multiplied by a secret without wrapping."""


class Ints(Protocol):
    """Flat memory: a memoryview, or an array of numpy in compiled code."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...
