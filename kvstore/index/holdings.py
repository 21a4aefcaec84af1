"""Which slot holds which blocks, in which tiers: a first, plain form in dictionaries.

A slot is one holder in one (tenant, space), opened and voided by `index.py`.
"""

from __future__ import annotations

from kvstore.types import KEY_BYTES, SpaceId, Tier


class Holdings:
    """See the module."""

    def __init__(self, *, entry_count_max: int, slot_count_max: int, seed: int) -> None:
        self._entry_count_max = entry_count_max
        self._slot_count_max = slot_count_max
        self._scopes: dict[int, tuple[str, SpaceId]] = {}
        self._hidden: set[int] = set()
        self._lost: set[int] = set()
        self._blocks: dict[tuple[str, SpaceId, bytes], dict[int, int]] = {}
        """Slots and their bits, 1 << tier; the longest not asked for and not told first."""
        self._next = 1
        self.entry_count = 0
        self.evicted_count = 0
        self.memory_bytes = 0

    @property
    def block_count(self) -> int:
        """Blocks of which somebody holds a copy."""
        return len(self._blocks)

    def open(self, tenant: str, space: SpaceId, *, is_hidden: bool) -> int | None:
        """A new slot, empty. None: all are in use."""
        if len(self._scopes) >= self._slot_count_max:
            return None
        slot, self._next = self._next, self._next + 1
        self._scopes[slot] = (tenant, space)
        if is_hidden:
            self._hidden.add(slot)
        return slot

    def show(self, slot: int) -> None:
        """Let a hidden slot be in answers."""
        self._hidden.remove(slot)

    def void(self, slot: int) -> None:
        """Forget all that this slot holds, and the slot."""
        del self._scopes[slot]
        self._hidden.discard(slot)
        for address in [a for a, held in self._blocks.items() if slot in held]:
            del self._blocks[address][slot]
            self.entry_count -= 1
            if not self._blocks[address]:
                del self._blocks[address]

    def stored(self, slot: int, tier: Tier, keys: bytes) -> None:
        """The slot holds these in this tier."""
        for address in reversed(self._addresses(slot, keys)):
            held = self._blocks.pop(address, {})
            self.entry_count += slot not in held
            held[slot] = held.get(slot, 0) | 1 << tier
            self._blocks[address] = held
            while self.entry_count > self._entry_count_max:
                self._evict()

    def removed(self, slot: int, tier: Tier, keys: bytes) -> None:
        """The slot holds these in this tier no more."""
        for address in self._addresses(slot, keys):
            held = self._blocks.get(address, {})
            if slot in held:
                held[slot] &= ~(1 << tier)
                if not held[slot]:
                    del held[slot]
                    self.entry_count -= 1
                if not held:
                    del self._blocks[address]

    def match(
        self, tenant: str, space: SpaceId, keys: bytes
    ) -> list[tuple[int, int, int, int, bool]]:
        """(slot, blocks in hbm, in dram too, in file too, is something of it lost) of each slot."""
        lengths: dict[int, list[int]] = {}
        found = []
        for at in range(len(keys) // KEY_BYTES):
            address = (tenant, space, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            held = self._blocks.get(address, {})
            best = {s: (b & -b).bit_length() - 1 for s, b in held.items() if s not in self._hidden}
            if at == 0:
                lengths = {slot: [0, 0, 0] for slot in best}
            here = [slot for slot, length in lengths.items() if length[2] == at and slot in best]
            if not here:
                break
            found.append(address)
            for slot in here:
                for tier in range(best[slot], 3):
                    lengths[slot][tier] += lengths[slot][tier] == at
        for address in reversed(found):
            self._blocks[address] = self._blocks.pop(address)
        return [(s, h, d, f, s in self._lost) for s, (h, d, f) in lengths.items()]

    def sweep(self, row_count: int) -> None:
        """Reclaim what is void, looking at so many rows."""

    def _addresses(self, slot: int, keys: bytes) -> list[tuple[str, SpaceId, bytes]]:
        scope = self._scopes[slot]
        return [(*scope, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]

    def _evict(self) -> None:
        held = self._blocks.pop(next(iter(self._blocks)))
        self._lost |= held.keys()
        self.entry_count -= len(held)
        self.evicted_count += 1
