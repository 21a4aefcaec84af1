"""What the connector's worker side needs of vLLM, on a machine without it: modules and values.

The values are those of vLLM 0.32 for Llama-3-8B in bfloat16 on one rank. Where vLLM is installed,
its own modules are used.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

LAYERS, HEADS, TOKENS, HEAD = 32, 8, 16, 128
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
LAYOUT = "LBHNC"
_OTHER_SPECS = (
    *("MLAAttentionSpec", "MambaSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    *("ChunkedLocalAttentionSpec", "CircularBufferSpec"),
)


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    """vLLM's, as far as the connector looks."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any


class Layer:
    """Of attention."""

    isa = "vec"

    @staticmethod
    def get_attn_backend() -> Any:
        return SimpleNamespace(get_name=lambda: "FLASH_ATTN")


class HfConfig:
    architectures = ("LlamaForCausalLM",)

    @staticmethod
    def to_dict() -> dict[str, Any]:
        return {"hidden_size": 4096, "dtype": "bfloat16"}


class CacheConfig(SimpleNamespace):
    """vLLM's KVCacheConfig."""

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.kv_cache_groups)))


def install() -> None:
    """The modules, unless vLLM has them."""
    if importlib.util.find_spec("vllm") is not None:
        return

    def module(name: str, **content: Any) -> None:
        sys.modules[name] = made = ModuleType(name)
        vars(made).update(content, __path__=[])

    module("vllm", __version__="0.32.0")
    for name in ("vllm.v1", "vllm.v1.core", "vllm.utils"):
        module(name)
    module(
        "vllm.v1.kv_cache_interface",
        FullAttentionSpec=FullAttentionSpec,
        iter_layer_specs=lambda spec: [spec],
        **{name: type(name, (), {}) for name in _OTHER_SPECS},
    )
    module("vllm.utils.hashing", get_hash_fn_by_name=lambda name: name)
    module("vllm.v1.core.kv_cache_utils", resolve_none_hash_seed=lambda _: "0")


def configs(block_count: int, engine_id: str, nonce: str) -> tuple[Any, Any]:
    """VllmConfig and KVCacheConfig of an engine with so many blocks."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec as Spec

    model = SimpleNamespace(
        model="/bench",
        seed=0,
        revision=None,
        dtype=torch.bfloat16,
        quantization=None,
        quantization_config=None,
        model_impl="auto",
        model_class_overrides=None,
        disable_sliding_window=False,
        max_model_len=8192,
        hf_config=HfConfig(),
        multimodal_config=None,
        get_total_num_kv_heads=lambda: HEADS,
        get_total_num_hidden_layers=lambda: LAYERS,
        use_mla=False,
    )
    vllm_config = SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor"),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        instance_id=nonce,
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        lora_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context={name: Layer() for name in NAMES}
        ),
    )
    spec = Spec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.bfloat16)
    cache_config = CacheConfig(
        num_blocks=block_count,
        kv_cache_groups=[SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)],
        kv_cache_layout=LAYOUT,
        hash_block_size=TOKENS,
        kv_tp_replicas=1,
    )
    return vllm_config, cache_config
