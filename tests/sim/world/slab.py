"""A slab of GPU memory of one node process: its bytes, its page of places, copies into it.

A copy ends when the world says so, and has read dram when it was ordered or when it ends. Its bytes
are verified as `tiers.hbm` does. With its process the slab ends: nothing is shown any more.
"""

from __future__ import annotations

import random

import numpy as np

from kvstore.engine.events import Promote, Promoted, RaiseGenerations, Shown
from kvstore.kernels.reference import checksum
from kvstore.types import KEY_BYTES, PAGE_BYTES, PAGES_PER_GENERATION
from kvstore.wire.layout import Slab, begin_of, place_words
from tests.sim.world.parts import TORN, Knobs, SimMemory

GPU = "gpu"
"""Of every rank of the world."""


class SimSlab:
    """Shared with the ranks of one process."""

    def __init__(self, size_bytes: int, memory: SimMemory, source: random.Random) -> None:
        self.slab = Slab(GPU, size_bytes, b"")
        self._memory = memory
        self._random = source
        self._bytes = bytearray(size_bytes)
        self._generations: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._shown_at: dict[int, int] = {}
        self._orders: list[tuple[Promote, list[bytes]]] = []
        self.is_void = False
        """Its process is gone, and what its memory holds is not said."""

    def place(self, slot: int) -> int:
        """Word of the place of what a slot of dram holds; 0: it has no copy."""
        return self._places.get(_word(slot), 0)

    def read(self, place: int, length: int) -> bytes:
        """What lies there now."""
        begin = begin_of(place)
        return (
            TORN * (length // len(TORN))
            if self.is_void
            else bytes(self._bytes[begin : begin + length])
        )

    def take(self, command: RaiseGenerations | Shown | Promote) -> None:
        """As the executor has it done."""
        match command:
            case RaiseGenerations(slots=slots, generations=generations):
                for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                    self._generations[_word(slot)] = generation
                    self._places.pop(self._shown_at.pop(_word(slot), -1), None)
            case Shown(slots=slots, targets=targets):
                its = [self._generations.get(_word(target), 1) for target in targets.tolist()]
                words = place_words(targets, np.array(its, np.uint64)).tolist()
                for slot, target, word in zip(slots.tolist(), targets.tolist(), words, strict=True):
                    at, there = _word(slot), _word(target)
                    assert there not in self._shown_at, "a slot is shown twice"
                    assert at not in self._places, "a block has two copies"
                    self._places[at], self._shown_at[there] = word, at
            case Promote(targets=targets):
                for target in targets.tolist():
                    self._put(target, TORN * (command.scope.block_bytes // len(TORN)))
                self._orders.append((command, self._sources(command)))

    def end_one(self) -> list[Promoted]:
        """A copy ends, perhaps."""
        if not self._orders or self._random.random() < 0.5:
            return []
        order, sources = self._orders.pop(self._random.randrange(len(self._orders)))
        if self._random.random() < 0.5:
            sources = self._sources(order)
        good = []
        for at, (target, data) in enumerate(zip(order.targets.tolist(), sources, strict=True)):
            self._put(target, data)
            header = order.scope.prefix() + order.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            good.append(checksum(header, data) == order.checksums[at * 16 : at * 16 + 16])
        return [Promoted(order.job, bytes(good))]

    def _sources(self, order: Promote) -> list[bytes]:
        size = order.scope.block_bytes
        return [self._memory.read(slot, size) for slot in order.slots.tolist()]

    def _put(self, target: int, data: bytes) -> None:
        self._bytes[target * PAGE_BYTES : target * PAGE_BYTES + len(data)] = data


def _word(slot: int) -> int:
    """By it a slot has one generation, whatever the sizes of slots in its slab now and before."""
    return slot // PAGES_PER_GENERATION


def new_slab(knobs: Knobs, memory: SimMemory, source: random.Random) -> SimSlab | None:
    """The slab of a process that begins with this memory; None: the machine has no GPU."""
    size_bytes = knobs.hbm_slabs * knobs.slab_bytes
    return SimSlab(size_bytes, memory, source) if size_bytes else None
