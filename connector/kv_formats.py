"""Engine versions that make the same bytes of a KV cache: they share a KV format.

A block outlives an upgrade of the engine only where golden caches show that both versions make the
same bytes (tests/integration/engine/test_kv_format.py). A version or a kind of model that was not
compared stands alone: a cold start, and never a wrong answer. ADR 2 says how a version is added.

Pure. Does not cover: everything else that changes the bytes (`mapping.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.connector.drafts import has_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMATS: Final = {"0.31.0": "vllm-cpu-1", "0.32.0": "vllm-cpu-1"}
"""vLLM version → KV format. A version with a build suffix is another one: not compared."""
ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures that were compared in all versions of a format."""
_ROPES: Final = frozenset({"default", "llama3"})
_DTYPES: Final = frozenset({"torch.float32", "torch.bfloat16", "torch.float16"})
_ISA: Final = "vec/"


def kv_format(version: str, vllm_config: VllmConfig, *, isa: str) -> str:
    """KV format of an engine of this version.

    Args:
        version: of vllm.
        vllm_config: of the engine.
        isa: page order and processor, as in `Space`.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    was_compared = (
        frozenset(model.hf_config.architectures or ("",)) <= ARCHITECTURES
        and (config.get("rope_parameters") or {}).get("rope_type", "default") in _ROPES
        and not config.get("sliding_window")
        and config.get("hidden_act", "silu") == "silu"
        and str(model.dtype) in _DTYPES
        and vllm_config.cache_config.cache_dtype == "auto"
        and model.quantization is None
        and model.model_impl == "auto"
        and not model.model_class_overrides
        and vllm_config.lora_config is None
        and not has_cache(vllm_config)
        and isa.startswith(_ISA)
    )
    alone = f"vllm {version}"
    return FORMATS.get(version, alone) if was_compared else alone
