"""The node's answers to a lookup: blocks of each KV cache group that it knows, that a hit needs,
and that are leased, cut into one load job for each group.

Checksums in answers are 16 bytes a slot, zeros where there is nothing to verify, or none at all.
Does not cover: leases (`lookups.py`), the engine's rules (`hits.HitRules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.hits import HitPlan, HitRules, block_keys
from kvstore.client.core.plan import LoadJob
from kvstore.client.core.request import LookupPart, Request
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, Hint, LeaseMore, LeaseReply


def keys_per_ask(shards: int) -> int:
    """Most keys of one LeaseAsk, whose answer has `shards` slots for each key."""
    return max(1, KEYS_PER_DATAGRAM_MAX // shards)


def leading_blocks(parts: Sequence[LookupPart]) -> int:
    """Blocks of the first group that are leased without a gap."""
    leading = 0
    for part in parts:
        if part.group:
            break
        leading += part.found_blocks
        if part.is_short:
            break
    return leading


def needed_blocks(
    plan: HitPlan | None, sizes: Sequence[int], local_tokens: int, end_tokens: int
) -> list[range]:
    """Blocks of each group that a hit which ends at `end_tokens` takes beyond the engine's own; a
    hit with a tail ends within a block. `sizes`: tokens of a block, by group."""
    ranges = []
    for group, size in enumerate(sizes):
        first = 0 if plan is None else plan.first_blocks[group]
        ranges.append(range(max(local_tokens // size, first), -(-end_tokens // size)))
    return ranges


def load_job(
    request: Request, group: int, blocks: range, *, keys: Sequence[bytes], table: Sequence[int]
) -> LoadJob:
    """The job that fills blocks of one group, which the answers about it lease.

    Args:
        request: of the lookup.
        group: number of the group.
        blocks: numbers in the prompt.
        keys: of all blocks of the request.
        table: the engine's blocks of the request.
    """
    parts = [part for part in request.parts if part.group == group]
    replies = [part.reply for part in parts if part.reply is not None]
    begin, end = blocks.start - parts[0].first, blocks.stop - parts[0].first
    assert 0 <= begin < end <= sum(part.found_blocks for part in parts), (begin, end)
    shards = parts[0].shards

    def cut(arrays: list[bytes], size: int) -> bytes:
        return b"".join(arrays)[begin * shards * size : end * shards * size]

    return LoadJob(
        request=request.id,
        lease=parts[0].lease,
        session=request.session,
        block_ids=tuple(table[blocks.start : blocks.stop]),
        keys=b"".join(keys[blocks.start : blocks.stop]),
        slots=cut([r.slots for r in replies], 4),
        generations=cut([r.generations for r in replies], 8),
        checksums=cut([joined_checksums(replies)], CHECKSUM_BYTES),
        group=group,
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


# ── the groups beside the first ──────────────────────────────────────────────────────────────────


def surveys(
    config: SchedulerConfig, request: Request, shard_counts: Sequence[int]
) -> Iterator[Hint]:
    """The hints that ask which blocks of the groups beside the first the node knows."""
    for group in range(1, len(config.block_sizes)):
        names = block_keys(request.sought, config.keys_per_block(group))
        size = max(8, KEYS_PER_DATAGRAM_MAX // shard_counts[group] // 8 * 8)
        for begin in range(0, len(names), size):
            yield Hint(request.tag, b"".join(names[begin : begin + size]), group, begin)


def short_parts(request: Request) -> list[LookupPart]:
    """Questions about the groups beside the first of which not all blocks are leased."""
    return [part for part in request.parts if part.group and part.is_short]


def coming_tokens(request: Request) -> int:
    """Tokens of the blocks on their way that would lengthen the hit."""
    if request.plan is not None:  # without one of these blocks there is no such hit
        short = short_parts(request)
        if any(part.found_blocks + part.promoting < part.count for part in short):
            return 0
        return request.plan.tokens - request.first_block * request.block_tokens if short else 0
    coming = 0
    for part in request.parts:
        coming += part.promoting
        if part.found_blocks + part.promoting < part.count:
            break
    return coming * request.block_tokens


def next_plan(
    rules: HitRules, config: SchedulerConfig, request: Request, tokens_max: int
) -> HitPlan:
    """The longest hit of all groups, by the answers so far: the first group has what its leases
    hold, the others what the node knows, all of them what the engine itself has."""
    local_tokens, key_count = request.first_block * request.block_tokens, len(request.sought)
    present = [
        request.present.resized(group, key_count // config.keys_per_block(group))
        for group in range(len(config.block_sizes))
    ]
    present[0][:] = False
    present[0][: request.first_block + request.found_blocks] = True
    for mask, size in zip(present, config.block_sizes, strict=True):
        mask[: local_tokens // size] = True
    return rules.longest(present, tokens_max=tokens_max)
