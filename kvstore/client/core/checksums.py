"""Checksums in replies: 16 bytes a slot, zeros where there is nothing to verify, or none at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.messages import LeaseMore, LeaseReply


def all_sent(replies: Sequence[LeaseReply]) -> bool:
    """Whether every slot of these replies has a checksum."""
    for reply in replies:
        checksums = np.frombuffer(reply.checksums, np.uint8).reshape(-1, CHECKSUM_BYTES)
        if 4 * len(checksums) != len(reply.slots) or not checksums.any(axis=1).all():
            return False
    return True


def joined_checksums(replies: Sequence[LeaseReply | LeaseMore]) -> bytes:
    """Checksums of all slots, if any reply has some: 0 where there is nothing to verify."""
    if not any(reply.checksums for reply in replies):
        return b""
    return b"".join(
        reply.checksums or bytes(len(reply.slots) // 4 * CHECKSUM_BYTES) for reply in replies
    )
