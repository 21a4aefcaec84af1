"""Between a node process and its transfer worker child: one SOCK_SEQPACKET pair, one struct a
datagram.

    node process                             transfer worker
      │── Begin + arena ─────────────────────▶│   maps, opens the back end, registers once
      │◀──────────── Registered, or Unable ───│   Unable: it ends
      │── Connect(peer, descriptor) ─────────▶│
      │◀──────── Unreachable, or nothing ─────│   only a transfer shows whether the peer lives
      │── Move(transfer, …), … last=True ────▶│   in parts, which arrive in order
      │◀──── Done, or Failed, or Limbo ───────│   exactly one; none of a peer that has stopped
      │── Forget(peer) ──────────────────────▶│   its transfers end, if the back end can see to it
      │◀──────────────────────────── Beat … ──│

Done and Failed say that nothing writes to the places of the transfer any more. Limbo says that only
the transfer worker's death proves that.

A transfer worker sends its `Descriptor` to transfer workers of other nodes, through the node
processes, which do not look inside.

Ways to be broken: not msgpack; unknown tag; field of another type; arrays that are no multiple of 8
bytes or not equally long; ranges that overflow. `decode_*` raises `ProtocolError`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ProtocolError
from kvstore.wire.bounds import U64, Label, Name, Sentence

PIECES_PER_DATAGRAM_MAX: Final = 4096
PIECES_PER_MOVE_MAX: Final = 1 << 17
DATAGRAM_BYTES_MAX: Final = 128 << 10
"""Room for the largest: 4,096 pieces are 96 KiB, a descriptor is at most 64."""
DESCRIPTOR_BYTES_MAX: Final = 64 << 10
REASON_CHARS_MAX: Final = 400
OPTIONS_MAX: Final = 256

Blob = Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX)]
Words = Annotated[bytes, msgspec.Meta(max_length=8 * PIECES_PER_DATAGRAM_MAX)]
"""u64, little-endian."""
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


class Direction(enum.Enum):
    """Which way the bytes of a transfer go."""

    READ = "read"
    """From the peer's arena into this node's."""
    WRITE = "write"
    """From this node's arena into the peer's landing memory."""


class TransferWorkerMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all datagrams; the tag is the class name."""


# ── node → transfer worker ────────────────────────────────────────────────────────────────────────


class Begin(TransferWorkerMessage, frozen=True):
    """First datagram. With the arena's descriptor, and the one to hold it by (`arena.Arena`)."""

    backend: Label
    name: Name
    """Name of this node, to which peers connect."""
    arena_bytes: U64
    options: Annotated[dict[Label, Sentence], msgspec.Meta(max_length=OPTIONS_MAX)]
    """Options of the back end, see `transport.backends`."""
    paced: bool = True
    """Whether reads are paced by windows: on a busy host the transfer worker may then read at an
    eighth of its speed."""
    landing_begin: U64 = 0
    landing_bytes: U64 = 0
    """The part of the arena that peers may write to; 0 bytes: none."""


class Connect(TransferWorkerMessage, frozen=True):
    """Transfers from and to this peer will follow."""

    peer: Name
    descriptor: Blob


class MovePieces(TransferWorkerMessage, tag="Move", frozen=True):
    """Pieces of a transfer, see `ports.Pieces`; it begins with the last part."""

    transfer: U64
    peer: Name
    local: Words
    remote: Words
    length: Words
    direction: Direction
    last: bool = True


class Forget(TransferWorkerMessage, frozen=True):
    """End all transfers with this peer, which may be connected again."""

    peer: Name


# ── transfer worker → node ────────────────────────────────────────────────────────────────────────


class Registered(TransferWorkerMessage, frozen=True):
    """The arena is known to the back end."""

    descriptor: Blob
    """Encoded `Descriptor`, for transfer workers of other nodes."""
    ends_forgotten: bool
    """The back end ends the reads of a peer that it forgets."""


class Unable(TransferWorkerMessage, frozen=True):
    """This back end cannot be used here, which another start does not change by itself."""

    reason: Reason


class Unreachable(TransferWorkerMessage, frozen=True):
    """Answer to Connect: its transfers will fail."""

    peer: Name
    reason: Reason


class Done(TransferWorkerMessage, frozen=True):
    """All bytes of a transfer are there, and nothing touches their places any more."""

    transfer: U64


class Failed(TransferWorkerMessage, frozen=True):
    """Bytes are missing, and nothing touches their places here any more."""

    transfer: U64
    reason: Reason


class Limbo(TransferWorkerMessage, frozen=True):
    """Bytes are missing, and their places here may be in use until the transfer worker is dead."""

    transfer: U64


class Beat(TransferWorkerMessage, frozen=True):
    """Heartbeat of the transfer worker's loop."""

    refused: U64
    """Peers that would read from here and found no room, since its start."""


FromNode = Begin | Connect | MovePieces | Forget
FromTransferWorker = Registered | Unable | Unreachable | Done | Failed | Limbo | Beat


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a peer needs to read from a transfer worker's arena, and to write to its landing
    memory."""

    backend: Label
    name: Name
    size_bytes: U64
    """Size of the arena."""
    base: U64
    """Address of its first byte in the transfer worker, where the back end counts by addresses."""
    details: Blob
    """Further data, in a form of the back end's own."""
    landing_begin: U64 = 0
    """Offset in the arena."""
    landing_bytes: U64 = 0
    """0: this transfer worker takes no writes."""
    landing_base: U64 = 0
    """As `base`, of the first byte of the landing memory."""


_T = TypeVar("_T")
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_from_transfer_worker: msgspec.msgpack.Decoder[FromTransferWorker] = msgspec.msgpack.Decoder(
    FromTransferWorker
)
_descriptor = msgspec.msgpack.Decoder(Descriptor)


def encode(message: TransferWorkerMessage | Descriptor) -> bytes:
    """The bytes of a datagram, or of the descriptor that a peer is given."""
    return msgspec.msgpack.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """A datagram of the node process. Raises ProtocolError."""
    message = _decode(_from_node, data)
    if isinstance(message, MovePieces):
        if not len(message.local) == len(message.remote) == len(message.length):
            raise ProtocolError("the arrays of a transfer are not equally long")
        if len(message.local) % 8:
            raise ProtocolError("an array of a transfer is cut off")
    return message


def decode_from_transfer_worker(data: bytes) -> FromTransferWorker:
    """A datagram of the transfer worker. Raises ProtocolError."""
    return _decode(_from_transfer_worker, data)


def decode_descriptor(data: bytes) -> Descriptor:
    """The descriptor in these bytes. Raises ProtocolError."""
    return _decode(_descriptor, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolError("a datagram of a transfer worker is malformed") from None


def parts_of(
    transfer: int, peer: str, arrays: Sequence[NDArray[np.uint64]], direction: Direction
) -> list[MovePieces]:
    """The datagrams of a transfer; `arrays` are local, remote and length of its pieces."""
    count, total = PIECES_PER_DATAGRAM_MAX, len(arrays[0])
    parts = []
    for at in range(0, max(1, total), count):
        local, remote, length = (words(array[at : at + count]) for array in arrays)
        last = at + count >= total
        parts.append(MovePieces(transfer, peer, local, remote, length, direction, last))
    return parts


def words(array: NDArray[np.uint64]) -> bytes:
    """The bytes of an array in a datagram."""
    return array.astype("<u8", copy=False).tobytes()


def array_of(data: bytes) -> NDArray[np.uint64]:
    """The inverse of `words`."""
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
