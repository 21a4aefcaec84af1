"""Tombstones of blocks that left: why, when, and for which engine. Bounded; newest wins.

    block ── leaves its last tier ──▶ one entry of 16 bytes at a place given by its print

One flat array. If the prints of two blocks lead to one place, the later block stays, so a block
that is not found here was never stored or left too long ago. A print is 64 bits of scope and key: a
tombstone may, very rarely, be another block's. This affects explanations, never bytes.
Does not cover: blocks that a tier still holds (`residency`), use by lookups (`findings`).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.table import Keys
from kvstore.engine.why.reasons import Reason
from kvstore.units import NS_PER_MS

COUNT_MAX: Final = 1 << 20
"""Most entries; 16 MiB."""
NAMES_MAX: Final = 4096
_MIX: Final = 0x9E3779B97F4A7C15
_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
NAME_SHIFT: Final = 8
TIME_SHIFT: Final = 24

Stamps = NDArray[np.uint64]
"""Packed: time in ms from bit 24 on, number of a name from bit 8 on, reason. 0: not known."""


class Departure(msgspec.Struct, frozen=True):
    """A stamp, unpacked."""

    why: Reason
    name: int
    at_ms: int


class Names:
    """Short texts by number; 0 is the empty text, and any new text when all numbers are taken."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def number(self, name: str) -> int:
        """Number of this text, a new one for a new text."""
        if len(self._numbers) < NAMES_MAX:
            self._numbers.setdefault(name, len(self._numbers))
        return self._numbers.get(name, 0)

    def text(self, number: int) -> str:
        return list(self._numbers)[number]


def stamp(why: Reason, name: int, now_ns: int) -> int:
    """Packed stamp of a reason, a name's number and a time; never 0."""
    assert 0 <= name < NAMES_MAX
    return now_ns // NS_PER_MS << TIME_SHIFT | name << NAME_SHIFT | why


def restamp(packed: int, why: Reason) -> int:
    """`packed` with another reason, without a name; 0 stays 0."""
    return stamp(why, 0, unpack(packed).at_ms * NS_PER_MS) if packed else 0


def unpack(packed: int) -> Departure:
    """The parts of a stamp."""
    low = packed & ((1 << TIME_SHIFT) - 1)
    why = Reason(low & ((1 << NAME_SHIFT) - 1))
    return Departure(why=why, name=low >> NAME_SHIFT, at_ms=packed >> TIME_SHIFT)


class Tombstones:
    """Stamps of the blocks that left one node, by scope and key."""

    def __init__(self, *, block_count_max: int) -> None:
        size = min(COUNT_MAX, 1 << max(4, (block_count_max - 1).bit_length()))
        self._mask = np.uint64(size - 1)
        # Print and stamp side by side: one cache line a block.
        self._entries = np.zeros((size, 2), dtype=np.uint64)
        self.has_overwritten = False
        """Whether any entry gave way to another block's."""

    def write(self, scopes: NDArray[np.uint32], keys: Keys, packed: int) -> None:
        """Record that these blocks left, all with one stamp."""
        prints = keys[:, 0] ^ (scopes.astype(np.uint64) * np.uint64(_MIX))
        places = (prints & self._mask).astype(np.int64)
        if not self.has_overwritten:
            old = self._entries[places]
            self.has_overwritten = bool(((old[:, 1] != 0) & (old[:, 0] != prints)).any())
        self._entries[places, 0] = prints
        self._entries[places, 1] = packed
        if not self.has_overwritten:  # by another one of these
            self.has_overwritten = bool((self._entries[places, 0] != prints).any())

    def find(self, scope: int, keys: Keys) -> Stamps:
        """Stamp of each key, 0 where none is known."""
        prints = keys[:, 0] ^ np.uint64(scope * _MIX & _U64)
        entries = self._entries[(prints & self._mask).astype(np.int64)]
        return np.where(entries[:, 0] == prints, entries[:, 1], np.uint64(0))
