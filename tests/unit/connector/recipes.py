"""KV cache groups that vLLM makes of the models in `tests/data/recipes.yaml`.

`python -m tests.unit.connector.recipes` writes them to `tests/data/groups.json`, with what the
connector says of each. Does not cover: draft models, layouts and streams of GPUs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import yaml

from kvstore.connector.checks import check_engine

DATA: Final = Path(__file__).parents[2] / "data"
RECIPES: Final = DATA / "recipes.yaml"
GROUPS: Final = DATA / "groups.json"
_BLOCK_TOKENS: Final = 16
_LATENT_BLOCK_TOKENS: Final = 256
"""Of models with MLA caches, whose kernels want large blocks."""
_CONTEXT: Final = 65536


def families() -> dict[str, dict[str, str]]:
    """By name: where a structure is from, its layers, its kinds of layers."""
    found: dict[str, dict[str, str]] = yaml.safe_load(RECIPES.read_text())["families"]
    return found


def models() -> dict[str, str]:
    """Recipe → family, of those that generate text."""
    recipes = yaml.safe_load(RECIPES.read_text())["recipes"]
    return {recipe: family for family, its in recipes.items() for recipe in its}


def letters(layers: str) -> str:
    """The kinds of all layers: `2*(wf) w` is wfwfw."""
    return re.sub(r"(\d+)\*\((\w+)\)", lambda m: m[2] * int(m[1]), layers).replace(" ", "")


def layer_specs(family: dict[str, str]) -> dict[str, Any]:
    """vLLM's specification of each layer's cache, by the layer's name."""
    kinds = {kind: family[kind] for kind in dict.fromkeys(letters(family["layers"]))}
    is_latent = any(text.startswith("mla") for text in kinds.values())
    tokens = _LATENT_BLOCK_TOKENS if is_latent else _BLOCK_TOKENS
    state_bytes = max((_numbers(k)[0] for k in kinds.values() if k.startswith("state")), default=0)
    page_bytes = 0
    if state_bytes:
        # As the engine does: blocks of attention are made as large as a state, and states padded.
        main = next(text for text in kinds.values() if text.startswith(("full", "mla")))
        one = _spec(main, 1, 0).page_size_bytes
        tokens = -(-state_bytes // one // tokens) * tokens
        page_bytes = tokens * one
    return {
        f"layers.{number}": _spec(kinds[kind], tokens, page_bytes)
        for number, kind in enumerate(letters(family["layers"]))
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()[1:]]


def _spec(text: str, tokens: int, page_bytes: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    kind, numbers = text.split()[0], _numbers(text)
    if kind in ("state", "scratch"):
        words = numbers[0] // 2
        if kind == "state":
            return kinds.MambaSpec(
                block_size=tokens,
                shapes=((words,),),
                dtypes=(torch.bfloat16,),
                page_size_padded=page_bytes,
                mamba_cache_mode="align",
            )
        return kinds.CircularBufferSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=words // 16,
            head_size_v=0,
            dtype=torch.bfloat16,
            page_size_padded=page_bytes or None,
        )
    common = {"block_size": tokens, "num_kv_heads": 1, "dtype": torch.bfloat16}
    if kind in ("mla", "window_mla", "replay"):
        return _latent(kind, numbers, common)
    common |= {"num_kv_heads": numbers[0], "head_size": numbers[1]}
    if kind == "window":
        return kinds.SlidingWindowSpec(**common, sliding_window=numbers[2])
    if kind == "chunk":
        return kinds.ChunkedLocalAttentionSpec(**common, attention_chunk_size=numbers[2])
    if kind == "reference":
        return kinds.RSWASpec(**common, rswa_window=numbers[2])
    if kind == "cross":
        return kinds.CrossAttentionSpec(**common)
    assert kind == "full", text
    return kinds.FullAttentionSpec(**common)


def _latent(kind: str, numbers: list[int], common: dict[str, Any]) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    size, *more = numbers
    window = more.pop(0) if kind != "mla" else 0
    if more and more[0] == 1:
        common["dtype"] = torch.uint8
    common |= {"head_size": size, "tokens_per_state": more[1] if len(more) > 1 else 1}
    if kind == "mla":
        return kinds.MLAAttentionSpec(**common)
    is_replayed = kind == "replay"
    return kinds.SlidingWindowMLASpec(**common, sliding_window=window, bounded_replay=is_replayed)


def engine(family: dict[str, str]) -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config) as far as the connector reads them.

    Raises whatever vLLM raises on structures that it cannot group.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import KVCacheConfig

    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # since 0.33
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    specs = layer_specs(family)
    is_packed = family.get("layout") == "packed"
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_match_unit=None,
            enable_prefix_caching=True,
            block_size=max(s.block_size for s in specs.values()),
            prefix_caching_hash_algo="sha256_cbor",
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=is_packed),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            nnodes_within_dp=1,
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(
            max_model_len=_CONTEXT, multimodal_config=None, enable_sleep_mode=False
        ),
        speculative_config=None,
        attention_config=None,
        max_in_flight_tokens=8192,
    )
    groups = get_kv_cache_groups(config, specs)
    cache = KVCacheConfig(num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=groups)
    _, cache.hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    return config, cache


def answer(family: dict[str, str]) -> dict[str, Any]:
    """Groups of a structure: kind, layers, tokens and bytes of a block; and why it is refused."""
    config, cache = engine(family)
    refused = ""
    try:
        check_engine(config, cache)
    except ValueError as error:
        refused = str(error)
    return {
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "layers": len(group.layer_names),
                "block_tokens": group.kv_cache_spec.block_size,
                "block_bytes": _block_bytes(group),
            }
            for group in cache.kv_cache_groups
        ],
        "refused": refused,
    }


def _block_bytes(group: Any) -> int:
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is None:
        return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
    return sum(int(specs[name].page_size_bytes) for name in group.layer_names)


def main() -> None:
    """Write the golden data."""
    found = {name: answer(family) for name, family in families().items()}
    GROUPS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
