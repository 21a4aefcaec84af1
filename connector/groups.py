"""Engines with several KV cache groups: which are served, in which order, and the engine's rules.

The first group that is served has full attention: the leading run of its blocks bounds every hit.
The rules are vLLM's own coordinator, run over what the node has in place of the engine's blocks, so
that a hit through the node is exactly as long as one in an engine's cache with the same blocks.
Does not cover: leases (`kvstore.client.core`), shapes and layouts (`mapping.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.core.plan import HitPlan, Mask
from kvstore.client.core.stores import NULL_BLOCK
from kvstore.wire.space import FULL_ATTENTION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_NO_BLOCK: Final = None
_BLOCK: Final = object()


def is_full(group: KVCacheGroupSpec) -> bool:
    """Whether all its layers attend to every token before."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    return {type(spec) for spec in specs_of(group)} <= {FullAttentionSpec, MLAAttentionSpec}


def kind_of(group: KVCacheGroupSpec) -> str:
    """The group's kind of attention, as people read it."""
    spec: Any = specs_of(group)[0]
    if is_full(group):
        return FULL_ATTENTION
    if is_state(group):
        return "recurrent state"
    if hasattr(spec, "sliding_window"):
        return f"window of {spec.sliding_window} tokens"
    return f"chunks of {spec.attention_chunk_size} tokens"


def is_state(group: KVCacheGroupSpec) -> bool:
    """Whether its layers are recurrent: a block is their state at its end, and the engine keeps one
    in place of all before it."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return all(isinstance(spec, MambaSpec) for spec in specs_of(group))


def specs_of(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The different kinds of its layers."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return list(iter_layer_specs(group.kv_cache_spec))


def served_groups(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The engine's numbers of the groups whose blocks have keys, those with full attention
    first."""
    groups = kv_cache_config.kv_cache_groups
    ids = kv_cache_config.prefix_cacheable_group_ids
    return tuple(sorted(ids, key=lambda number: not is_full(groups[number])))


class EngineGroups:
    """The groups of one engine, on its scheduler's side."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        groups = kv_cache_config.kv_cache_groups
        self.served = served_groups(kv_cache_config) or (0,)
        self.block_sizes = tuple(int(groups[n].kv_cache_spec.block_size) for n in self.served)
        """Tokens of a block, by group that is served."""
        self.names = tuple(
            f"KV cache group {number}, {kind_of(groups[number])}" for number in self.served
        )
        """Names for people, by group that is served."""
        self.are_several = len(groups) > 1
        self._states = [at for at, number in enumerate(self.served) if is_state(groups[number])]
        stable = {number for at, number in enumerate(self.served) if at not in self._states}
        self.table_tokens = tuple(
            int(group.kv_cache_spec.block_size) if number in stable else 0
            for number, group in enumerate(groups)
        )
        """Tokens of a block, by the engine's groups; 0: its blocks do not stand for certain tokens
        (recurrent states), or have no keys."""
        sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self.alignment, self.key_tokens = sizes
        """Tokens that every hit is a multiple of, and tokens between two keys."""
        self.rules = None
        if len(self.served) > 1:
            self.rules = EngineRules(vllm_config, kv_cache_config, self)

    def tables(self, block_ids: Sequence[list[int]]) -> tuple[list[int], ...]:
        """The tables of the groups that are served, out of those of all groups."""
        return tuple(block_ids[number] for number in self.served)

    def stored_tables(
        self, block_ids: Sequence[list[int]], offers: Sequence[tuple[int, int, int]]
    ) -> tuple[list[int], ...]:
        """As `tables`, for this step's stores: blocks of states are those that the engine hands
        over, never those in its table, which it overwrites in place and moves.

        Args:
            block_ids: tables of a request, by the engine's groups.
            offers: (group, block, tokens at whose end the state is) of that request.
        """
        tables = list(self.tables(block_ids))
        for at in self._states:
            size = self.block_sizes[at]
            tables[at] = [NULL_BLOCK] * len(tables[at])
            for group, block, tokens in offers:
                if group == self.served[at] and tokens % size == 0:
                    tables[at][tokens // size - 1] = block
        return tuple(tables)


class EngineRules:
    """`HitRules` by vLLM's coordinator of KV cache groups."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: EngineGroups
    ) -> None:
        from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

        self._served, self._key_tokens = groups.served, groups.key_tokens
        self._sizes, self._alignment = groups.block_sizes, groups.alignment
        self._known = _KnownBlocks(groups.key_tokens)
        self._coordinator: Any = get_kv_cache_coordinator(
            replace(kv_cache_config, num_blocks=1),
            max_model_len=vllm_config.model_config.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=groups.alignment,
            hash_block_size=groups.key_tokens,
        )
        for manager in self._coordinator.single_type_managers:
            manager.block_pool = self._known

    def longest(self, present: Sequence[Mask], *, tokens_max: int) -> HitPlan:
        """See `HitRules`."""
        for number, mask, size in zip(self._served, present, self._sizes, strict=True):
            self._known.blocks[number] = mask, size // self._key_tokens
        keys_end = max(tokens_max, 0) // self._key_tokens
        run = int(present[0].argmin()) if not present[0].all() else len(present[0])
        bound = min(tokens_max, run * self._sizes[0]) // self._alignment * self._alignment
        names = range(min(keys_end, len(present[0]) * self._sizes[0] // self._key_tokens))
        blocks, tokens, _ = self._coordinator.find_longest_cache_hit(names, max(bound, 0))
        firsts = [
            _first(blocks[number], tokens // size)
            for number, size in zip(self._served, self._sizes, strict=True)
        ]
        lacking = 0
        if tokens < bound:
            _, lengths = self._coordinator.find_longest_cache_hit_per_group(names, bound)
            lacking = min(range(len(firsts)), key=lambda at: lengths[self._served[at]])
        return HitPlan(int(tokens), tuple(firsts), lacking)

    def are_needed(self, group: int, first_block: int, end_block: int) -> Sequence[bool] | None:
        """See `HitRules`."""
        manager = self._coordinator.single_type_managers[self._served[group]]
        mask: list[bool] | None = manager.reachable_block_mask(
            first_block,
            end_block,
            alignment_tokens=self._alignment,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=False,
        )
        return mask


class _KnownBlocks:
    """Stands in for vLLM's block pool, so that its coordinator finds hits in what the node has. A
    "hash" is the number of a key in the prompt."""

    null_block = _NO_BLOCK

    def __init__(self, key_tokens: int) -> None:
        self.hash_block_size = key_tokens
        self.blocks: dict[int, tuple[Mask, int]] = {}
        """By the engine's group: flags of the blocks, keys of each."""

    def get_cached_block(self, name: int, groups: Sequence[int]) -> list[object] | None:
        """A block of each group, or None where one has none."""
        for number in groups:
            mask, keys = self.blocks[number]
            if not mask[(name + 1) // keys - 1]:
                return None
        return [_BLOCK] * len(groups)


def _first(blocks: Sequence[object], end: int) -> int:
    """Index of the first block of the run, without a gap, of needed blocks that ends at `end`."""
    first = end
    while first > 0 and blocks[first - 1] is _BLOCK:
        first -= 1
    return first
