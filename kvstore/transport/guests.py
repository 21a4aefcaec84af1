"""Who of those that dial in may stay: decisions alone, over whatever stands for a connection.

    arrive ──▶ arriving (ARRIVING_MAX) ──admit──▶ admitted (ADMITTED_MAX)

Rules: who has shown no certificate takes no place of one who has. Of those that arrive the oldest
makes room for the newest, so that who is silent keeps nobody out. Of those that are admitted none
makes room, but the one that has been quiet longest, and for QUIET_NS.

Does not cover: what admits one, and when one that arrives is given up (`tcp`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

from kvstore.units import NS_PER_S

ARRIVING_MAX: Final = 256
ADMITTED_MAX: Final = 256
QUIET_NS: Final = 300 * NS_PER_S

T = TypeVar("T", bound=Hashable)


class Guests(Generic[T]):
    """Those that are here."""

    def __init__(self) -> None:
        self._arriving: dict[T, None] = {}
        """Oldest first."""
        self._heard_ns: dict[T, int] = {}
        """When each that is admitted was heard last; longest quiet first."""

    def __contains__(self, guest: T) -> bool:
        return guest in self._arriving or guest in self._heard_ns

    @property
    def arriving(self) -> Iterable[T]:
        return self._arriving.keys()

    @property
    def everybody(self) -> list[T]:
        return [*self._arriving, *self._heard_ns]

    def arrive(self, guest: T) -> T | None:
        """Who must go for it."""
        self._arriving[guest] = None
        return next(iter(self._arriving)) if len(self._arriving) > ARRIVING_MAX else None

    def admit(self, guest: T, now_ns: int) -> T | None:
        """Who must go for it; itself, where there is no room."""
        longest_quiet = next(iter(self._heard_ns.items()), None)
        gone = None
        if len(self._heard_ns) >= ADMITTED_MAX and longest_quiet is not None:
            gone, heard_ns = longest_quiet
            if now_ns - heard_ns < QUIET_NS:
                return guest
        del self._arriving[guest]
        self._heard_ns[guest] = now_ns
        return gone

    def heard(self, guest: T, now_ns: int) -> None:
        """One that is admitted."""
        del self._heard_ns[guest]
        self._heard_ns[guest] = now_ns

    def leave(self, guest: T) -> None:
        """Whether it arrives or is admitted."""
        self._arriving.pop(guest, None)
        self._heard_ns.pop(guest, None)
