"""Agendas and groups: a thing is looked at when its time has come or its name is called, so that no
event has to look at all things.

Does not cover: what a look does (`grants`, `pushes`, `leases`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
G = TypeVar("G", bound=Hashable)
LOOK_COST: Final = 64
"""Cost of one look, in the unit of the budgets: the cost of finding one key."""
LOOK_COST_MAX: Final = 1 << 12
"""Budget for looks of one kind in a tick, in keys: two milliseconds. The rest is looked at in
further ticks, between which lookups are answered."""
_STALE_MAX: Final = 64


class Agenda(Generic[T]):
    """Things ordered by the time of their next look; each thing has one such time."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        """(time in ns, number of the entry, thing). Entries that a later `put` replaced stay until
        they are popped or cleaned out."""
        self._entries: dict[T, int] = {}
        self._number = 0

    def put(self, its: T, due_ns: int) -> None:
        """Set the time of the next look at this thing, in place of any earlier one."""
        self._number += 1
        self._entries[its] = self._number
        heapq.heappush(self._heap, (due_ns, self._number, its))
        if len(self._heap) > 2 * len(self._entries) + _STALE_MAX:
            self._heap = [each for each in self._heap if self._entries.get(each[2]) == each[1]]
            heapq.heapify(self._heap)

    def drop(self, its: T) -> None:
        """Cancel the next look at this thing. Unknown things are ignored."""
        self._entries.pop(its, None)

    def take(self, now_ns: int) -> T | None:
        """Remove and return the thing that has been due for longest; None: none is due."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, number, its = heapq.heappop(self._heap)
            if self._entries.get(its) == number:
                del self._entries[its]
                return its
        return None


class Groups(OrderedDict[G, dict[T, None]]):
    """Things by name, several to a name, in the order in which they were added."""

    def add(self, its: T, *names: G) -> None:
        """Add a thing under each of these names."""
        for name in names:
            self.setdefault(name, {})[its] = None

    def remove(self, its: T, *names: G) -> None:
        """Remove a thing from these names; ignored where a name does not have it."""
        for name in names:
            group = self.get(name, {})
            group.pop(its, None)
            if not group:
                self.pop(name, None)

    def of(self, name: G) -> list[T]:
        """All things of this name, in the order in which they were added."""
        return list(self.get(name, ()))

    def first(self, name: G) -> T | None:
        """The thing that was added first to this name; None if it has none."""
        return next(iter(self.get(name, ())), None)

    def turn(self) -> T:
        """The first thing of the name whose turn it is; names take turns. There must be a thing."""
        name = next(iter(self))
        self.move_to_end(name)
        return next(iter(self[name]))

    def count(self, name: G) -> int:
        """Number of things of this name."""
        return len(self.get(name, ()))

    @property
    def total(self) -> int:
        """Number of things of all names."""
        return sum(map(len, self.values()))
