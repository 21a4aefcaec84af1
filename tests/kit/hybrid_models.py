"""Small models that mix kinds of attention: the shapes of Gemma 3, gpt-oss and Qwen3-Next, seeded
weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

WINDOW_TOKENS: Final = {"gemma3": 256, "gpt-oss": 128}
TOKEN_BYTES: Final = {"gemma3": 6 * 1024, "gpt-oss": 4 * 1024, "qwen3-next": 4 * 256}
"""K and V of one token, if all layers had full attention: in float32, of Qwen3-Next in bfloat16."""
STATE_BLOCK_TOKENS: Final = 384
"""Tokens of a block of the shape of Qwen3-Next, with which its attention takes as many bytes as a
state."""


def build_hybrid(directory: Path, tokenizer: Path, *, shape: str, seed: int = 1) -> Path:
    """A model of that shape, with the tokenizer of the model in `tokenizer`. Returns its
    directory."""
    import torch
    from transformers import set_seed

    vocabulary = json.loads((tokenizer / "config.json").read_text("utf-8"))["vocab_size"]
    set_seed(seed)
    model: Any = _MODELS[shape](vocabulary)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # sharp attention: see kvstore.demo.models
                weight.normal_(0.0, 0.08)
            elif "sinks" in name:
                weight.zero_()
    model.save_pretrained(directory)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, directory)
    return directory


_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def _gemma3(vocabulary: int) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON,
            vocab_size=vocabulary,
            intermediate_size=256,
            num_hidden_layers=6,
            num_key_value_heads=2,
            sliding_window=WINDOW_TOKENS["gemma3"],
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
        )
    )


def _gpt_oss(vocabulary: int) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            **_COMMON,
            vocab_size=vocabulary,
            intermediate_size=128,
            num_hidden_layers=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW_TOKENS["gpt-oss"],
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    )


def _qwen3_next(vocabulary: int) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **_COMMON,
            vocab_size=vocabulary,
            intermediate_size=256,
            num_hidden_layers=4,
            num_key_value_heads=1,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        )
    )


_MODELS = {"gemma3": _gemma3, "gpt-oss": _gpt_oss, "qwen3-next": _qwen3_next}
