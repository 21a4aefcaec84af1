"""The page tables of a transfer worker's mappings, filled ahead of use.

The pages of an arena are there (`tiers.dram` takes them), but not in the tables of a process that
was just started: without this the first read into each costs a fault for every 4 KiB, on either
side, which takes about as long as the bytes themselves do over tcp.

The tables take 8 bytes a page and mapping: 1/256 of the arena, if it has no huge pages. Then there
is nothing to fill.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import fill_page_tables
from kvstore.types import PAGE_BYTES

PART_BYTES: Final = 4 << 20
"""At a time: about a millisecond, by which a read that comes meanwhile is late."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class PageTables:
    """Page tables of mappings of one arena, each all of it."""

    def __init__(self, fd: int, *mappings: NDArray[np.uint8]) -> None:
        """`fd`: of the arena."""
        self._mappings = mappings
        self._size_bytes = len(mappings[0])
        has_huge_pages = os.fstat(fd).st_blksize > PAGE_BYTES
        self.filled_bytes = self._size_bytes if has_huge_pages else 0

    def fill(self) -> bool:
        """The next part, of what is there. False: for now there is no more."""
        begin = self.filled_bytes
        if begin >= self._size_bytes:
            return False
        try:
            # Never what is not there: its pages would be this process's to take.
            most = min(begin + PART_BYTES, self._size_bytes)
            end = begin + present_bytes(self._mappings[0], begin, most)
            if end == begin:
                return False
            for mapped in self._mappings:
                fill_page_tables(mapped, begin, end)
        except OSError:
            # No memory for tables, or a kernel that does not say: reads fault them in, one by one.
            end = self._size_bytes
        self.filled_bytes = end
        return True


def present_bytes(mapped: NDArray[np.uint8], begin: int, end: int) -> int:
    """How much of bytes [begin, end) of an arena, page aligned, is there from `begin` on, whether
    this process has mapped it or not. (SEEK_HOLE would look at all that follows, each time.)

    Raises:
        OSError: the kernel does not say.
    """
    pages = np.empty((end - begin) // PAGE_BYTES, np.uint8)
    if _libc.mincore(mapped.ctypes.data + begin, end - begin, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore")
    missing = np.flatnonzero((pages & 1) == 0)
    return int(missing[0]) * PAGE_BYTES if len(missing) else end - begin
