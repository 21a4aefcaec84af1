"""The queue for the disk: blocks that watches wait for, the shortest rest first.

    enter ──first──▶ drop (its reads begun) … ──empty, or nobody waits any more──▶ over

Shortest remaining processing time has the least mean wait (Schrage, 1968), and a long prompt keeps
nobody from the disk. A prompt that shorter ones pass for too long is computed: its engine waits no
longer, and its turn is over.

A turn that was entered since the last `settle` counts as awaited: its watch may not be there yet.
Costs of a call grow with the blocks of its turn and TURNS_COUNTED, not with the table.
Does not cover: reads, room (`files`), watches (`arrivals`), how long reads take (`pace`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.table import Keys, Rows
from kvstore.engine.moves.arrivals import Name
from kvstore.engine.sessions.askers import Asker

TURNS_COUNTED: Final = 1024
"""Most turns that an estimate adds up: nobody waits for so many."""
STALE_MAX: Final = 64
"""Most entries of turns that are over, beyond one for each turn."""


class Turn(msgspec.Struct):
    """Blocks on disk that one watch waits for and that are not being read yet, in chain order."""

    name: Name
    number: int
    entered: int
    """Number of the last time that it was entered."""
    asker: Asker
    keys: Keys
    rows: Rows
    """Their rows when they were queued, [S][n]; a row may be that of another block by now."""
    new_bytes: int
    """Bytes that no other turn had when this one was entered."""

    @property
    def slots_bytes(self) -> int:
        """Size of the slots of one block, in all shards."""
        return sum(self.asker.slot_sizes)

    @property
    def size_bytes(self) -> int:
        """Size of the slots of all blocks."""
        return len(self.keys) * self.slots_bytes


class _Place(NamedTuple):
    size_bytes: int
    """When it was entered: what a turn has less by now was at the front."""
    number: int
    name: Name


class Turns:
    """Turns by name, one for each, and their order."""

    def __init__(self, row_count_max: int, is_awaited: Callable[[Name], bool]) -> None:
        self._is_awaited = is_awaited
        self._turns: dict[Name, Turn] = {}
        self._order: list[_Place] = []
        """Sorted; with places of turns that are over."""
        self._numbers = itertools.count(1)
        self._settled = 0
        """Turns that were entered before this number have their watch, if they are awaited."""
        self._queued = np.zeros(row_count_max + 1, dtype=np.int32)
        """Number of the turns that each row is in; none for row -1."""

    def __len__(self) -> int:
        return len(self._turns)

    def enter(self, name: Name, asker: Asker, keys: Keys, rows: Rows) -> Turn:
        """Queue these blocks, at least one, instead of those of an earlier turn of this name."""
        old = self._turns.get(name)
        if old is not None and np.array_equal(old.rows, rows):
            old.entered = next(self._numbers)
            return old
        self.leave(name)
        new_blocks = int(np.count_nonzero(self._queued[rows[0]] == 0))
        number = next(self._numbers)
        turn = Turn(name, number, number, asker, keys, rows, 0)
        turn.new_bytes = new_blocks * turn.slots_bytes
        self._turns[name] = turn
        self._queued[rows] += 1
        if len(self._order) > 2 * len(self._turns) + STALE_MAX:
            self._order = [place for place in self._order if self._at(place) is not None]
        bisect.insort(self._order, _Place(turn.size_bytes, turn.number, name))
        return turn

    def leave(self, name: Name) -> None:
        """End the turn of this name, if there is one."""
        if (turn := self._turns.pop(name, None)) is not None:
            self._queued[turn.rows] -= 1

    def drop(self, turn: Turn, count: int) -> None:
        """Take the first blocks out of the queue; the turn is over with the last one."""
        self._queued[turn.rows[:, :count]] -= 1
        turn.keys, turn.rows = turn.keys[count:], turn.rows[:, count:]
        if not len(turn.keys):
            del self._turns[turn.name]

    def settle(self) -> None:
        """All turns that are awaited have their watch by now."""
        self._settled = next(self._numbers)

    @property
    def first(self) -> Turn | None:
        """The next turn; None: nobody waits."""
        while self._order:
            if (turn := self._at(self._order[0])) is not None:
                return turn
            place = self._order.pop(0)
            if (left := self._turns.get(place.name)) is not None and left.number == place.number:
                self.leave(place.name)
        return None

    def _at(self, place: _Place) -> Turn | None:
        """The turn of a place; None: it is over, or nobody waits for it."""
        turn = self._turns.get(place.name)
        if turn is None or turn.number != place.number:
            return None
        is_awaited = turn.entered > self._settled or self._is_awaited(turn.name)
        return turn if is_awaited else None

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """Flags of the rows that are queued."""
        queued: NDArray[np.bool_] = self._queued[rows] > 0
        return queued

    def bytes_until(self, name: Name) -> int:
        """Bytes to be read until the last block of this turn is there, those of turns before it
        included, each block about once; 0: none of its blocks is queued."""
        own = self._turns.get(name)
        if own is None:
            return 0
        before_bytes = 0
        for place in self._order[:TURNS_COUNTED]:
            if place.number == own.number:
                break
            if (turn := self._at(place)) is not None:
                before_bytes += min(turn.new_bytes, turn.size_bytes)
        return max(before_bytes + min(own.new_bytes, own.size_bytes), own.size_bytes)

    def check(self) -> None:
        """Raise AssertionError if a count is wrong."""
        queued = np.zeros_like(self._queued)
        for turn in self._turns.values():
            queued[turn.rows] += 1
            assert len(turn.keys) == turn.rows.shape[1] > 0, "a turn without blocks"
            assert any(place.number == turn.number for place in self._order), "without a place"
        assert bool((self._queued == queued).all()), "a block in a turn that is over"
