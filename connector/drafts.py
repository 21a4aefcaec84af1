"""The draft model of speculative decoding, whose cache lies beside the model's in every block.

Layers of a draft model are stored and loaded with the others: they are part of the space, with a
digest of the draft model. A draft that reads the model's hidden states (EAGLE, MTP) computes the
entry of a token from the next ones, too, so the last entries of a block depend on tokens that its
key does not hold: a block is stored when those tokens are known, and a hit leaves its last block
out, as the engine's own cache does.

Pure. Does not cover: digests of weights (`weights.py`), the space (`mapping.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.connector.checks import NotServed

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_CACHELESS: Final = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})
_SERVED: Final = frozenset({"draft_model", "eagle", "eagle3", "mtp"})


def has_cache(vllm_config: VllmConfig) -> bool:
    """Whether the engine drafts with a model that has a cache of its own."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in _CACHELESS


def models_of(vllm_config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
    """The model, and the draft model if its cache is served, each with the way it is loaded."""
    models = [(vllm_config.model_config, vllm_config.load_config)]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in _SERVED:
        load = speculative.draft_load_config or vllm_config.load_config
        models.append((speculative.draft_model_config, load))
    return models


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Tokens past a block on which its last draft entries depend; 0: none."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return 0
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def draft_layers(vllm_config: VllmConfig, names: Sequence[str]) -> frozenset[str]:
    """The draft model's layers among `names`, those that own memory; empty without such a model.
    Raises NotServed."""
    speculative = vllm_config.speculative_config
    if speculative is None or not has_cache(vllm_config):
        return frozenset()
    if speculative.method not in _SERVED:
        raise NotServed(f"the cache of a draft model of method {speculative.method} is not known")
    end = int(vllm_config.model_config.get_total_num_hidden_layers())
    found = frozenset(name for name in names if _is_drafts(name, end))
    if not found or len(found) == len(names):
        raise NotServed("the names of the layers do not show which are the draft model's")
    return found


def _is_drafts(name: str, layer_end: int) -> bool:
    """Whether the layer of this name is the draft model's: these have a prefix of their own, or are
    numbered from `layer_end` on, behind the model's."""
    if name.startswith("draft_model.") or "mtp" in name:
        return True
    number = re.search(r"\d+", name)
    return number is not None and int(number[0]) >= layer_end
