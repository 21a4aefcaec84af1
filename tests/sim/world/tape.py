"""Memory that remembers what was stored to it, word by word: for processes that die in between.

Does not cover: who dies, and what his successor makes of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Stores = list[tuple[int, int]]
"""(word, value), in the order in which they were stored."""


class Tape(np.ndarray[Any, Any]):
    """Words of memory that remembers what is stored to it, once `stores` is a list."""

    stores: Stores | None = None

    def __array_finalize__(self, source: object) -> None:
        self.whole: Tape | None = getattr(source, "whole", None)

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = self.whole
        if whole is None or whole.stores is None or not np.may_share_memory(self, whole):
            super().__setitem__(index, value)  # not recording, or a copy
            return
        begin = self.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        words = slice(begin // 8, -(-(begin + self.nbytes) // 8))
        before = np.array(whole[words])
        super().__setitem__(index, value)
        after = np.array(whole[words])
        whole.stores += [
            (words.start + at, int(after[at])) for at in np.flatnonzero(before != after).tolist()
        ]


def tape(size_bytes: int) -> Tape:
    """So much memory, all 0."""
    made = np.zeros(size_bytes // 8, np.uint64).view(Tape)
    made.whole = made
    return made


def image(before: NDArray[np.uint64], stores: Stores) -> Tape:
    """Memory as it was, after these stores."""
    made = tape(before.nbytes)
    made[:] = before
    for at, value in stores:
        made[at] = value
    return made
