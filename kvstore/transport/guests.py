"""Which incoming connections may stay: decisions alone, over whatever stands for a connection.

    arrive ──▶ arriving (ARRIVING_MAX) ──admit──▶ admitted (ADMITTED_MAX)

Rules: a guest without a certificate takes no place of one that has shown one. The oldest arriving
guest makes room for the newest, so silent ones keep nobody out. Each node has NODE_MAX places of
the admitted; its next guest takes the place of its longest quiet one: as many nodes as a cluster
has find room, and none takes it from the others. Otherwise only the guest that has been quiet
longest makes room, and only after QUIET_NS.

Does not cover: what admits one, and when one that arrives is given up (`tcp`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from kvstore.units import NS_PER_S

NODES_MAX: Final = 1024
NODE_MAX: Final = 2
"""Places of one node: a transfer worker that follows another may connect before the end of that one
is seen.
"""
ADMITTED_MAX: Final = NODES_MAX * NODE_MAX
ARRIVING_MAX: Final = 512
QUIET_NS: Final = 300 * NS_PER_S

T = TypeVar("T", bound=Hashable)


class Guests(Generic[T]):
    """The incoming connections of one port: arriving ones, then admitted ones."""

    def __init__(self) -> None:
        self.arriving: dict[T, None] = {}
        """Guests that have shown no certificate yet, oldest first."""
        self._admitted: dict[T, tuple[str, int]] = {}
        """Admitted guest → its node's name, if it has one, and when it was heard last, in ns; the
        longest quiet first."""

    def __contains__(self, guest: T) -> bool:
        return guest in self.arriving or guest in self._admitted

    @property
    def everybody(self) -> list[T]:
        return [*self.arriving, *self._admitted]

    def arrive(self, guest: T) -> T | None:
        """Add a guest that arrives. Returns the guest that must go for it; None: none must."""
        self.arriving[guest] = None
        return next(iter(self.arriving)) if len(self.arriving) > ARRIVING_MAX else None

    def admit(self, guest: T, node: str, now_ns: int) -> T | None:
        """Admit a guest. Returns the guest that must go for it, or the guest itself if there is no
        room; None: none must. `node`: name in its certificate; empty without authentication.
        """
        its = [each for each, (its_node, _) in self._admitted.items() if node and its_node == node]
        gone = its[0] if len(its) >= NODE_MAX else None
        if gone is None and len(self._admitted) >= ADMITTED_MAX:
            gone, (_, heard_ns) = next(iter(self._admitted.items()))
            if now_ns - heard_ns < QUIET_NS:
                return guest
        del self.arriving[guest]
        self._admitted[guest] = node, now_ns
        return gone

    def heard(self, guest: T, now_ns: int) -> None:
        """Note a sign of life of an admitted guest."""
        node, _ = self._admitted.pop(guest)
        self._admitted[guest] = node, now_ns

    def leave(self, guest: T) -> None:
        """Remove a guest, whether it arrives or is admitted."""
        self.arriving.pop(guest, None)
        self._admitted.pop(guest, None)
