"""Order of turns on the loop: kinds of sources, and within a kind users and processes.

    wake-up ▶ ranks ▶ processes that ended ▶ files, peers ▶ schedulers ▶ newcomers ▶ listener

Within a kind the user comes first that took least of the loop's time lately, of its processes the
one that took least, and of its sockets the one that waited longest. So a process has one share for
any number of engines, and a source with few requests waits briefly. Each tick halves the time that
counts. A new process begins with the time of the busiest of its user: a fork is no way to the
front. Does not cover: how long a turn is (`kvstore.node.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeVar

from kvstore.engine.events import Event
from kvstore.types import ConnectionId

(
    TURN_WAKE,
    TURN_RANK,
    TURN_PROCESS,
    TURN_FILES,
    TURN_SCHEDULER,
    TURN_NEWCOMER,
    TURN_LISTENER,
) = range(7)
FORGOTTEN_NS: Final = 1000.0
"""Less time of a user or process counts as none."""

_K = TypeVar("_K")
Read = Callable[[int], Iterable[Event]]
"""Takes the mask of a ready descriptor and yields its events; a call after an early stop continues
with the rest.
"""


class Party(NamedTuple):
    """User and process that time is charged to."""

    uid: int
    process: int
    """Pid, or another number that no other process of the user has."""


NODE: Final = Party(-1, 0)


class TurnSource(NamedTuple):
    """A source in epoll: its kind (a TURN_ number), its party, and the function that reads it."""

    turn: int
    connection: ConnectionId | None
    read: Read
    party: Party = NODE


class Turns:
    """Time that parties took, and the order that follows from it."""

    def __init__(self) -> None:
        self._of_user: dict[int, float] = {}
        self._of_party: dict[Party, float] = {}
        self._served: dict[int, int] = {}
        """Descriptor → serial number of its last turn; a descriptor number that is used again waits
        once as if it were the old one.
        """
        self._serial = 0

    def order(self, found: list[tuple[int, int]], sources: Mapping[int, TurnSource]) -> None:
        """Sort `found`, a list of (descriptor, mask), by turn."""

        def rank(item: tuple[int, int]) -> tuple[int, float, float, int]:
            turn, party = sources[item[0]].turn, sources[item[0]].party
            user = self._of_user.get(party.uid, 0.0)
            return turn, user, self._of_party.get(party, 0.0), self._served.get(item[0], 0)

        found.sort(key=rank)

    def join(self, party: Party) -> None:
        """Add a process that has introduced itself."""
        if party not in self._of_party:
            its = (time for other, time in self._of_party.items() if other.uid == party.uid)
            self._of_party[party] = max(its, default=0.0)

    def charge(self, fd: int, party: Party, duration_ns: int) -> None:
        """Charge a party for the time in which one of its descriptors was served."""
        self._serial += 1
        self._served[fd] = self._serial
        self._of_user[party.uid] = self._of_user.get(party.uid, 0.0) + duration_ns
        self._of_party[party] = self._of_party.get(party, 0.0) + duration_ns

    def tick(self) -> None:
        """Halve the time that counts."""
        self._of_user = _half(self._of_user)
        self._of_party = _half(self._of_party)


def _half(times: dict[_K, float]) -> dict[_K, float]:
    return {key: time / 2 for key, time in times.items() if time > FORGOTTEN_NS}
