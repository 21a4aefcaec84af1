"""Places in the order of use, reserved for blocks of a request that are not stored yet.

A prompt is stored piece by piece, as it is computed. If each piece took its place on arrival, the
start of the prompt would be its oldest part: it would leave first, and a prompt longer than the
memory would evict its own start and never be hit. So the blocks of a request get their stamps
together at its hint, the start the newest, and each takes its stamp on arrival.

One table of fixed size and no probing: a block whose place was overwritten comes in as new, as do
blocks outside of hints. The cost is order, never a block. Does not cover: stamps
(`engine.memory.slots`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.port import Prints, Stamps

KEYS_MIN: Final = 1 << 16
"""Smallest table, 1 MiB: enough for some prompts, each of more blocks than there are slots."""
KEYS_MAX: Final = 1 << 20
"""Largest table, 16 MiB."""


class Expected:
    """Table of reserved stamps; see the module.

    Args:
        key_count: number of slots; about as many stamps are kept, within KEYS_MIN and KEYS_MAX.
    """

    def __init__(self, *, key_count: int) -> None:
        size = 1 << (min(max(key_count, KEYS_MIN), KEYS_MAX) - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._prints: Prints = np.zeros(size, dtype=np.uint64)
        self._stamps: Stamps = np.zeros(size, dtype=np.int64)
        """Reserved stamp of each cell; 0: none."""

    def keep(self, prints: Prints, stamps: Stamps) -> None:
        """Reserve stamps for blocks. Where blocks meet in one cell, the last one is kept."""
        at = self._at(prints)
        self._prints[at] = prints
        self._stamps[at] = stamps

    def take(self, prints: Prints) -> Stamps:
        """Reserved stamps of blocks that come in now, 0 for none. A reservation ends with it."""
        at = self._at(prints)
        kept: Stamps = np.where(self._prints[at] == prints, self._stamps[at], 0)
        self._stamps[at[kept != 0]] = 0
        return kept

    def _at(self, prints: Prints) -> NDArray[np.int64]:
        return (prints & self._mask).astype(np.int64)
