"""The node's answers to a lookup: blocks of each KV cache group that it knows, that a hit needs,
and that are leased, cut into one load job for each group.

Checksums in answers are 16 bytes a slot, zeros where there is nothing to verify, or none at all.
Does not cover: leases (`lookups.py`), the engine's rules (`hits.HitRules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.hits import HitPlan, HitRules, block_keys
from kvstore.client.core.lookup import Lookup, LookupPart
from kvstore.client.core.plan import LoadJob
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, Hint, LeaseMore, LeaseReply


def keys_per_ask(shards: int) -> int:
    """Most keys of one LeaseAsk, whose answer has so many shards for each."""
    return max(1, KEYS_PER_DATAGRAM_MAX // shards)


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
    """Blocks of each group that a hit which ends at `end_tokens` takes beyond the engine's own; a
    hit with a tail ends within a block. `sizes`: tokens of a block, by group."""
    ranges = []
    for group, size in enumerate(sizes):
        first = 0 if plan is None else plan.first_blocks[group]
        ranges.append(range(max(local_tokens // size, first), -(-end_tokens // size)))
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


# ── the groups beside the first ──────────────────────────────────────────────────────────────────


def surveys(
    config: SchedulerConfig, lookup: Lookup, keys: Sequence[bytes], shard_counts: Sequence[int]
) -> Iterator[Hint]:
    """The hints that ask which blocks of these groups the node knows."""
    for group in range(1, len(config.block_sizes)):
        names = block_keys(keys, config.keys_per_block(group))
        size = max(8, KEYS_PER_DATAGRAM_MAX // shard_counts[group] // 8 * 8)
        for begin in range(0, len(names), size):
            yield Hint(lookup.tag, b"".join(names[begin : begin + size]), group, begin)


def short_parts(lookup: Lookup, found: Callable[[LookupPart], int]) -> list[LookupPart]:
    """Questions about these groups of which not all blocks are leased."""
    return [part for part in lookup.parts if part.group and found(part) < part.count]


def coming_tokens(lookup: Lookup, block_tokens: int, found: Callable[[LookupPart], int]) -> int:
    """Tokens of the blocks on their way that would lengthen the hit."""
    if lookup.plan is not None:  # without one of these blocks there is no such hit
        short = short_parts(lookup, found)
        if any(found(part) + part.promoting < part.count for part in short):
            return 0
        return lookup.plan.tokens - lookup.first_block * block_tokens if short else 0
    coming = 0
    for part in lookup.parts:
        coming += part.promoting
        if found(part) + part.promoting < part.count:
            break
    return coming * block_tokens


def next_plan(
    rules: HitRules, config: SchedulerConfig, lookup: Lookup, *, key_count: int, tokens_max: int
) -> HitPlan:
    """The longest hit of all groups, by the answers so far: the first group has what its leases
    hold, the others what the node knows, all of them what the engine itself has."""
    local_tokens = lookup.first_block * config.block_tokens
    present = [
        lookup.present.resized(group, key_count // config.keys_per_block(group))
        for group in range(len(config.block_sizes))
    ]
    present[0][:] = False
    present[0][: lookup.first_block + lookup.found_blocks] = True
    for mask, size in zip(present, config.block_sizes, strict=True):
        mask[: local_tokens // size] = True
    return rules.longest(present, tokens_max=tokens_max)
