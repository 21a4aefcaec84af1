"""Blocks of the KV cache groups beside the first: which the node knows, which a hit needs.

Pure. Does not cover: leases of them (`lookups.py`), the engine's rules (`hits.HitRules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.hits import HitPlan, HitRules, block_keys
from kvstore.client.core.lookup import Lookup, LookupPart
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, Hint


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
