"""A Llama with seeded weights, large enough that computing its KV cache takes a while on a GPU.

    python bench/gpu/vllm/model.py FOLDER --size large

Weights are drawn with a large standard deviation that shrinks with the square root of the width, so
that attention is sharp and a wrong KV block shows in the tokens (`kvstore/demo/models.py` says
more). No tokenizer: prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 4096
SEED: Final = 20261121


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Architecture of one size."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    positions: int

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.layers * self.kv_heads * self.head * 2 * element_bytes


SHAPES: Final = {
    # 3 M parameters: engines without a GPU.
    "small": Shape(
        layers=2, hidden=256, intermediate=512, heads=4, kv_heads=2, head=64, positions=4096
    ),
    # Heads of `large` on little else: kernels that are compiled and then interpreted.
    "narrow": Shape(
        layers=1, hidden=256, intermediate=512, heads=16, kv_heads=8, head=128, positions=16384
    ),
    # 0.8 G parameters, 64 KiB of KV per token in bfloat16: 8,000 tokens are 0.5 GiB.
    "large": Shape(
        layers=16, hidden=2048, intermediate=5632, heads=16, kv_heads=8, head=128, positions=16384
    ),
}


def build(folder: Path, size: str) -> Shape:
    """Write configuration and weights; the GPU draws them where there is one."""
    import torch
    from safetensors.torch import save_file

    shape = SHAPES[size]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_configuration(shape), indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(SEED)
    deviation = 0.08 * math.sqrt(256 / shape.hidden)
    weights = {}
    for name, sides in _tensors(shape):
        if len(sides) == 1:
            weights[name] = torch.ones(sides, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(sides, generator=generator, device=device) * deviation
            weights[name] = drawn.to("cpu", torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    return shape


def _configuration(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and sides of each tensor; those with one side are norms."""
    hidden, wide = shape.hidden, shape.intermediate
    queries, pairs = shape.heads * shape.head, shape.kv_heads * shape.head
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        yield f"{layer}input_layernorm.weight", (hidden,)
        for name, rows in (("q", queries), ("k", pairs), ("v", pairs)):
            yield f"{layer}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{layer}self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        yield f"{layer}mlp.gate_proj.weight", (wide, hidden)
        yield f"{layer}mlp.up_proj.weight", (wide, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="large")
    options = parser.parse_args()
    build(options.folder, options.size)


if __name__ == "__main__":
    main()
