"""Order of turns on the loop by kind, user and process; and the loop's place among all threads.

    wake-up ▶ ranks ▶ processes that ended ▶ files, peers ▶ schedulers ▶ newcomers ▶ listener

Within a kind the user comes first that took least of the loop's time lately, of its processes the
one that took least, and of its sockets the one that waited longest. So a process has one share for
any number of engines, and a source with few requests waits briefly. Each tick halves the time that
counts. A new process begins with the time of the busiest of its user: a fork is no way to the
front.

The kernel is asked to run the loop as soon as it has something to do. A rank that waits for another
one spins, and a kernel that is fair gives it as much of a core as any thread that works: with as
many spinning ranks as cores the loop is ready to run and is not run, and engines give a node up
after 250 ms. Its work is short and others wait for it, so it asks for the least of the real-time
places: before all ordinary threads, behind all other real-time ones. Measured with two spinning
processes on two cores, lookups of 512 keys: p99 of 11 to 30 ms without, 1 ms with it; a better nice
value halved the p90 and left the slowest as they were.

The loop keeps that place while its work is short: if an engine's flood kept it from sleeping, it
would take a core from all ordinary threads. One that slept for less than a fifth of the last second
goes back among them, with a better nice value, until it sleeps for half of the time again.

Real-time places need CAP_SYS_NICE, which the deployment may give or not. Where they are refused a
better nice value is asked for; where that is refused too all goes on as it was.

Limits: no other thread has that place (the loop's children start as ordinary ones), and the kernel
keeps a share of each core for ordinary threads whatever a real-time one does. Does not cover: how
long a turn is (`kvstore.node.driver`), threads that hold the interpreter's lock when a spinning
engine takes their core.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeVar

from kvstore.engine.events import Event
from kvstore.types import ConnectionId
from kvstore.units import NS_PER_S

FORGOTTEN_NS: Final = 1000.0
"""Less time of a user or process counts as none."""

_K = TypeVar("_K")
Read = Callable[[int], Iterable[Event]]
"""Takes the mask of a ready descriptor and yields its events; a call after an early stop continues
with the rest.
"""


class TurnKind(enum.IntEnum):
    """Kind of a source: the lesser goes first."""

    WAKE, RANK, PROCESS, FILES, SCHEDULER, NEWCOMER, LISTENER = range(7)


class Party(NamedTuple):
    """User and process that time is charged to."""

    uid: int
    process: int
    """Pid, or another number that no other process of the user has."""


NODE: Final = Party(-1, 0)


class TurnSource(NamedTuple):
    """A source in epoll: its kind, its party, and the function that reads it."""

    turn: TurnKind
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


# ── among threads ─────────────────────────────────────────────────────────────────────────────────

LOOP_NICE: Final = -10
LOOK_NS: Final = NS_PER_S
BUSY_PART, CALM_PART = 0.2, 0.5
"""Share of time slept: below the first the place is given up; above the second, regained."""

_log = logging.getLogger(__name__)


class ThreadPriority:
    """Priority of the calling thread among all threads of the machine. Never fails; a refusal is
    logged for debugging."""

    def __init__(self, now_ns: int) -> None:
        self._is_first = _be_first()
        self._may_be = self._is_first
        self._looked_ns, self._slept_ns = now_ns, 0

    def look(self, now_ns: int, slept_ns: int) -> None:
        """Give the real-time place up, or ask for it again, by the share of time slept. Called now
        and then by the thread. `slept_ns`: time slept since it began."""
        if not self._may_be or now_ns - self._looked_ns < LOOK_NS:
            return
        part = (slept_ns - self._slept_ns) / (now_ns - self._looked_ns)
        self._looked_ns, self._slept_ns = now_ns, slept_ns
        if self._is_first and part < BUSY_PART:
            _be_ordinary()
            self._is_first = False
        elif not self._is_first and part > CALM_PART:
            self._is_first = _be_first()


def _be_first() -> bool:
    """Ask for the least real-time place. False: it is refused, and a better nice value was asked
    for."""
    try:
        least = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, least)
    except OSError as refused:
        if not _be_better():
            _log.debug("the loop runs without real-time priority: %s", refused.strerror)
        return False
    return True


def _be_ordinary() -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        _be_better()


def _be_better() -> bool:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOOP_NICE)
    except OSError:
        return False
    return True
