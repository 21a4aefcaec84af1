"""Messages between nodes to and from the engine core's values: checked here, once, at the door.

Ways for a message to be broken, each a ProtocolError: no kind; a space or keys of another length
than 32 bytes each; more keys than fit a message; a name that is empty or too long; shards that are
none; arrays that are not [n][S]; slots outside of the serving node's arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import Lent
from kvstore.errors import ProtocolError
from kvstore.proto import peer_pb2 as pb
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, Incarnation, Shard
from kvstore.wire.bounds import NAME_BYTES_MAX
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, RANKS_MAX
from kvstore.wire.record import PAYLOAD_BYTES_MAX

MESSAGE_BYTES_MAX: Final = 1 << 20
_SLOT_BYTES: Final = 4


class Who(NamedTuple):
    """One start of a node."""

    node: str
    incarnation: Incarnation


class Borrowed(NamedTuple):
    """Blocks that a peer serves, as in its message."""

    shards: tuple[Shard, ...]
    block_bytes: tuple[int, ...]
    slots: NDArray[np.int64]
    """[n][S]"""
    checksums: bytes
    """[n][S], CHECKSUM_BYTES each; as they came: they may be many."""

    def checksums_of(self, block: int) -> list[bytes]:
        """[S]"""
        size = len(self.shards) * CHECKSUM_BYTES
        row = self.checksums[block * size : (block + 1) * size]
        return [row[at : at + CHECKSUM_BYTES] for at in range(0, size, CHECKSUM_BYTES)]


def who_of(hello: pb.Hello | pb.Welcome) -> Who:
    """Raises ProtocolError."""
    if not 0 < len(hello.node.encode()) <= NAME_BYTES_MAX or not hello.incarnation:
        raise ProtocolError("a node without a name, or with one that is too long")
    return Who(hello.node, Incarnation(hello.incarnation))


def check_lend(lend: pb.Lend) -> None:
    """Raises ProtocolError."""
    _check_named(lend, "a fetch")
    if lend.loan >= 1 << 63:
        raise ProtocolError("a fetch's number is below 2**63")


def check_prepare(request: pb.PrepareRequest) -> None:
    """Raises ProtocolError."""
    _check_named(request, "a preparation")
    if len(request.engine.encode()) > NAME_BYTES_MAX:
        raise ProtocolError("an engine with a name that is too long")


def _check_named(message: pb.Lend | pb.PrepareRequest, what: str) -> None:
    count, rest = divmod(len(message.keys), KEY_BYTES)
    if rest or not 0 < count <= KEYS_PER_DATAGRAM_MAX or len(message.space) != KEY_BYTES:
        raise ProtocolError(
            f"keys and spaces have 32 bytes, and {what} names {KEYS_PER_DATAGRAM_MAX} keys at most"
        )
    if not 0 < len(message.tenant.encode()) <= NAME_BYTES_MAX:
        raise ProtocolError("a tenant without a name, or with one that is too long")


def lent_answer(lent: Lent) -> pb.Answer:
    """The answer to a fetch, as a message. Generations stay here: Returned says if they changed."""
    shards = shard_messages(lent.shards, lent.block_bytes)
    return pb.Answer(
        lent=pb.Lent(loan=lent.loan, shards=shards, slots=lent.slots, checksums=lent.checksums)
    )


def shard_messages(shards: Sequence[Shard], block_bytes: Sequence[int]) -> list[pb.Shard]:
    """Shards and the size of a block in each, as a message."""
    return [
        pb.Shard(
            layer_begin=shard.layer_begin,
            layer_end=shard.layer_end,
            head_begin=shard.head_begin,
            head_end=shard.head_end,
            block_bytes=size,
        )
        for shard, size in zip(shards, block_bytes, strict=True)
    ]


def shards_of(shards: Sequence[pb.Shard]) -> tuple[tuple[Shard, ...], tuple[int, ...]]:
    """The inverse. Raises ProtocolError."""
    # A shard is what at least one rank has.
    if len(shards) > RANKS_MAX or any(
        not 0 < shard.block_bytes <= PAYLOAD_BYTES_MAX for shard in shards
    ):
        raise ProtocolError("an answer with shards that are none")
    its = tuple(Shard(s.layer_begin, s.layer_end, s.head_begin, s.head_end) for s in shards)
    return its, tuple(s.block_bytes for s in shards)


def borrowed_of(lent: pb.Lent, *, asked: int) -> Borrowed:
    """The blocks served, of `asked` keys. Raises ProtocolError."""
    shards, block_bytes = shards_of(lent.shards)
    columns = len(shards)
    cells = len(lent.slots) // _SLOT_BYTES
    count = cells // columns if columns else 0
    if (
        len(lent.slots) % _SLOT_BYTES
        or count * columns != cells
        or count > asked
        or len(lent.checksums) != cells * CHECKSUM_BYTES
    ):
        raise ProtocolError("an answer whose arrays do not fit each other")
    slots = np.frombuffer(lent.slots, "<u4").astype(np.int64).reshape(count, columns)
    return Borrowed(shards, block_bytes, slots, lent.checksums)


def intact_of(returned: pb.Returned, *, count: int) -> NDArray[np.bool_]:
    """Which of `count` blocks did not change; none if the serve had ended. Raises ProtocolError."""
    if not returned.intact:
        return np.zeros(count, dtype=bool)
    if len(returned.intact) != count or not set(returned.intact) <= {0, 1}:
        raise ProtocolError("an answer about other blocks than were served")
    return np.frombuffer(returned.intact, dtype=np.bool_)
