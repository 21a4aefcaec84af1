"""The reference transport: arenas of one process, copied when the one that posted polls.

Plain and slow on purpose, and the only one whose peers can be stopped and killed by a call: what
the others must do, it shows.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.ports import (
    Landing,
    Pieces,
    TransportCapabilities,
    TransportMemory,
)
from kvstore.transport.pieces import BackEnd
from kvstore.wire.transfer_worker import Descriptor, Direction, Done, Failed


class Hub:
    """Stands for the network: the back ends that can be reached."""

    def __init__(self) -> None:
        self._count = 0
        self.members: dict[bytes, Loopback] = {}
        """By what their descriptors say; another one after a restart."""

    def join(self, member: Loopback) -> bytes:
        """Its place, as a descriptor has it."""
        self._count += 1
        place = self._count.to_bytes(8, "little")
        self.members[place] = member
        return place


class Far(NamedTuple):
    """A peer."""

    found: Descriptor


class Loopback(BackEnd[Far]):
    """A `Transport` within a process."""

    capabilities = TransportCapabilities(
        takes_writes=True, ends_forgotten=True, is_secure=False, options={}
    )

    def __init__(
        self, hub: Hub, name: str, arena: NDArray[np.uint8], landing: Landing | None = None
    ) -> None:
        super().__init__("loopback", name, TransportMemory(arena, arena, landing))
        self._hub, self.arena = hub, arena
        self._place = hub.join(self)
        self._moves: deque[tuple[int, Descriptor, Pieces, Direction]] = deque()
        self.stopped = False
        """Moves nothing and answers nothing, so that its peers wait."""

    def describe(self) -> bytes:
        return self._described(self._place)

    def _connected(self, found: Descriptor) -> Far:
        return Far(found)

    def _begin(self, number: int, to: Far, pieces: Pieces, direction: Direction) -> None:
        self._moves.append((number, to.found, pieces, direction))

    def _go_on(self) -> None:
        waiting, self._moves = self._moves, deque()
        for move in waiting:
            number, found, pieces, direction = move
            owner = self._hub.members.get(found.details)
            if owner is None:
                self._outcomes.append(Failed(number, f"{found.name} has ended"))
            elif owner.stopped:
                self._moves.append(move)
            else:
                for ours, its, length in zip(*map(np.ndarray.tolist, pieces), strict=True):
                    here = self.arena[ours : ours + length]
                    there = owner.arena[its : its + length]
                    to, of = (here, there) if direction is Direction.READ else (there, here)
                    to[:] = of
                self._outcomes.append(Done(number))

    def fileno(self) -> int:
        return -1

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        dropped = [number for number, found, *_ in self._moves if found.name == peer]
        self._moves = deque(each for each in self._moves if each[1].name != peer)
        self._outcomes += [Failed(number, "forgotten") for number in dropped]

    def close(self) -> None:
        self._hub.members.pop(self._place, None)
        self._moves.clear()
