"""Which slots hold which blocks, in which tiers: flat memory whose size is fixed at the start.

A **slot** is one holder in one (tenant, space), so that to clear a space, or to forget an engine or
a node, is to void slots: at once out of every answer, and taken out of the rows by and by. Slots
and scopes have names here; all else is numbers, and `loops` works on them: compiled to machine code
with numba (extra `index`, ADR 10) when the first `Holdings` of a process is made, never while it
answers, or as plain Python. Nothing is kept on disk: numba's cache would be a pickle that anybody
who can write to the folder could replace.

Full, that is with `entry_count_max` (block, slot) pairs: the block with the oldest request or
publication leaves, and its slots have lost something. Among blocks requested or published together
the first are the newest.

Bytes for E entries and S slots: rows 48 E, cells 8 E, sets 36 E + 252 S, slots 60 S.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.index import loops
from kvstore.index.feed import Holder, Scope
from kvstore.installation import is_installed
from kvstore.types import KEY_BYTES, Counts, SpaceId, Tier

ENTRY_COUNT_MAX: Final = 1 << 29
"""Most entries of an index: places in its flat memory are 32-bit numbers."""
_SLOT_COUNT_MIN: Final = 1 << 14
SLOT_COUNT_MAX: Final = 1 << 17
"""Most slots by default: room for 4096 nodes with eight engines, and for all their snapshots at the
same time."""
_ENTRIES_PER_SLOT: Final = 16
"""Entries per slot by default, so that slots take a fifth of the memory at most."""
_SWEPT_TO_OPEN: Final = 100_000
"""Most rows swept in one call when a new slot is needed and none is free: nothing is answered
meanwhile."""
_SWEPT_PER_TOLD: Final = 4
"""Rows swept for each published key, while a slot is void."""


def default_slot_count(entry_count_max: int) -> int:
    """How many slots an index of so many entries has."""
    return max(_SLOT_COUNT_MIN, min(entry_count_max // _ENTRIES_PER_SLOT, SLOT_COUNT_MAX))


class Statistics(msgspec.Struct, frozen=True):
    """Sizes now, and what was counted since the start."""

    entry_count: int
    """(block, holder) pairs, those of void slots until they are swept included."""
    block_count: int
    memory_bytes: int
    evicted_count: int
    """Blocks that left because the index was full."""


_CALLED: Final = ("store", "remove", "sweep", "match")
"""Functions of `loops` that `Holdings` calls: as they are, on memoryviews, where numba is not
installed; they are the reference."""


class Holdings:
    """Flat memory of blocks and the slots that hold them; see the module.

    Args:
        entry_count_max: most (block, holder) pairs.
        slot_count_max: most (holder, tenant, space), including void ones that are not swept yet;
            None: by `default_slot_count`.
        seed: a random number, so that nobody can choose prompts whose keys collide in the table.
        is_native: whether to use compiled loops; None: if numba is installed.
    """

    def __init__(
        self,
        entry_count_max: int,
        *,
        slot_count_max: int | None = None,
        seed: int = 1,
        is_native: bool | None = None,
    ) -> None:
        if slot_count_max is None:
            slot_count_max = default_slot_count(entry_count_max)
        if not slot_count_max < entry_count_max <= ENTRY_COUNT_MAX:
            raise ValueError(
                f"an index of {entry_count_max} entries with {slot_count_max} slots cannot be: "
                f"entries must be more than slots, and at most {ENTRY_COUNT_MAX}"
            )
        if is_native is None:
            is_native = is_installed("numba")
        self._loops: Any = compiled() if is_native else loops
        self.arrays = _arrays(entry_count_max, slot_count_max + 1, seed)
        self.memory_bytes = sum(array.nbytes for array in self.arrays.values())
        """Size of the flat memory; the system gives pages as they are first written."""
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
        self.holders: dict[int, Holder] = {}
        """Holder of each slot, without void ones."""
        self.scopes: dict[Scope, int] = {}
        """Number of each (tenant, space)."""
        self.scope_of: dict[int, Scope] = {}
        """(tenant, space) of each slot, void ones included."""
        self._slots_in = Counts[Scope]()
        """How many slots each scope has: without one it is free again."""
        self._void: list[int] = []
        """Slots that became void since the present sweep began."""
        self._sweeping: list[int] = []

    def statistics(self) -> Statistics:
        """Sizes and counts."""
        return Statistics(
            entry_count=self._meta[loops.ENTRIES],
            block_count=self._meta[loops.BLOCKS],
            memory_bytes=self.memory_bytes,
            evicted_count=self._meta[loops.EVICTED],
        )

    # As `PlaceSlots`, in whose terms slots are opened and filled.

    def scope(self, tenant: str, space: SpaceId) -> Scope:
        return (tenant, space)

    def open(self, holder: Holder, scope: Scope, *, is_hidden: bool) -> int | None:
        """A new, empty slot. None: all slots are in use, or void and not swept yet."""
        if not self.free_slots:
            self.sweep(_SWEPT_TO_OPEN)
        if not self.free_slots:
            return None
        if scope not in self.scopes:
            self.scopes[scope] = self._free_scopes.pop()
        self._slots_in[scope] += 1
        slot = self.free_slots.pop()
        self.scope_of[slot], self.holders[slot] = scope, holder
        self._slots[slot * loops.SLOT + loops.STATE] = loops.HIDDEN if is_hidden else loops.SHOWN
        self._slots[slot * loops.SLOT + loops.LOST] = 0
        return slot

    def show(self, slot: int) -> None:
        self._slots[slot * loops.SLOT + loops.STATE] = loops.SHOWN

    def void(self, slot: int) -> None:
        del self.holders[slot]
        self._slots[slot * loops.SLOT + loops.STATE] = loops.VOID
        if self._slots[slot * loops.SLOT + loops.LOST]:
            scope = self.scopes[self.scope_of[slot]]
            self._slots[scope * loops.SLOT + loops.LOST_IN] -= 1
        self._void.append(slot)

    def stored(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        if self._void or self._sweeping:
            self.sweep(_SWEPT_PER_TOLD * len(keys) // KEY_BYTES)
        self._loops.store(*self._memory, self._words(keys), self.scopes[scope], slot, int(tier))

    def removed(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        self._loops.remove(*self._memory, self._words(keys), self.scopes[scope], slot, int(tier))

    def match(self, tenant: str, space: SpaceId, keys: bytes) -> list[tuple[int, ...]]:
        """For each slot that holds the first block: (slot, leading blocks in hbm, in dram or
        faster, in any tier, whether it has lost a block)."""
        scope = self.scopes.get((tenant, space))
        if scope is None:
            return []
        count = self._loops.match(*self._memory, self._words(keys), scope)
        begin = self._meta[loops.SLOT_COUNT]
        numbers = iter(self._scratch[begin : begin + count * loops.ANSWER].tolist())
        return list(zip(numbers, numbers, numbers, numbers, numbers, strict=True))

    def has_lost(self, tenant: str, space: SpaceId) -> bool:
        """Whether a slot of this (tenant, space) has lost a block for want of room; void slots do
        not count."""
        scope = self.scopes.get((tenant, space))
        return scope is not None and self._slots[scope * loops.SLOT + loops.LOST_IN] > 0

    def sweep(self, row_count: int) -> None:
        """Remove void slots from the next `row_count` rows. At the end of a pass over all rows, the
        slots that were void at its start are free."""
        if not self._sweeping:
            if not self._void:
                return
            self._sweeping, self._void = self._void, []
            self._meta[loops.SWEPT] = 1
        if not self._loops.sweep(*self._memory, row_count):
            return
        for slot in self._sweeping:
            name = self.scope_of.pop(slot)
            self._slots[slot * loops.SLOT + loops.STATE] = loops.FREE
            self.free_slots.append(slot)
            if self._slots_in.drop(name):
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
    chunk_end = entry_count_max // 2 + 7 * slot_end // 2 + slot_end // loops.MEMBERS + 3
    cell_count, set_cell_count = 2 * row_end, 2 * chunk_end
    sizes = {
        "rows": (row_end + 1) * loops.ROW,
        "cells": cell_count,
        "sets": chunk_end * loops.CHUNK,
        "set_cells": set_cell_count,
        "slots": slot_end * loops.SLOT,
        "scratch": slot_end * (3 + loops.ANSWER),
    }
    arrays: dict[str, NDArray[Any]] = {n: np.zeros(s, dtype=np.int32) for n, s in sizes.items()}
    meta = arrays["meta"] = np.zeros(loops.META, dtype=np.int64)
    # All words of a key, of 32 bits, times their secrets, summed up, fit 63 bits.
    meta[: loops.SECRET_A] = _secrets(seed, loops.SECRET_A, bits=28)
    meta[[loops.SECRET_A, loops.SECRET_B]] = _secrets(~seed, 2, bits=30)
    meta[loops.CELL_COUNT] = cell_count
    meta[loops.SET_CELL_COUNT] = set_cell_count
    meta[loops.CHUNK_COUNT] = chunk_end
    meta[loops.SLOT_COUNT] = slot_end
    meta[loops.ENTRY_MAX] = entry_count_max
    meta[loops.ROW_FRESH] = meta[loops.CHUNK_FRESH] = 1
    return arrays


def _secrets(seed: int, count: int, *, bits: int) -> NDArray[np.int64]:
    """`count` odd numbers of `bits` bits each, derived from the seed."""
    digest = hashlib.sha512(b"kvstore index %d" % seed).digest()
    words = np.frombuffer(digest, dtype="<u4")[:count].astype(np.int64)
    return words >> 32 - bits | 1 << bits - 1 | 1


@functools.cache
def compiled() -> SimpleNamespace:
    """The loops compiled; they take numpy arrays. The first call takes up to a minute."""
    import numba
    from numba import types

    int32s, int64s = types.int32[::1], types.int64[::1]
    flat = "rows", "cells", "sets", "set_cells", "items", "slots", "scratch"
    kinds = dict.fromkeys(flat, int32s)
    kinds |= {"meta": int64s, "keys": types.Array(types.int32, 1, "C", readonly=True)}
    # The functions call each other by name: in a namespace of their own they call machine code, of
    # which there is one piece each because the types of all arguments are said beforehand.
    space = dict(vars(loops))
    for name, function in vars(loops).items():
        if not inspect.isfunction(function):
            continue
        names = inspect.signature(function).parameters
        space[name] = numba.njit(
            tuple(kinds.get(argument, types.int64) for argument in names),
            error_model="numpy",  # no check for division by zero: there is none
            no_cpython_wrapper=name not in _CALLED,
            no_cfunc_wrapper=True,
        )(FunctionType(function.__code__, space, name))
    return SimpleNamespace(**{name: space[name] for name in _CALLED})
