"""Pieces of a transfer: neighbours joined, limits checked, cut into parts; descriptors of peers,
which name the memory that pieces may lie in; and `BackEnd`, which checks both for every back end.
Pure.

local   0   4   8       32          one piece of 12 bytes and one of 4: neighbours in both arenas
remote  64  68  72      76          are one, in whatever number they came
length  4   4   4       4
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ProtocolError, TransportError
from kvstore.ports import Outcome, Pieces, Transport, TransportMemory
from kvstore.wire.transfer_worker import Descriptor, Direction, decode_descriptor, encode


def make_pieces(local: object, remote: object, length: object) -> Pieces:
    """Pieces from offsets and lengths in bytes, as anything that numpy converts."""
    return Pieces(*(np.asarray(part, np.uint64).reshape(-1) for part in (local, remote, length)))


def total_bytes(pieces: Pieces) -> int:
    """Bytes of all pieces together. The caller makes sure that the sum does not overflow."""
    return int(pieces.length.sum(dtype=np.uint64))


def joined(pieces: Pieces) -> Pieces:
    """Pieces without empty ones, where those that follow each other in both arenas are one."""
    local, remote, length = found = _filled(pieces)
    if len(length) < 2:
        return found
    begins = np.empty(len(length), np.bool_)
    begins[0] = True
    begins[1:] = (local[:-1] + length[:-1] != local[1:]) | (remote[:-1] + length[:-1] != remote[1:])
    at = np.flatnonzero(begins)
    return Pieces(local[at], remote[at], np.add.reduceat(length, at))


def check_pieces(
    pieces: Pieces, direction: Direction, *, local_bytes: int, found: Descriptor
) -> None:
    """Raises TransportError if a piece does not lie within both memories, or if the pieces are
    writes and the peer of `found` takes none.
    """
    check_within(pieces.local, pieces.length, 0, local_bytes, "this node's arena")
    if direction is Direction.READ:
        check_within(pieces.remote, pieces.length, 0, found.size_bytes, "the peer's arena")
        return
    if not found.landing_bytes:
        raise TransportError(f"{found.name} takes no writes: it has no landing memory")
    landing = found.landing_begin, found.landing_bytes
    check_within(pieces.remote, pieces.length, *landing, "the peer's landing memory")


def check_within(
    begin: NDArray[np.uint64],
    length: NDArray[np.uint64],
    first: int,
    limit_bytes: int,
    what: str,
) -> None:
    """Raises TransportError when a range does not lie within `limit_bytes` from `first` on."""
    limit = np.uint64(limit_bytes)
    # No sum that could overflow: what begins before `first` wraps to far behind the limit.
    at = begin - np.uint64(first)
    if ((begin < np.uint64(first)) | (at > limit) | (length > limit - np.minimum(at, limit))).any():
        raise TransportError(f"a piece lies outside of {what}")


def cut(pieces: Pieces, limit_bytes: int) -> tuple[Pieces, Pieces]:
    """(the first `limit_bytes` of the pieces, the last of them cut if need be; the rest)."""
    before = np.cumsum(pieces.length, dtype=np.uint64) - pieces.length
    taken = np.minimum(pieces.length, np.maximum(before, np.uint64(limit_bytes)) - before)
    rest = Pieces(pieces.local + taken, pieces.remote + taken, pieces.length - taken)
    return _filled(pieces._replace(length=taken)), _filled(rest)


def _filled(pieces: Pieces) -> Pieces:
    """Pieces without empty ones."""
    keep = pieces.length > 0
    return Pieces(*(part[keep] for part in pieces))


class ConnectedPeer(Protocol):
    """A peer as a back end knows it."""

    @property
    def found(self) -> Descriptor:
        """Its descriptor."""


_P = TypeVar("_P", bound=ConnectedPeer)


class BackEnd(Transport, Generic[_P]):
    """Base of back ends: peers by name, checked transfers, outcomes until `poll`."""

    refused_count = 0

    def __init__(self, backend: str, name: str, memory: TransportMemory) -> None:
        """`backend`: its name in descriptors; `name`: that of this node."""
        self._backend, self._name, self._memory = backend, name, memory
        self._peers: dict[str, _P] = {}
        self._outcomes: list[Outcome] = []

    def _described(self, details: bytes, base: int = 0) -> bytes:
        """Descriptor for peers. `base`: address of the arena, for a back end whose peers count by
        addresses; 0: by offsets.
        """
        size_bytes, landing, landings = len(self._memory.arena), self._memory.landing, (0, 0, 0)
        if landing is not None:
            address = landing.memory.ctypes.data if base else 0
            landings = (landing.begin, len(landing.memory), address)
        return encode(Descriptor(self._backend, self._name, size_bytes, base, details, *landings))

    def connect(self, peer: str, descriptor: bytes) -> None:
        assert peer not in self._peers, peer
        try:
            found = decode_descriptor(descriptor)
        except ProtocolError:
            raise TransportError(f"what {peer} calls its descriptor is none") from None
        if found.backend != self._backend:
            raise TransportError(
                f"{peer} moves by {found.backend!r}, this node by {self._backend!r}"
            )
        if found.name != peer:
            raise TransportError(f"the descriptor of {peer} is that of {found.name!r}")
        self._peers[peer] = self._connected(found)

    def post(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> None:
        to = self._peers.get(peer)
        if to is None:
            raise TransportError(f"{peer} is not connected")
        check_pieces(pieces, direction, local_bytes=len(self._memory.arena), found=to.found)
        self._begin(number, to, pieces, direction)

    def poll(self) -> list[Outcome]:
        self._go_on()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        self._outcomes.clear()

    @abstractmethod
    def _connected(self, found: Descriptor) -> _P:
        """The peer of this descriptor. Raises TransportError."""

    @abstractmethod
    def _begin(self, number: int, to: _P, pieces: Pieces, direction: Direction) -> None:
        """Begin a transfer that has been checked. Raises TransportError."""

    @abstractmethod
    def _go_on(self) -> None:
        """Do the work that is due, and add outcomes."""
