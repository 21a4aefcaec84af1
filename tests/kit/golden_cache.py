"""KV caches that the installed vLLM makes of fixed weights and a fixed prompt, without kvstore.

    python -m tests.kit.golden_cache FOLDER [CASE ...]

Writes one file per case that this processor can compare, and vLLM's version: of the first two
blocks of all layers, as they lie in a slot, every 61st value. Another order of heads, tokens, K or
V, or another computation, shows in them; files are small. Weights and prompt are drawn by numpy, so
they change with no version of torch. For another vLLM than the installed: PYTHONPATH=ITS_FOLDER.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

STEP: Final = 61
PROMPT_TOKENS, BLOCK_TOKENS, BLOCKS = 300, 128, 2
_LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: Final[dict[str, tuple[str, str, dict[str, object]]]] = {
    "llama3-float32": ("llama", "float32", {"rope_parameters": _LLAMA3}),
    "llama-bfloat16": ("llama", "bfloat16", {}),
    "llama-float16": ("llama", "float16", {}),
    "llama-float32": ("llama", "float32", {}),
    "mistral-float32": ("mistral", "float32", {"sliding_window": None}),
    "qwen2-float32": ("qwen2", "float32", {}),
    "qwen3-float32": ("qwen3", "float32", {}),
}
"""Model type, type of values, and what its configuration has beside the sizes."""


def build(folder: Path, kind: str, extra: dict[str, object]) -> None:
    """A model of two layers with weights from a fixed seed."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="float32",
        **extra,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    draws = np.random.default_rng(1)
    weights = {
        name: torch.from_numpy(
            (draws.standard_normal(its.shape) * 0.16 + (its.dim() == 1)).astype(np.float32)
        )
        for name, its in sorted(model.state_dict().items())
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(folder)


def cache_of(folder: Path, dtype: str) -> NDArray[np.uint8] | None:
    """[layer][block][page bytes] u8 of the prompt's full blocks; None: this processor packs pages
    in an order that was not compared."""
    import torch
    import vllm

    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=16,
        seed=0,
    )
    prompt = np.random.default_rng(2).integers(1, 256, PROMPT_TOKENS).tolist()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    runner: Any = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    (attention, *_) = runner.vllm_config.compilation_config.static_forward_context.values()
    if attention.isa != "vec":
        return None
    layers = runner.kv_caches
    (used, *_) = ([n for n, its in enumerate(layer) if its.any()] for layer in layers)
    pages = [layer[n].contiguous().view(torch.uint8).numpy() for layer in layers for n in used]
    count = len(used)
    assert count == BLOCKS + 1, "the prompt's blocks, of which the last is not full"
    return np.stack([page.ravel() for page in pages]).reshape(len(layers), count, -1)[:, :BLOCKS]


def sample(cache: NDArray[np.uint8], dtype: str) -> NDArray[np.uint8]:
    """What a file has of it."""
    size = 4 if dtype == "float32" else 2
    return np.ascontiguousarray(cache.reshape(-1, size)[::STEP]).ravel()


def main(folder: Path, names: list[str]) -> None:
    """Write these cases."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version").write_text(vllm.__version__)
    for name in names or list(CASES):
        kind, dtype, extra = CASES[name]
        with tempfile.TemporaryDirectory() as model:
            build(Path(model), kind, extra)
            cache = cache_of(Path(model), dtype)
        if cache is not None:
            (folder / name).write_bytes(sample(cache, dtype).tobytes())
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    main(Path(sys.argv[1]), sys.argv[2:])
