"""vLLM's own prefix cache without an engine: what its rules find among blocks that are given."""

from __future__ import annotations

from typing import Any

import numpy as np


class OwnCache:
    """vLLM's coordinator over a real block pool that holds these blocks."""

    def __init__(self, config: Any, cache: Any, *, tokens: int) -> None:
        """`tokens`: of the longest prompt."""
        from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self._cache = cache
        self.alignment, self._unit = resolve_kv_cache_block_sizes(cache, config)
        self._own: Any = get_kv_cache_coordinator(
            self._cache,
            max_model_len=config.model_config.max_model_len,
            max_in_flight_tokens=config.max_in_flight_tokens,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.alignment,
            hash_block_size=self._unit,
        )
        self.keys = [at.to_bytes(32, "little") for at in range(tokens // self._unit)]

    def hit(self, present: dict[int, np.ndarray], tokens_max: int) -> tuple[int, list[int]]:
        """Length of the hit, and the first block of each group that it really takes."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        pool, held = self._own.block_pool, self._own.block_pool.cached_block_hash_to_block
        held._cache.clear()
        for number, group in enumerate(self._cache.kv_cache_groups):
            step = group.kv_cache_spec.block_size // self._unit
            for at in np.flatnonzero(present[number]):
                key: Any = self.keys[(int(at) + 1) * step - 1]
                held.insert(make_block_hash_with_group_id(key, number), pool.blocks[1])
        found, tokens, _ = self._own.find_longest_cache_hit(self.keys, tokens_max)
        firsts = []
        for blocks in found:
            real = [at for at, block in enumerate(blocks) if not block.is_null]
            firsts.append(min(real) if real else len(blocks))
        return tokens, firsts
