"""The reference transport: arenas of one process, copied when the one that posted polls.

Plain and slow on purpose, and the only one whose peers can be stopped and killed by a call: what
the others must do, it shows.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TransportError
from kvstore.ports import End, Landing, Outcome, Pieces, TransportCapabilities
from kvstore.transport.pieces import check_pieces, described, open_descriptor
from kvstore.wire.transfer_worker import Descriptor, Direction, encode


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


class Loopback:
    """A `Transport` within a process."""

    capabilities = TransportCapabilities(
        takes_writes=True, ends_forgotten=True, is_secure=False, options={}
    )

    def __init__(
        self, hub: Hub, name: str, arena: NDArray[np.uint8], landing: Landing | None = None
    ) -> None:
        self._hub, self._name, self.arena, self._landing = hub, name, arena, landing
        self._place = hub.join(self)
        self._peers: dict[str, Descriptor] = {}
        self._moves: deque[tuple[int, str, Descriptor, Pieces, Direction]] = deque()
        self._outcomes: list[Outcome] = []
        self.stopped = False
        """Moves nothing and answers nothing, so that its peers wait."""

    refused_count = 0
    """Its peers are not known here."""

    @staticmethod
    def is_at(details: bytes, host: str) -> bool:
        return True

    def describe(self) -> bytes:
        size_bytes = len(self.arena)
        return encode(described("loopback", self._name, size_bytes, self._place, self._landing))

    def connect(self, peer: str, descriptor: bytes) -> None:
        assert peer not in self._peers, peer
        self._peers[peer] = open_descriptor(descriptor, peer=peer, backend="loopback")

    def post(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> None:
        found = self._peers.get(peer)
        if found is None:
            raise TransportError(f"{peer} is not connected")
        check_pieces(pieces, direction, local_bytes=len(self.arena), found=found)
        self._moves.append((number, peer, found, pieces, direction))

    def poll(self) -> list[Outcome]:
        waiting, self._moves = self._moves, deque()
        for move in waiting:
            number, peer, found, pieces, direction = move
            owner = self._hub.members.get(found.details)
            if owner is None:
                self._outcomes.append(Outcome(number, End.FAILED, f"{peer} has ended"))
            elif owner.stopped:
                self._moves.append(move)
            else:
                for ours, its, length in zip(*map(np.ndarray.tolist, pieces), strict=True):
                    here = self.arena[ours : ours + length]
                    there = owner.arena[its : its + length]
                    to, of = (here, there) if direction is Direction.READ else (there, here)
                    to[:] = of
                self._outcomes.append(Outcome(number, End.DONE))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def fileno(self) -> int:
        return -1

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        dropped = [number for number, name, *_ in self._moves if name == peer]
        self._moves = deque(each for each in self._moves if each[1] != peer)
        self._outcomes += [Outcome(number, End.FAILED, "forgotten") for number in dropped]

    def close(self) -> None:
        self._hub.members.pop(self._place, None)
        self._moves.clear()
