"""The reference tier: plain private memory, as obvious as can be.

The contract suite of every tier runs on it, and simulations use it in place of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from kvstore.ports import Memory
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, Generation, SlotId

PATIENCE_S = 60.0


def until_populated(tier: Memory) -> None:
    """Wait until all pages of a tier have arrived."""
    deadline_s = time.monotonic() + PATIENCE_S
    while tier.ready_bytes < tier.capacity_bytes:
        assert time.monotonic() < deadline_s, "still at work"
        threading.Event().wait(0.001)


class MemoryTier:
    """A `Memory` over an array; ready at once. Unwritten pages take no memory."""

    def __init__(self, *, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._bytes = np.zeros(capacity_bytes, np.uint8)
        self._generations: dict[int, int] = {}
        self.heartbeat_ns = 0

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def ready_bytes(self) -> int:
        return self.capacity_bytes

    def raise_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        for slot, generation in zip(slots, generations, strict=True):
            assert generation >= self.generation(SlotId(slot)), "a generation never goes back"
            self._generations[self._word(slot)] = int(generation)

    def generation(self, slot: SlotId) -> Generation:
        return Generation(self._generations.get(self._word(slot), 1))

    def beat(self, now_ns: int) -> None:
        self.heartbeat_ns = now_ns

    def read(self, slot: SlotId, into: memoryview) -> None:
        into[:] = self.view(slot, len(into))

    def view(self, slot: SlotId, length_bytes: int) -> memoryview:
        """The bytes themselves, for simulated engines."""
        begin = slot * PAGE_BYTES
        assert 0 <= begin <= begin + length_bytes <= self.ready_bytes, "outside the tier"
        return self._bytes.data[begin : begin + length_bytes]

    def close(self) -> None:
        self._bytes = np.zeros(0, np.uint8)

    def _word(self, slot: int) -> int:
        assert 0 <= slot * PAGE_BYTES < self.capacity_bytes, f"slot {slot} is outside the tier"
        return slot // PAGES_PER_GENERATION
