"""Caches by a configuration: equal to vLLM's own specifications; what is not known is refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.plan import cache_groups
from tests.unit.connector import recipes
from tests.unit.plan.configs import CONFIGS, GDN, KDA, MLA, NEMOTRON, dense

EQUAL = 157
"""Recipes of 180, whose bytes a token plan knows."""
STATES = {"lfm2", "nemotron-h", "kimi-linear"}
"""Families whose recipe has an assumed size of the state: vLLM's own shapes decide below."""


def _planned(name: str, **flags: Any) -> Counter[tuple[bool, int, int]]:
    """(is a state, bytes, tokens of its window) of a layer → layers."""
    found: Counter[tuple[bool, int, int]] = Counter()
    for group in cache_groups(CONFIGS[name], **flags):
        size = 0 if group.is_state and name in STATES else group.layer_bytes
        found[group.is_state, size, group.tokens_max] += group.layers
    return found


def _of_vllm(name: str) -> Counter[tuple[bool, int, int]]:
    found: Counter[tuple[bool, int, int]] = Counter()
    for spec in recipes.layer_specs(recipes.families()[name]).values():
        if hasattr(spec, "shapes"):
            words = zip(spec.shapes, spec.dtypes, strict=True)
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in words)
            found[True, 0 if name in STATES else size, 0] += 1
            continue
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", 0)
        found[False, spec.page_size_bytes // spec.block_size, window or 0] += 1
    return found


@pytest.mark.engine
def test_bytes_are_those_of_vllm() -> None:
    fp8 = {"mla-indexer": {"kv_bytes": 1}}
    wrong = {
        name: (_planned(name, **fp8.get(name, {})), _of_vllm(name))
        for name in CONFIGS
        if _planned(name, **fp8.get(name, {})) != _of_vllm(name)
    }
    assert wrong == {}
    known = [recipe for recipe, family in recipes.models().items() if family in CONFIGS]
    assert len(known) == EQUAL


@pytest.mark.engine
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("drafts", [0, 2])
def test_states_are_those_of_vllm(tp: int, drafts: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    base = dense(4) | {"layer_types": ["linear_attention"] * 4, "num_nextn_predict_layers": 1}
    mamba = base | {"layer_types": ["mamba"] * 4}
    one = {"hidden_size": 4096, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
    kda = Shapes.kda_state_shape(tp, 32, 128, num_spec=drafts)
    linear = Shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4, drafts)
    cases = [
        (base | GDN, linear, (2, 4)),
        (base | {"linear_attn_config": KDA}, kda, (2, 4)),
        (mamba | NEMOTRON, Shapes.mamba2_state_shape(tp, 4096, 8, 64, 64, 128, 4, drafts), (2, 2)),
        (base | {"layer_types": ["conv"] * 4, "conv_L_cache": 3},
         Shapes.short_conv_state_shape(tp, 4096, 3, drafts), (2,)),
    ]  # fmt: skip
    if not drafts:
        cases.append((mamba | one, Shapes.mamba1_state_shape(tp, 8192, 16, 4), (2, 2)))
    for config, shapes, sizes in cases:
        state = next(g for g in cache_groups(config, tp=tp, draft_tokens=drafts) if g.is_state)
        expected = sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))
        assert state.layer_bytes == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no num_hidden_layers"),
        (dense(0), "0 layers"),
        (dense(10**9), "1000000000 layers"),
        (dense(4) | {"num_hidden_layers": "4"}, "'4'"),
        (dense(4) | {"num_key_value_heads": -1}, "-1"),
        (dense(2) | {"layer_types": ["full_attention", "quantum"]}, "'quantum' are not known"),
        (dense(4) | {"layer_types": ["full_attention"]}, "1 kinds of layers for 4"),
        (dense(4) | {"compress_ratios": [4]}, "compress_ratios are not known"),
        (dense(4) | {"kv_lora_rank": 512}, "no qk_rope_head_dim"),
        (dense(4, 3), "cannot be split over --tp 2"),
    ],
)
def test_what_is_missing_or_absurd_is_one_sentence(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cache_groups(config, tp=2)


def test_replicated_heads_and_latents_are_kept_once() -> None:
    (heads,) = cache_groups(dense(32, 4), tp=8)
    assert (heads.layer_bytes, heads.shards) == (2 * 128 * 2, 4)
    (latent,) = cache_groups(dense(61) | MLA, tp=8)
    assert (latent.layer_bytes, latent.shards) == (1152, 1)
