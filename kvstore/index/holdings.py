"""Which slots hold which blocks, in which tiers: flat memory whose size is fixed at the start.

A **slot** is one holder in one (tenant, space), so that to clear a space, or to forget an engine or
a node, is to void slots: at once out of every answer, and taken out of the rows by and by. Slots
and scopes have names here; all else is numbers, and `loops.py` works on them.

Full, that is with `entry_count_max` (block, slot) pairs: the block with the oldest request or
publication leaves, and its slots have lost something. Among blocks requested or published together
the first are the newest.

Bytes for E entries and S slots: rows 48 E, cells 8 E, sets 36 E + 252 S, slots 60 S.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.index import fields, native
from kvstore.types import KEY_BYTES, SpaceId, Tier

ENTRY_COUNT_MAX: Final = 1 << 29
"""Most entries of an index: places in its flat memory are 32-bit numbers."""
_SWEPT_TO_OPEN: Final = 100_000
"""Most rows swept in one call when a new slot is needed and none is free: nothing is answered
meanwhile."""
_SWEPT_PER_TOLD: Final = 4
"""Rows swept for each published key, while a slot is void."""


class Holdings:
    """Flat memory of blocks and the slots that hold them; see the module. `is_native` None:
    compiled loops if numba is installed."""

    def __init__(
        self,
        *,
        entry_count_max: int,
        slot_count_max: int,
        seed: int,
        is_native: bool | None = None,
    ) -> None:
        if not slot_count_max < entry_count_max <= ENTRY_COUNT_MAX:
            raise ValueError(
                f"an index of {entry_count_max} entries with {slot_count_max} slots cannot be: "
                f"entries must be more than slots, and at most {ENTRY_COUNT_MAX}"
            )
        if is_native is None:
            is_native = native.is_available()
        self._loops = native.compiled() if is_native else native.PLAIN
        self.arrays = _arrays(entry_count_max, slot_count_max + 1, seed)
        self._memory: tuple[Any, ...] = tuple(self.arrays.values())
        if not is_native:
            self._memory = tuple(array.data for array in self._memory)
        self._meta = self.arrays["meta"].data
        self._slots = self.arrays["slots"].data
        self._scratch = self.arrays["scratch"]
        self._is_native = is_native
        self.slot_count_max = slot_count_max
        self.free_slots = list(range(slot_count_max, 0, -1))
        self._free_scopes = self.free_slots.copy()
        self.scopes: dict[tuple[str, SpaceId], int] = {}
        self.scope_of: dict[int, tuple[str, SpaceId]] = {}
        """(tenant, space) of each slot, void ones included."""
        self._slots_in: dict[tuple[str, SpaceId], int] = {}
        """How many slots each scope has: without one it is free again."""
        self._void: list[int] = []
        """Slots that became void since the present sweep began."""
        self._sweeping: list[int] = []

    @property
    def entry_count(self) -> int:
        """(block, slot) pairs, those of void slots until they are swept included."""
        return self._meta[fields.ENTRIES]

    @property
    def block_count(self) -> int:
        """Number of blocks that some slot holds."""
        return self._meta[fields.BLOCKS]

    @property
    def evicted_count(self) -> int:
        """Blocks that left because there was no room."""
        return self._meta[fields.EVICTED]

    @property
    def void_slots(self) -> list[int]:
        """Void slots whose rows are still to be swept."""
        return self._sweeping + self._void

    @property
    def memory_bytes(self) -> int:
        """Size of the flat memory; the system gives pages as they are first written."""
        return sum(array.nbytes for array in self.arrays.values())

    def open(self, tenant: str, space: SpaceId, *, is_hidden: bool) -> int | None:
        """A new, empty slot. `is_hidden`: until `show` it is in no answer. None: all slots are in
        use, or void and not swept yet."""
        if not self.free_slots:
            self.sweep(_SWEPT_TO_OPEN)
        if not self.free_slots:
            return None
        name = (tenant, space)
        if name not in self.scopes:
            self.scopes[name] = self._free_scopes.pop()
            self._slots_in[name] = 0
        self._slots_in[name] += 1
        slot = self.free_slots.pop()
        self.scope_of[slot] = name
        self._slots[slot * fields.SLOT + fields.STATE] = (
            fields.HIDDEN if is_hidden else fields.SHOWN
        )
        self._slots[slot * fields.SLOT + fields.LOST] = 0
        return slot

    def show(self, slot: int) -> None:
        """Include a hidden slot in answers from now on."""
        self._slots[slot * fields.SLOT + fields.STATE] = fields.SHOWN

    def void(self, slot: int) -> None:
        """Forget all that this slot holds, and the slot."""
        self._slots[slot * fields.SLOT + fields.STATE] = fields.VOID
        if self._slots[slot * fields.SLOT + fields.LOST]:
            scope = self.scopes[self.scope_of[slot]]
            self._slots[scope * fields.SLOT + fields.LOST_IN] -= 1
        self._void.append(slot)

    def stored(self, slot: int, tier: Tier, keys: bytes) -> None:
        """Record that the slot holds these blocks in this tier. `keys`: 32 bytes each."""
        if self._void or self._sweeping:
            self.sweep(_SWEPT_PER_TOLD * len(keys) // KEY_BYTES)
        scope = self.scopes[self.scope_of[slot]]
        self._loops.store(*self._memory, self._words(keys), scope, slot, int(tier))

    def removed(self, slot: int, tier: Tier, keys: bytes) -> None:
        """Record that the slot does not hold these blocks in this tier any more; no error if it did
        not."""
        scope = self.scopes[self.scope_of[slot]]
        self._loops.remove(*self._memory, self._words(keys), scope, slot, int(tier))

    def match(self, tenant: str, space: SpaceId, keys: bytes) -> list[tuple[int, ...]]:
        """For each slot that holds the first block: (slot, leading blocks in hbm, in dram or
        faster, in any tier, whether it has lost a block)."""
        scope = self.scopes.get((tenant, space))
        if scope is None:
            return []
        count = self._loops.match(*self._memory, self._words(keys), scope)
        begin = self._meta[fields.SLOT_COUNT]
        numbers = iter(self._scratch[begin : begin + count * fields.ANSWER].tolist())
        return list(zip(numbers, numbers, numbers, numbers, numbers, strict=True))

    def has_lost(self, tenant: str, space: SpaceId) -> bool:
        """Whether a slot of this (tenant, space) has lost a block for want of room; void slots do
        not count."""
        scope = self.scopes.get((tenant, space))
        return scope is not None and self._slots[scope * fields.SLOT + fields.LOST_IN] > 0

    def sweep(self, row_count: int) -> None:
        """Remove void slots from the next `row_count` rows. At the end of a pass over all rows, the
        slots that were void at its start are free."""
        if not self._sweeping:
            if not self._void:
                return
            self._sweeping, self._void = self._void, []
            self._meta[fields.SWEPT] = 1
        if not self._loops.sweep(*self._memory, row_count):
            return
        for slot in self._sweeping:
            name = self.scope_of.pop(slot)
            self._slots[slot * fields.SLOT + fields.STATE] = fields.FREE
            self.free_slots.append(slot)
            self._slots_in[name] -= 1
            if not self._slots_in[name]:
                del self._slots_in[name]
                self._free_scopes.append(self.scopes.pop(name))
        self._sweeping = []

    def _words(self, keys: bytes) -> Sequence[int]:
        if len(keys) % KEY_BYTES:
            raise ValueError(f"{len(keys)} bytes are no keys of {KEY_BYTES} bytes each")
        if self._is_native:
            return np.frombuffer(keys, dtype=np.int32)  # type: ignore[return-value]
        return memoryview(keys).cast("i")


def _arrays(entry_count_max: int, slot_end: int, seed: int) -> dict[str, NDArray[Any]]:
    """The arrays of the flat memory by name, in the order in which the loops take them."""
    # The sentinel, and one row more while there is one entry too many.
    row_end = entry_count_max + 2
    # Each set has a row, so its members are entries. A set of one member takes a chunk for one
    # entry, and there are 7 such sets per slot at most; all others take at most a chunk for two.
    # And there is one set more while a row changes hands.
    chunk_end = entry_count_max // 2 + 7 * slot_end // 2 + slot_end // fields.MEMBERS + 3
    cell_count, set_cell_count = 2 * row_end, 2 * chunk_end
    sizes = {
        "rows": (row_end + 1) * fields.ROW,
        "cells": cell_count,
        "sets": chunk_end * fields.CHUNK,
        "set_cells": set_cell_count,
        "slots": slot_end * fields.SLOT,
        "scratch": slot_end * (3 + fields.ANSWER),
    }
    arrays: dict[str, NDArray[Any]] = {n: np.zeros(s, dtype=np.int32) for n, s in sizes.items()}
    meta = arrays["meta"] = np.zeros(fields.META, dtype=np.int64)
    # All words of a key, of 32 bits, times their secrets, summed up, fit 63 bits.
    meta[: fields.SECRET_A] = _secrets(seed, fields.SECRET_A, bits=28)
    meta[[fields.SECRET_A, fields.SECRET_B]] = _secrets(~seed, 2, bits=30)
    meta[fields.CELL_COUNT] = cell_count
    meta[fields.SET_CELL_COUNT] = set_cell_count
    meta[fields.CHUNK_COUNT] = chunk_end
    meta[fields.SLOT_COUNT] = slot_end
    meta[fields.ENTRY_MAX] = entry_count_max
    meta[fields.ROW_FRESH] = meta[fields.CHUNK_FRESH] = 1
    return arrays


def _secrets(seed: int, count: int, *, bits: int) -> NDArray[np.int64]:
    """`count` odd numbers of `bits` bits each, derived from the seed."""
    digest = hashlib.sha512(b"kvstore index %d" % seed).digest()
    words = np.frombuffer(digest, dtype="<u4")[:count].astype(np.int64)
    return words >> 32 - bits | 1 << bits - 1 | 1
