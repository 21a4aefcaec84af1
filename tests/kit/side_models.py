"""Models beside one that `kvstore.demo.models` built: draft models with KV heads of another number,
and LoRA adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

RANK: Final = 8
"""Of adapters."""


def build_adapter(directory: Path, target: Path, *, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the model in `target`, with seeded weights that change every
    answer. Returns its directory; files of another seed there are replaced."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text("utf-8"))
    hidden, width = config["hidden_size"], config["head_dim"]
    sizes = {
        "q_proj": config["num_attention_heads"] * width,
        "k_proj": config["num_key_value_heads"] * width,
        "v_proj": config["num_key_value_heads"] * width,
    }
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (RANK, hidden), "lora_B": (size, RANK)}
            for part, shape in shapes.items():
                weights[f"{module}.{part}.weight"] = torch.randn(shape, generator=random) * 0.2
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    settings |= {"target_modules": list(sizes), "base_model_name_or_path": ""}
    (directory / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    save_file(weights, str(directory / "adapter_model.safetensors"))
    return directory


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
