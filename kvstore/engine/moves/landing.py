"""The landing slab: extents of the arena's end, the only memory that other nodes write to (ADR 12).

    free ─take─▶ granted ─▶ landed ─▶ free          a write was done, its bytes are copied out
                    ├─ nothing was begun ─▶ free
                    └─▶ limbo ─▶ free               by the death of our transfer worker

Rule: an extent that a peer may write to is free again by the peer's word or that death, never by a
timer. Free pages are kept as runs, in bins of doubling size, so that no `take` looks at the slab.

Covers: room. Does not cover: whose an extent is (`grants`), who gets the next one (`expected`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES

PEER_SHARE = 2
"""A peer may be granted at most one part in this many of the slab."""

Extents = NDArray[np.int64]
"""First page of each extent, counted from the start of the arena."""


class LandingSlab:
    """Free and taken pages of the landing slab."""

    def __init__(self, *, begin_bytes: int, size_bytes: int) -> None:
        self._first = begin_bytes // PAGE_BYTES
        self._is_free = np.zeros(size_bytes // PAGE_BYTES, dtype=bool)
        self._end_of: dict[int, int] = {}
        """Page behind each free run, by its first one; no two runs touch."""
        self._begin_of: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(self.page_count.bit_length() + 1)]
        """First pages of free runs by size: bin n has the runs of 2^(n-1) to 2^n - 1 pages."""
        if size_bytes:
            self._free_run(0, self.page_count)

    @property
    def page_count(self) -> int:
        """Size of the slab in pages."""
        return len(self._is_free)

    @property
    def free_pages(self) -> int:
        """Number of pages that no peer may write to."""
        return int(self._is_free.sum())

    def take(self, pages: int, count: int) -> Extents:
        """Take up to `count` extents of `pages` pages each, contiguous; an empty array if there is
        no room for one."""
        begin = self._fitting(pages, count) if count > 0 else None
        if begin is None:
            return np.zeros(0, dtype=np.int64)
        behind = self._remove(begin)
        end = begin + min(count, (behind - begin) // pages) * pages
        self._is_free[begin:end] = False
        if end < behind:
            self._add(end, behind)
        return np.arange(self._first + begin, self._first + end, pages, dtype=np.int64)

    def _fitting(self, pages: int, count: int) -> int | None:
        """First page of a free run with room for all extents, or else of one in the largest bin
        that has room for one extent; None: no run has."""
        all_fit = min((pages * count).bit_length(), len(self._bins)) + 1
        one_fits = min(pages.bit_length(), len(self._bins)) + 1
        for its in [*self._bins[all_fit:], *reversed(self._bins[one_fits:all_fit])]:
            if its:
                return next(reversed(its))
        last = self._bins[one_fits - 1] if one_fits <= len(self._bins) else {}
        return next((begin for begin in last if self._end_of[begin] - begin >= pages), None)

    def free(self, extents: Extents, pages: int) -> None:
        """Free these extents of `pages` pages each, which nothing writes to or reads any more."""
        at = np.sort(extents) - self._first
        edges = np.flatnonzero(np.diff(at) != pages) + 1
        for run in np.split(at, edges) if len(at) else ():
            self._free_run(int(run[0]), int(run[-1]) + pages)

    def _free_run(self, begin: int, end: int) -> None:
        assert not self._is_free[begin:end].any(), "an extent is free twice"
        self._is_free[begin:end] = True
        if begin in self._begin_of:
            begin = self._begin_of[begin]
            self._remove(begin)
        if end in self._end_of:
            end = self._remove(end)
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        self._end_of[begin], self._begin_of[end] = end, begin
        self._bins[(end - begin).bit_length()][begin] = None

    def _remove(self, begin: int) -> int:
        """Forget a run; returns the page behind it."""
        end = self._end_of.pop(begin)
        del self._begin_of[end], self._bins[(end - begin).bit_length()][begin]
        return end
