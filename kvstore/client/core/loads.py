"""Leased blocks as load jobs: one for each KV cache group, cut out of the node's answers.

Checksums in answers are 16 bytes a slot, zeros where there is nothing to verify, or none at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.client.core.hits import HitPlan
from kvstore.client.core.lookup import LookupPart
from kvstore.client.core.plan import LoadJob
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.messages import LeaseMore, LeaseReply


def found_blocks(part: LookupPart, shards: int) -> int:
    """Blocks that the answer to one question leases."""
    assert part.reply is not None
    return min(len(part.reply.slots) // (4 * shards), part.count)


def leading_blocks(parts: Sequence[LookupPart], shards: int) -> int:
    """Blocks of the first group that are leased without a gap."""
    leading = 0
    for part in parts:
        if part.group:
            break
        found = found_blocks(part, shards)
        leading += found
        if found < part.count:
            break
    return leading


def needed_blocks(
    plan: HitPlan | None, sizes: Sequence[int], local_tokens: int, end_tokens: int
) -> list[range]:
    """Blocks of each group that a hit which ends at `end_tokens` takes beyond the engine's own.
    `sizes`: tokens of a block, by group."""
    ranges = []
    for group, size in enumerate(sizes):
        first = 0 if plan is None else plan.first_blocks[group]
        ranges.append(range(max(local_tokens // size, first), end_tokens // size))
    return ranges


def load_job(
    parts: Sequence[LookupPart],
    blocks: range,
    *,
    request: str,
    session: int,
    keys: Sequence[bytes],
    table: Sequence[int],
    shards: int,
) -> LoadJob:
    """The job that fills blocks of one group.

    Args:
        parts: answered questions about the group, which lease the blocks.
        blocks: numbers in the prompt.
        request, session: of the lookup.
        keys: of all blocks of the request.
        table: the engine's blocks of the request.
        shards: of the group.
    """
    replies = [part.reply for part in parts if part.reply is not None]
    begin, end = blocks.start - parts[0].first, blocks.stop - parts[0].first
    assert 0 <= begin < end <= sum(found_blocks(part, shards) for part in parts), (begin, end)

    def cut(arrays: list[bytes], size: int) -> bytes:
        return b"".join(arrays)[begin * shards * size : end * shards * size]

    return LoadJob(
        request=request,
        lease=parts[0].lease,
        session=session,
        block_ids=tuple(table[blocks.start : blocks.stop]),
        keys=b"".join(keys[blocks.start : blocks.stop]),
        slots=cut([r.slots for r in replies], 4),
        generations=cut([r.generations for r in replies], 8),
        checksums=cut([joined_checksums(replies)], CHECKSUM_BYTES),
        group=parts[0].group,
    )


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
