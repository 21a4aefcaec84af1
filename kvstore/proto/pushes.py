"""Messages of pushes to and from the engine core's values: checked here, once, at the door.

Ways for a message to be broken, each a ProtocolError: those of `loans`; extents of another number
than keys; a deadline, block or descriptor beyond bounds; blocks that were not granted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import AskPush, PushAsked, Pushed, PushOver, SayPushed, SayPushOver
from kvstore.errors import ProtocolError
from kvstore.proto import loans, peer_pb2 as pb
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES
from kvstore.wire.bounds import NAME_BYTES_MAX
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX
from kvstore.wire.mover import DESCRIPTOR_BYTES_MAX
from kvstore.wire.record import PAYLOAD_BYTES_MAX

DEADLINE_MS_MAX: Final = 600_000
REASON_CHARS: Final = 400
_EXTENT_BYTES: Final = 4


class Taken(NamedTuple):
    """A grant of another node, as its words and writes need it."""

    node: str
    epoch: int
    extents: NDArray[np.int64]
    block_bytes: int
    descriptor: bytes


def grant_ask(command: AskPush, descriptor: bytes) -> pb.Ask:
    """A grant, as a message."""
    return pb.Ask(
        grant=pb.Grant(
            grant=command.grant,
            epoch=command.epoch,
            transfer=command.transfer,
            tenant=command.tenant,
            space=command.space,
            keys=command.keys,
            extents=command.extents,
            block_bytes=command.block_bytes,
            deadline_ms=command.deadline_ms,
            descriptor=descriptor,
        )
    )


def taken_of(grant: pb.Grant, node: str) -> Taken:
    """Raises ProtocolError."""
    lend = pb.Lend(tenant=grant.tenant, space=grant.space, keys=grant.keys, loan=grant.grant)
    loans.check_lend(lend)
    count = len(grant.keys) // KEY_BYTES
    if (
        len(grant.extents) != count * _EXTENT_BYTES
        or not 0 < grant.block_bytes <= PAYLOAD_BYTES_MAX
        or not 0 < grant.deadline_ms <= DEADLINE_MS_MAX
        or not 0 < len(grant.transfer.encode()) <= NAME_BYTES_MAX * 4
        or len(grant.descriptor) > DESCRIPTOR_BYTES_MAX
    ):
        raise ProtocolError("a grant with a number or array that none has")
    extents = np.frombuffer(grant.extents, "<u4").astype(np.int64)
    return Taken(node, grant.epoch, extents, grant.block_bytes, grant.descriptor)


def asked_event(peer: int, node: str, grant: pb.Grant) -> PushAsked:
    """A checked grant, for the engine."""
    return PushAsked(
        peer=peer,
        grant=grant.grant,
        node=node,
        transfer=grant.transfer,
        tenant=grant.tenant,
        space=grant.space,
        keys=grant.keys,
        deadline_ms=grant.deadline_ms,
    )


def pushed_answer(command: SayPushed, epoch: int) -> pb.Answer:
    """Blocks of a grant are written, as a message."""
    shards = loans.shard_messages(command.shards, command.block_bytes)
    return pb.Answer(
        pushed=pb.Pushed(
            grant=command.grant,
            epoch=epoch,
            first=command.first,
            shards=shards,
            checksums=command.checksums,
        )
    )


def over_answer(command: SayPushOver, epoch: int) -> pb.Answer:
    """The last word about a grant, as a message."""
    return pb.Answer(
        push_over=pb.PushOver(
            grant=command.grant,
            epoch=epoch,
            reason=command.reason[:REASON_CHARS],
            is_quiet=command.is_quiet,
        )
    )


def pushed_event(pushed: pb.Pushed) -> Pushed:
    """Raises ProtocolError."""
    shards, block_bytes = loans.shards_of(pushed.shards)
    count, rest = divmod(len(pushed.checksums), max(1, len(shards)) * CHECKSUM_BYTES)
    if rest or bool(count) != bool(shards) or count > KEYS_PER_DATAGRAM_MAX:
        raise ProtocolError("a word about pushed blocks whose arrays do not fit each other")
    return Pushed(
        grant=pushed.grant,
        epoch=pushed.epoch,
        first=min(pushed.first, KEYS_PER_DATAGRAM_MAX),
        shards=shards,
        block_bytes=block_bytes,
        checksums=pushed.checksums,
    )


def over_event(over: pb.PushOver) -> PushOver:
    """The last word about a grant, for the engine."""
    return PushOver(over.grant, over.epoch, over.reason[:REASON_CHARS], over.is_quiet)
