"""A node's slab of GPU memory, and places of copies in it, as ranks read them.

A page of the layout of generation pages, one word for each slot of dram: where a copy of its block
lies, or 0. A word changes before its copy does, and none has two meanings: it carries the
generation of its place. So a copy was read whole if its word is the same before and after, and the
slot of dram still has its generation.

    word = generation of the place << 32 | its first page + 1
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES
from kvstore.wire.bounds import U64, Label

_PAGE_BITS: Final = 32
_PAGE_MASK: Final = (1 << _PAGE_BITS) - 1


class Slab(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In a Welcome to a rank on its GPU. The page of places comes with it, behind the others."""

    gpu: Label
    """As in HelloRank."""
    size_bytes: U64
    handle: Annotated[bytes, msgspec.Meta(max_length=64)]
    """By which devices map it."""


def place_words(slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words for copies in these slots of a slab."""
    words: NDArray[np.uint64] = generations << np.uint64(_PAGE_BITS)
    words += slots + np.uint64(1)
    return words


def begin_of(word: int) -> int:
    """Offset in the slab; -1: there is no copy."""
    return ((word & _PAGE_MASK) - 1) * PAGE_BYTES if word else -1
