"""Approximate prefixes: which worker was sent which blocks, when nobody says what is held where.

    insert (at routing) ─▶ key → workers, time        match ─▶ leading blocks a worker

Used for engines without an exact source, when the index is gone, and beside the index for blocks
that were sent so recently that it cannot know them. Keys are chained, so equal keys mean equal
prefixes. Bounded: `blocks_max` keys, the longest unused leaves first, the end of a chain before its
start.

A worker that leaves is not looked for among a million entries: each loses its bit when it is read
or written next.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.types import KEY_BYTES

_YOUNG_NS: Final = 10_000_000_000
"""So long after it was sent, a block counts as there although the index does not show it: longer
than a delta and most queues take."""
_FINE_STEPS: Final = 64
"""Steps of a prompt that are all remembered; beyond them, every fourth is: a hit of 8,192 tokens is
worth the same give or take 512.
"""

_ALL, _YOUNG, _STAMP, _CLEAN = range(4)


class ApproximateTree:
    """See the module. Workers are bits: a number each, given back by `forget`. `step`: one key in
    so many is remembered (`RouteRequest.key_step`)."""

    def __init__(self, *, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._blocks: OrderedDict[int, list[int]] = OrderedDict()
        """First 8 bytes of a key → [bits of workers that were sent it, bits of those that were sent
        it within `_YOUNG_NS`, time of the last, number of departures already taken out]. Two keys
        with equal bytes cost a wrong guess, no more.
        """
        self._last: tuple[bytes, int, tuple[list[int], list[int]]] = b"", 0, ([], [])
        self._bit_of: dict[str, int] = {}
        self._worker_of: dict[int, str] = {}
        self._left: OrderedDict[int, int] = OrderedDict()
        """Bit → number of the departure of its last worker, in that order."""
        self._departures = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def insert(self, keys: bytes, worker: str, now_ns: int, *, step: int) -> None:
        """A prompt with these blocks was sent to a worker."""
        bit = 1 << self._number(worker)
        blocks = self._blocks
        for key in reversed(self._picked(keys, step)[0]):
            entry = blocks.get(key)
            if entry is None:
                blocks[key] = [bit, bit, now_ns, self._departures]
                continue
            self._clean(entry)
            is_young = now_ns - entry[_STAMP] <= _YOUNG_NS
            entry[_ALL] |= bit
            entry[_YOUNG] = entry[_YOUNG] | bit if is_young else bit
            entry[_STAMP] = now_ns
            blocks.move_to_end(key)
        while len(blocks) > self.blocks_max:
            blocks.popitem(last=False)

    def withdraw(self, keys: bytes, worker: str, *, step: int, after_blocks: float) -> None:
        """A request came to nothing: the worker has no more than `after_blocks` leading blocks of
        it.
        """
        if worker not in self._bit_of:
            return
        keep = ~(1 << self._bit_of[worker])
        for key, end in zip(*self._picked(keys, step), strict=True):
            entry = self._blocks.get(key)
            if entry is not None and end > after_blocks:
                self._clean(entry)
                entry[_ALL] &= keep
                entry[_YOUNG] &= keep
                if not entry[_ALL]:
                    del self._blocks[key]

    def match(self, keys: bytes, now_ns: int, *, step: int, young_only: bool) -> dict[str, int]:
        """Worker → leading blocks of `keys` that it was sent; `young_only`: within `_YOUNG_NS`."""
        found: dict[str, int] = {}
        blocks, running, depth = self._blocks, -1, 0
        for key, end in zip(*self._picked(keys, step), strict=True):
            entry = blocks.get(key)
            if entry is None:
                bits = 0
            else:
                self._clean(entry)
                if not young_only:
                    bits = entry[_ALL]
                else:
                    bits = entry[_YOUNG] if now_ns - entry[_STAMP] <= _YOUNG_NS else 0
            left = running & ~bits if depth else 0
            running = running & bits
            if left:
                self._note(found, left, depth)
            if not running:
                return found
            depth = end
        if running > 0:
            self._note(found, running, depth)
        return found

    def _note(self, found: dict[str, int], bits: int, blocks: int) -> None:
        while bits:
            low = bits & -bits
            found[self._worker_of[low.bit_length() - 1]] = blocks
            bits ^= low

    def _number(self, worker: str) -> int:
        number = self._bit_of.get(worker)
        if number is None:
            number = next(bit for bit in itertools.count() if bit not in self._worker_of)
            self._bit_of[worker] = number
            self._worker_of[number] = worker
        return number

    def forget(self, worker: str) -> None:
        """Forget what was sent to a worker that is gone or empty."""
        number = self._bit_of.pop(worker, None)
        if number is None:
            return
        del self._worker_of[number]
        self._departures += 1
        self._left[number] = self._departures
        self._left.move_to_end(number)

    def _clean(self, entry: list[int]) -> None:
        """Take out bits of workers that left since this was done last."""
        known = entry[_CLEAN]
        if known == self._departures:
            return
        gone = 0
        for number, departure in reversed(self._left.items()):
            if departure <= known:
                break
            gone |= 1 << number
        entry[_ALL] &= ~gone
        entry[_YOUNG] &= ~gone
        entry[_CLEAN] = self._departures

    def _picked(self, keys: bytes, step: int) -> tuple[list[int], list[int]]:
        """(first 8 bytes of each remembered key, as a number; leading blocks that each stands for).
        The last answer is kept, since a request is looked up and sent within one turn.
        """
        known, by, picked = self._last
        if known is not keys or by != step:
            at, ends = _places(len(keys) // KEY_BYTES, step)
            numbers = np.frombuffer(keys, dtype="<u8")[:: KEY_BYTES // 8]
            picked = (numbers.take(at).tolist() if ends else []), ends
            self._last = keys, step, picked
        return picked


@functools.lru_cache(maxsize=1024)
def _places(count: int, step: int) -> tuple[npt.NDArray[np.intp], list[int]]:
    """(places of the keys to remember out of `count`, leading blocks that each stands for)."""
    fine = step * _FINE_STEPS
    ends = [*range(step, min(count, fine) + 1, step), *range(fine + 4 * step, count + 1, 4 * step)]
    return np.array(ends, dtype=np.intp) - 1, ends
