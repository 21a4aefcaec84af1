"""A slab of GPU memory of one node process: its bytes, its page of places, copies into it.

A copy ends when the world says so, and has read dram when it was ordered or when it ends. Its bytes
are verified as `tiers.hbm` does. With its process the slab ends: nothing is shown any more.

Checked: what is shown is what its slot of dram holds, and is shown no more when that has left.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvstore.tier_events import Promote, Promoted, RaiseGenerations, Shown
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SlotId
from kvstore.wire.space import Slab, begin_of, place_words
from tests.kit.reference import checksum
from tests.sim.world.copies import Violation
from tests.sim.world.parts import TORN, Knobs, SimMemory

GPU = "gpu"
"""Of every rank of the world."""
_STALLS: Final = (0, 0, 0, 5, 40)
"""Steps of the node before a copy may end …"""
_SEALED_AGAIN: Final = 30
"""… and of one whose block has left: by then another one is in that slot, often."""


class _Order:
    """Copies that have not ended."""

    def __init__(self, command: Promote, sources: list[bytes], due: int) -> None:
        self.command, self.sources, self.due = command, sources, due
        """`due`: step of the node from which on they may."""


class SimSlab:
    """Shared with the ranks of one process."""

    def __init__(self, size_bytes: int, memory: SimMemory, source: random.Random) -> None:
        self.slab = Slab(GPU, size_bytes, b"")
        self._memory = memory
        self._random = source
        # Chance of its own: other events of a world stay as they are.
        self._chance = random.Random("copies that stall")
        self._bytes = bytearray(size_bytes)
        self._generations: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._shown_at: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Bytes of what was copied to each slot last."""
        self._orders: list[_Order] = []
        self._steps = 0
        self._left: set[int] = set()
        """Slots of dram whose blocks have left in this step."""
        self.is_void = False
        """Its process is gone, and what its memory holds is not said."""

    def place(self, slot: int) -> int:
        """Word of the place of what a slot of dram holds; 0: it has no copy."""
        return self._places.get(_word(slot), 0)

    def read(self, place: int, length: int) -> bytes:
        """What lies there now."""
        is_lost, begin = self.is_void, begin_of(place)
        return (
            TORN * (length // len(TORN)) if is_lost else self.read_at(begin // PAGE_BYTES, length)
        )

    def read_at(self, slot: int, length: int) -> bytes:
        """The same, of a slot."""
        begin = slot * PAGE_BYTES
        return bytes(self._bytes[begin : begin + length])  # not the rest of the slab

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
                    self._check_shown(slot, target)
                    assert there not in self._shown_at, "a slot is shown twice"
                    assert at not in self._places, "a block has two copies"
                    self._places[at], self._shown_at[there] = word, at
            case Promote(targets=targets):
                for target in targets.tolist():
                    self._put(target, TORN * (command.scope.block_bytes // len(TORN)))
                    self._sizes[target] = command.scope.block_bytes
                due = self._steps + self._chance.choice(_STALLS)
                self._orders.append(_Order(command, self._sources(command), due))

    def has_left(self, slots: Iterable[int]) -> None:
        """Blocks leave these slots of dram. Copies of them go on until others may be there."""
        left = set(map(_word, slots))
        self._left |= left
        for order in self._orders:
            if left.intersection(map(_word, order.command.slots.tolist())):
                order.due = max(order.due, self._steps + _SEALED_AGAIN)

    def under_way(self) -> list[tuple[int, int]]:
        """Slots of dram that are copied now, and their generations."""
        slots = [slot for order in self._orders for slot in order.command.slots.tolist()]
        return [(slot, self._memory.generation(SlotId(slot))) for slot in slots]

    def check(self) -> None:
        """After a step of the node. Raises Violation."""
        outlived = self._left & self._places.keys()
        self._left.clear()
        if outlived:
            raise Violation(f"copies of blocks that have left are shown: {sorted(outlived)[:3]}")

    def _check_shown(self, slot: int, target: int) -> None:
        size = self._sizes[target]
        found = self.read_at(target, size)
        if found != self._memory.read(slot, size) and not self._memory.is_damaged:
            raise Violation(f"for the block in slot {slot} a copy of another one is shown")

    def end_one(self) -> list[Promoted]:
        """A copy ends, perhaps."""
        self._steps += 1
        due = [order for order in self._orders if order.due <= self._steps]
        if not due or self._random.random() < 0.5:
            return []
        ended = due[self._random.randrange(len(due))]
        self._orders.remove(ended)
        order, sources = ended.command, ended.sources
        if self._random.random() < 0.5:
            sources = self._sources(order)
        good = []
        for at, (target, data) in enumerate(zip(order.targets.tolist(), sources, strict=True)):
            self._put(target, data)
            header = order.scope.prefix() + order.key(at)
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
