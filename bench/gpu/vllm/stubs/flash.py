"""In place of vLLM's FlashAttention, `vllm/vllm_flash_attn/` in the packed tree: present, never
chosen. vLLM imports it wherever the platform is CUDA, whatever attention is used."""

from __future__ import annotations

from typing import Any, NoReturn

FA2_AVAILABLE = FA3_AVAILABLE = FA4_AVAILABLE = False


def is_fa_version_supported(*_: Any, **__: Any) -> bool:
    return False


def fa_version_unsupported_reason(*_: Any, **__: Any) -> str:
    return "it is not in this build"


def flash_attn_varlen_func(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("FlashAttention is not in this build")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return flash_attn_varlen_func
