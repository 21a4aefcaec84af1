"""The landing slab: extents of the arena's end, the only memory that other nodes write to (ADR 39).

    free ─take─▶ granted ─▶ landed ─▶ free          a write was done, its bytes are copied out
                    ├─ nothing was begun ─▶ free
                    └─▶ limbo ─▶ free               by the death of our transfer worker

Rule: an extent that a peer may write to is free again by the peer's word or that death, never by a
timer. Covers: room. Does not cover: whose an extent is (`grants`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES

LANDING_SHARE = 2
"""A peer may be granted one part in so many of the slab."""

Extents = NDArray[np.int64]
"""First page in the arena of each."""


class LandingSlab:
    """Room of the slab, in pages."""

    def __init__(self, *, begin_bytes: int, size_bytes: int) -> None:
        self._first = begin_bytes // PAGE_BYTES
        self._free = np.ones(size_bytes // PAGE_BYTES, dtype=bool)

    @property
    def page_count(self) -> int:
        """Size."""
        return len(self._free)

    @property
    def free_pages(self) -> int:
        """Pages that nobody may write to."""
        return int(self._free.sum())

    def take(self, pages: int, count: int) -> Extents:
        """Up to `count` extents of so many pages, one behind the other; none: no room."""
        if count <= 0:
            return np.zeros(0, dtype=np.int64)
        edges = np.flatnonzero(np.diff(self._free, prepend=False, append=False))
        begins, room = edges[::2], (edges[1::2] - edges[::2]) // pages
        if not len(room) or not room.max():
            return np.zeros(0, dtype=np.int64)
        fits = room >= count
        at = int(np.argmax(fits)) if fits.any() else int(np.argmax(room))
        count = min(count, int(room[at]))
        self._free[begins[at] : begins[at] + count * pages] = False
        first = self._first + int(begins[at])
        return np.arange(first, first + count * pages, pages, dtype=np.int64)

    def free(self, extents: Extents, pages: int) -> None:
        """Nothing writes to these, and nothing reads them, any more."""
        at = self._pages(extents, pages)
        assert not self._free[at].any(), "an extent is free twice"
        self._free[at] = True

    def _pages(self, extents: Extents, pages: int) -> NDArray[np.int64]:
        return (extents[:, None] - self._first + np.arange(pages)).reshape(-1)

    def check(self, held: list[tuple[Extents, int]]) -> None:
        """Raises AssertionError unless these (extents, pages), each once, are what is taken."""
        taken = np.zeros(len(self._free), dtype=np.int64)
        for extents, pages in held:
            np.add.at(taken, self._pages(extents, pages), 1)
        assert bool((taken <= 1).all()), "an extent has two owners"
        assert bool(((taken == 1) == ~self._free).all()), "an extent of nobody is taken"
