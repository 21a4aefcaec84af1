"""The reference transport: arenas of one process, copied when the reader polls.

Plain and slow on purpose, and the only one whose peers can be stopped and killed by a call: what
the others must do, it shows.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ProtocolError, TransportError
from kvstore.ports import End, Outcome, Pieces, TransportCapabilities
from kvstore.transport.pieces import check_pieces
from kvstore.wire.mover import Descriptor, decode_descriptor, encode


class Hub:
    """What stands for the network: who is there."""

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

    def __init__(self, hub: Hub, name: str, arena: NDArray[np.uint8]) -> None:
        self._hub, self._name, self.arena = hub, name, arena
        self._place = hub.join(self)
        self._peers: dict[str, Descriptor] = {}
        self._reads: deque[tuple[int, str, Descriptor, Pieces]] = deque()
        self._outcomes: list[Outcome] = []
        self.stopped = False
        """It gives nothing, and its readers wait."""

    refused_count = 0
    """Who reads from here is not known here."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return TransportCapabilities(one_sided=True, read_only_source=True, secure=True)

    def describe(self) -> bytes:
        return encode(Descriptor("loopback", self._name, len(self.arena), 0, self._place))

    def connect(self, peer: str, descriptor: bytes) -> None:
        assert peer not in self._peers, peer
        self._peers[peer] = open_descriptor(descriptor, peer=peer, backend="loopback")

    def post_read(self, read: int, peer: str, pieces: Pieces) -> None:
        found = self._peers.get(peer)
        if found is None:
            raise TransportError(f"{peer} is not connected")
        check_pieces(pieces, local_bytes=len(self.arena), remote_bytes=found.size_bytes)
        self._reads.append((read, peer, found, pieces))

    def poll(self) -> list[Outcome]:
        waiting, self._reads = self._reads, deque()
        for read, peer, found, pieces in waiting:
            owner = self._hub.members.get(found.details)
            if owner is None:
                self._outcomes.append(Outcome(read, End.FAILED, f"{peer} has ended"))
            elif owner.stopped:
                self._reads.append((read, peer, found, pieces))
            else:
                for to, at, length in zip(*map(np.ndarray.tolist, pieces), strict=True):
                    self.arena[to : to + length] = owner.arena[at : at + length]
                self._outcomes.append(Outcome(read, End.DONE))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def fileno(self) -> int:
        return -1

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        dropped = [read for read, name, *_ in self._reads if name == peer]
        self._reads = deque(each for each in self._reads if each[1] != peer)
        self._outcomes += [Outcome(read, End.FAILED, "forgotten") for read in dropped]

    def close(self) -> None:
        self._hub.members.pop(self._place, None)
        self._reads.clear()


def open_descriptor(data: bytes, *, peer: str, backend: str) -> Descriptor:
    """Raises TransportError when it is not one of that peer and back end."""
    try:
        found = decode_descriptor(data)
    except ProtocolError:
        raise TransportError(f"what {peer} calls its descriptor is none") from None
    if found.backend != backend:
        raise TransportError(f"{peer} moves by {found.backend!r}, this node by {backend!r}")
    if found.name != peer:
        raise TransportError(f"the descriptor of {peer} is that of {found.name!r}")
    return found
