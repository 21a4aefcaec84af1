"""Fields of configurations, by the family of `tests/data/recipes.yaml` that has the same layers.

Families without an entry have caches that `kvstore plan` does not know, or numbers that are not
published as fields of a configuration.
"""

from __future__ import annotations

from typing import Any, Final


def dense(layers: int, heads: int = 8, size: int = 128, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": heads,
        "head_dim": size,
    } | more


def windows(pattern: str, heads: int, size: int, tokens: int, **more: Any) -> dict[str, Any]:
    """`pattern`: w for a window, f for full attention."""
    names = {"w": "sliding_attention", "f": "full_attention", "c": "chunked_attention"}
    kinds = {"layer_types": [names[letter] for letter in pattern], "sliding_window": tokens}
    return dense(len(pattern), heads, size) | kinds | more


MLA: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
INDEX: Final = MLA | {"index_topk": 2048, "index_head_dim": 128}
GDN: Final = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
}
KDA: Final = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
NEMOTRON: Final = {
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}


def _linear(layers: int, heads: int, values: int, keys: int) -> dict[str, Any]:
    counts = {"linear_num_value_heads": values, "linear_num_key_heads": keys}
    return dense(layers, heads, 256) | GDN | counts


CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": dense(32),
    "llama-small": dense(28),
    "llama-large": dense(80),
    "qwen-dense": dense(64),
    "qwen-moe": dense(94, 4),
    "full-attention": dense(48),
    "ocr": dense(12, 10),
    "seed-oss": dense(64),
    "minimax-m2": dense(62),
    "glm-4-moe": dense(92),
    "mla": dense(61) | MLA,
    "mla-indexer": dense(61) | INDEX,
    "gemma3": dense(62, 16, sliding_window=1024, sliding_window_pattern=6),
    "gemma4-12b": windows(
        "wwwwwf" * 8, 8, 256, 1024, global_head_dim=512, num_global_key_value_heads=1
    ),
    "gemma4-26b": windows(
        "wwwwwf" * 5, 8, 256, 1024, global_head_dim=512, num_global_key_value_heads=2
    ),
    "gemma4-31b": windows(
        "wwwwwf" * 10, 16, 256, 1024, global_head_dim=512, num_global_key_value_heads=4
    ),
    # 35 and 42 layers, of which the last share the caches of others.
    "gemma4-e2b": windows("wwwwf" * 7, 1, 256, 512, global_head_dim=512, num_kv_shared_layers=20),
    "gemma4-e4b": windows("wwwwwf" * 7, 2, 256, 512, global_head_dim=512, num_kv_shared_layers=18),
    "gpt-oss": windows("wf" * 18, 8, 64, 128),
    "mimo-v2": windows(
        "f" + "wwwwf" * 9 + "ww",
        4,
        192,
        128,
        v_head_dim=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_num_key_value_heads=8,
    ),
    "step-3.5": windows("fwww" * 11 + "f", 8, 128, 512),
    "trinity": windows("wwwf" * 15, 8, 128, 4096),
    "laguna": windows("fwww" * 12, 8, 128, 512),
    "plamo-3": windows("wwwwwwwf" * 4 * 2, 8, 128, 2048),
    "mellum-2": windows("wwwf" * 7, 4, 128, 1024),
    "flint": windows("wwwf" * 12, 8, 128, 513),
    "beam": windows("wwwf" * 15, 8, 128, 512),
    "muse": windows("wwwf" * 12, 8, 128, 1024),
    "llama-4": dense(48, attention_chunk_size=8192),
    "qwen3-next": _linear(48, 2, 32, 16),
    # Heads of keys as the recipe's bytes say.
    "qwen3.5": _linear(64, 4, 48, 24),
    "qwen3.5-moe": _linear(60, 2, 64, 32),
    "qwen3.8": _linear(92, 4, 64, 32),
    "lfm2": dense(16, 8, 64)
    | {
        "hidden_size": 2048,
        "conv_L_cache": 3,
        "layer_types": ["conv"] * 2
        + ["full_attention", "conv", "conv"] * 4
        + ["full_attention"] * 2,
    },
    "nemotron-h": dense(46, 2) | NEMOTRON | {"hybrid_override_pattern": ("MEM-MM*" * 6 + "MMMM")},
    "kimi-linear": dense(27)
    | MLA
    | {"linear_attn_config": KDA | {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}},
    "voxtral": dense(26, sliding_window=8192),
}
