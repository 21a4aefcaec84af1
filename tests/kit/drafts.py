"""Draft models for a target that `kvstore.demo.models` built, with KV heads of another number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def build_twin(directory: Path, target: Path) -> Path:
    """The model in `target` with each KV head twice: it guesses right for as long as its own cache
    is right. Returns its directory."""
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text("utf-8"))
    heads, width = config["num_key_value_heads"], config["head_dim"]
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            parts = weight.view(heads, width, -1).repeat_interleave(2, dim=0)
            weights[name] = parts.reshape(2 * heads * width, -1).contiguous()
    shutil.copytree(target, directory)
    (directory / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2 * heads}))
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def build_eagle(directory: Path, target: Path, *, seed: int = 1) -> Path:
    """A head that reads the hidden states of the model in `target` (EAGLE), of one layer with one
    KV head and seeded weights: it guesses badly. Returns its directory."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text("utf-8"))
    config |= {"num_hidden_layers": 1, "num_key_value_heads": 1}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    hidden, inner, width = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads = config["num_attention_heads"] * width
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (heads, hidden),
        "layers.0.self_attn.k_proj": (width, hidden),
        "layers.0.self_attn.v_proj": (width, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": torch.randn(*shape, generator=random) * config["initializer_range"]
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, str(directory / "model.safetensors"))
    return directory
