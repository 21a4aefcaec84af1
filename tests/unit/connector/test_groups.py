"""The engine's rules over the node's blocks are those over its own blocks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client.core.plan import HitPlan
from kvstore.connector.groups import EngineGroups, served_groups
from tests.kit.own_cache import OwnCache

pytestmark = pytest.mark.engine

KEY = 16
SHAPES = {
    "window": [("window", KEY, 40), ("full", KEY, 0)],
    "windows of two sizes": [("window", KEY, 40), ("window", KEY, 100), ("full", KEY, 0)],
    "gemma3": [("full", KEY, 0), *[("window", KEY, 33)] * 5],
    "blocks of two sizes": [("full", 2 * KEY, 0), ("window", KEY, 50)],
    "longer window blocks": [("full", KEY, 0), ("window", 4 * KEY, 130)],
    "chunks": [("full", KEY, 0), ("chunk", KEY, 5 * KEY)],
    "states": [*[("state", KEY, 0)] * 3, ("full", KEY, 0)],
    "states and windows": [("window", KEY, 40), ("state", KEY, 0), ("full", KEY, 0)],
    "two full": [("full", KEY, 0), ("full", 2 * KEY, 0), ("window", KEY, KEY + 1)],
}


def spec(kind: str, tokens: int, reach: int, heads: int = 1) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    if kind == "state":
        return kinds.MambaSpec(
            block_size=tokens,
            shapes=((4, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    common = {"block_size": tokens, "num_kv_heads": heads, "head_size": 8, "dtype": torch.float32}
    if kind == "full":
        return kinds.FullAttentionSpec(**common)
    if kind == "window":
        return kinds.SlidingWindowSpec(**common, sliding_window=reach)
    return kinds.ChunkedLocalAttentionSpec(**common, attention_chunk_size=reach)


def engine(shape: str, blocks: int = 1000) -> tuple[Any, Any]:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{n}"], spec(*each)) for n, each in enumerate(SHAPES[shape])
        ],
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_match_unit=None, enable_prefix_caching=True, block_size=KEY
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
        model_config=SimpleNamespace(max_model_len=4096),
        max_in_flight_tokens=2048,
    )
    return config, cache


def hit_as_in_the_engine(
    groups: EngineGroups, own: OwnCache, present: dict[int, np.ndarray], tokens_max: int
) -> HitPlan:
    """The longest hit over these blocks: as long and from the same blocks as in the own cache."""
    assert groups.rules is not None
    served = [present[number] for number in groups.served]
    plan = groups.rules.longest(served, tokens_max=tokens_max)
    tokens, firsts = own.hit(present, tokens_max)
    assert plan.tokens == tokens
    for at, number in enumerate(groups.served):
        end = tokens // groups.block_sizes[at]
        assert plan.first_blocks[at] == min(firsts[number], end)
        assert served[at][plan.first_blocks[at] : end].all()
    return plan


@pytest.mark.parametrize("shape", SHAPES)
def test_a_hit_is_as_long_as_in_the_engines_own_cache(shape: str) -> None:
    config, cache = engine(shape)
    groups = EngineGroups(config, cache)
    own, source = OwnCache(config, cache, tokens=40 * KEY), random.Random(20261123)
    lengths = set()
    for _ in range(300):
        density = source.choice((0.5, 0.9, 0.97, 1.0))
        length = source.choice((0, 3, 17, 33, 40))
        present = {}
        for number, group in enumerate(cache.kv_cache_groups):
            size = group.kv_cache_spec.block_size
            flags = [source.random() < density for _ in range(40 * KEY // size)]
            if number == groups.served[0]:
                flags = [at * size < length * KEY for at in range(len(flags))]
            present[number] = np.array(flags)
        tokens_max = source.choice((0, 5, KEY, 10 * KEY - 1, 39 * KEY, 40 * KEY - 1, 40 * KEY))
        plan = hit_as_in_the_engine(groups, own, present, tokens_max)
        lengths.add(plan.tokens)
        if plan.tokens < tokens_max // own.alignment * own.alignment:
            run = int(np.argmin([*present[groups.served[0]], False])) * groups.block_sizes[0]
            limits_it = run // own.alignment * own.alignment == plan.tokens
            assert (plan.lacking_group == 0) == limits_it, (plan, run)
        else:
            assert plan.lacking_group == 0, "nothing is lacked by a hit of all that was asked for"
    assert len(lengths) > 4, lengths


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_left_out_of_stores_shortens_no_hit(shape: str) -> None:
    config, cache = engine(shape)
    groups = EngineGroups(config, cache)
    own = OwnCache(config, cache, tokens=40 * KEY)
    assert groups.rules is not None
    present = {}
    for at, number in enumerate(groups.served):
        count = 40 * KEY // groups.block_sizes[at]
        needed = groups.rules.are_needed(at, 0, count)
        present[number] = np.ones(count, bool) if needed is None else np.array(needed)
    for tokens in range(0, 40 * KEY, own.alignment):
        assert own.hit(present, tokens)[0] == tokens


def test_full_attention_comes_first_and_scratch_is_no_group_of_ours() -> None:
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheGroupSpec

    config, cache = engine("window")
    groups = EngineGroups(config, cache)
    assert groups.served == (1, 0)
    assert groups.tables([[1, 2], [3, 4]]) == ([3, 4], [1, 2])
    ring = CircularBufferSpec(
        block_size=KEY, num_kv_heads=1, head_size=8, dtype=spec("full", KEY, 0).dtype
    )
    cache = replace(
        cache, kv_cache_groups=[KVCacheGroupSpec(["ring"], ring), *cache.kv_cache_groups]
    )
    assert served_groups(cache) == (2, 1)
    assert EngineGroups(config, cache).table_tokens == (0, KEY, KEY)


def test_states_are_stored_where_the_engine_hands_them_over_and_nowhere_else() -> None:
    config, cache = engine("states")
    groups = EngineGroups(config, cache)
    assert groups.served == (3, 0, 1, 2)
    assert groups.table_tokens == (0, 0, 0, KEY), "states are written in place in every step"
    table = [[0, 0, 7, 8], [0, 0, 5, 6], [0, 0, 3, 4], [11, 12, 13, 14]]
    offers = [(0, 7, 3 * KEY), (2, 3, 2 * KEY), (1, 5, 3 * KEY + 1)]
    full, *states = groups.stored_tables(table, offers)
    assert full == table[3]
    assert states == [[0, 0, 7, 0], [0, 0, 0, 0], [0, 3, 0, 0]]
    assert groups.stored_tables(table, ()) == (table[3], *[[0] * 4] * 3)
    assert groups.tables(table) == (table[3], table[0], table[1], table[2])
