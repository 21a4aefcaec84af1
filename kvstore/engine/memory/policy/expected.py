"""Places in the order of use that are kept for blocks which a request has named and nobody stored.

A prompt is stored piece by piece, as it is computed. If each piece took its place when it comes,
the start of the prompt would be its oldest part: it would go first, and a prompt longer than the
memory would push out its own start and never be hit. So a request's blocks get their stamps
together when it names them, the start the newest, and each takes its own when it comes.

One table of fixed size and no probing: whose place another key takes comes in as something new, as
does what nobody named. That costs order and never a block. Does not cover: stamps (`engine.slots`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.port import Prints, Stamps

KEYS_MIN: Final = 1 << 16
"""1 MiB: some prompts, each of more blocks than there are slots."""
KEYS_MAX: Final = 1 << 20
"""16 MiB."""


class Expected:
    """See the module.

    Args:
        key_count: slots that there are; about as many places are kept, within bounds.
    """

    def __init__(self, *, key_count: int) -> None:
        size = 1 << (min(max(key_count, KEYS_MIN), KEYS_MAX) - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._prints: Prints = np.zeros(size, dtype=np.uint64)
        self._stamps: Stamps = np.zeros(size, dtype=np.int64)
        """0: no place is kept here."""

    def keep(self, prints: Prints, stamps: Stamps) -> None:
        """These blocks are to have these stamps when they come. Of those that meet in one place the
        last stays."""
        at = self._at(prints)
        self._prints[at] = prints
        self._stamps[at] = stamps

    def take(self, prints: Prints) -> Stamps:
        """The stamps of blocks that come now, 0 where none is kept. Each is taken once."""
        at = self._at(prints)
        kept: Stamps = np.where(self._prints[at] == prints, self._stamps[at], 0)
        self._stamps[at[kept != 0]] = 0
        return kept

    def _at(self, prints: Prints) -> NDArray[np.int64]:
        return (prints & self._mask).astype(np.int64)
