"""Caches and parameters of a model, from its config.json: sizes for `kvstore plan` (pure).

`layer_kinds` has the kind of each layer, in order ("full", "window", …); `cache_groups` has the
same, summed by kind, with sizes as vLLM allocates them. Field names are those of transformers'
configurations; sizes of recurrent states are those of vLLM's `MambaStateShapeCalculator`. Layers of
an unknown kind are refused.

Does not cover: padding of states to blocks, encoders, draft models with their own configuration;
times and numbers of machines (`kvstore.cli.plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kvstore.errors import ConfigError

# ── caches ────────────────────────────────────────────────────────────────────────────────────────

Config = Mapping[str, Any]
_LAYERS_MAX, _NUMBER_MAX = 1000, 1 << 40
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_NAMES: Final = {
    "full": "full_attention attention global_attention * full",
    "window": "sliding_attention sliding_window window",
    "chunk": "chunked_attention chunk",
    "linear": "linear_attention linear",
    "mamba": "mamba M",
    "conv": "conv",
    "": "- E mlp moe",
}
"""Kind of a layer's cache → its names in configurations; "": the layer has no cache."""
_KINDS: Final = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_OWN_FIELDS: Final = {
    "full": ("global_", "num_global_key_value_heads"),
    "window": ("swa_", "swa_num_key_value_heads"),
}
"""Kind of layers → (prefix of their size fields, field with their count of heads), where they
differ.
"""
_UNKNOWN: Final = ("compress_ratios", "rswa_window", "attention_sink_replay")
"""Fields of models whose caches have forms that are not known here: refused."""


class CacheGroup(NamedTuple):
    """Layers whose caches have the same form."""

    kind: str
    layers: int
    layer_bytes: int
    """Bytes of a layer on one rank: per token, or for the state of a sequence."""
    tokens_max: int
    """Most tokens of a sequence that are needed, as in a window or chunk; 0: all."""
    is_state: bool
    shards: int
    """Ranks that hold different bytes; others replicate them, and kvstore stores them once."""

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes in all ranks that one sequence of this many tokens needs to be continued."""
        used = 1 if self.is_state else min(tokens, self.tokens_max or tokens)
        return self.layers * self.layer_bytes * self.shards * used

    def kept_bytes(self, tokens: int) -> int:
        """Bytes that kvstore keeps of such a sequence: of windows all tokens, so that each prefix
        can hit.
        """
        return self._replace(tokens_max=0).sequence_bytes(tokens)


def text_config(config: Config) -> Config:
    """The language model's part of a configuration."""
    for name in _NESTED:
        if isinstance(inner := config.get(name), Mapping):
            return text_config(inner)
    return config


def number(config: Config, *names: str, default: int | None = None) -> int:
    """The first of these fields that is set.

    Raises:
        ConfigError: absent without a default, or no sensible number.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < _NUMBER_MAX:
            raise ConfigError(f"config.json: {name} is {value!r}: expected a whole number")
        return value
    if default is None:
        raise ConfigError(f"config.json has no {' or '.join(names)}: is it a language model's?")
    return default


def layer_kinds(config: Config) -> list[str]:
    """Kind of each layer's cache: full, window, chunk, linear, mamba, conv, or "" for none."""
    count = number(config, "num_hidden_layers", "n_layer", "num_layers")
    if not 0 < count <= _LAYERS_MAX:
        raise ConfigError(f"config.json: {count} layers: expected 1 to {_LAYERS_MAX}")
    named = config.get("layer_types") or config.get("layers_block_type")
    named = config.get("hybrid_override_pattern") or named or _by_rule(config, count)
    kinds = [str(kind) for kind in named]
    unknown = [f"caches with {name}" for name in _UNKNOWN if config.get(name)]
    unknown += [f"layers of kind {kind[:40]!r}" for kind in kinds if kind not in _KINDS]
    if unknown:
        raise ConfigError(
            f"config.json: {unknown[0]} are not known to plan: run the model, then 'kvstore inspect"
            " spaces' shows its sizes"
        )
    if len(kinds) != count:
        raise ConfigError(f"config.json: {len(kinds)} kinds of layers for {count} layers")
    kept = count - number(config, "num_kv_shared_layers", default=0)
    return [_KINDS[kind] for kind in kinds[:kept]]


def _by_rule(config: Config, count: int) -> list[str]:
    if period := number(config, "attn_layer_period", default=0):  # Jamba
        at = number(config, "attn_layer_offset", default=0)
        return ["full" if i % period == at else "mamba" for i in range(count)]
    if isinstance(linear := config.get("linear_attn_config"), Mapping):  # Kimi, counted from one
        full = set(linear.get("full_attn_layers") or ())
        return ["full" if i + 1 in full else "linear" for i in range(count)]
    other, period = "linear", number(config, "full_attention_interval", default=0)
    if not period and config.get("attention_chunk_size"):
        other, period = "chunk", 4  # Llama 4
    if not period and config.get("sliding_window") and config.get("use_sliding_window", True):
        pattern = number(config, "sliding_window_pattern", "_sliding_window_pattern", default=0)
        other, period = "window", pattern or count + 1
    return [other if period and (i + 1) % period else "full" for i in range(count)]


def cache_groups(
    config: Config, *, kv_bytes: int = 2, tp: int = 1, draft_tokens: int = 0
) -> list[CacheGroup]:
    """Groups of a language model's configuration (`text_config`).

    Args:
        kv_bytes: of a number in the cache: 4, 2 or, with fp8, 1.
        tp: ranks of tensor parallelism.
        draft_tokens: of speculative decoding with the model's own MTP layers; 0: off.
    """
    kinds = layer_kinds(config)
    if draft_tokens:
        kinds += ["full"] * number(config, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    made: list[CacheGroup] = []
    for kind, layers in Counter(kinds).items():
        if kind in ("linear", "mamba", "conv"):
            size = _state_bytes(config, kind, tp, draft_tokens)
            made.append(CacheGroup("recurrent state", layers, size, 0, True, tp))
        elif kind == "full" and config.get("kv_lora_rank"):
            made += _latent(config, layers, kv_bytes)
        elif kind:
            made.append(_heads(config, kind, layers, kv_bytes=kv_bytes, tp=tp))
    return made


def _heads(config: Config, kind: str, layers: int, *, kv_bytes: int, tp: int) -> CacheGroup:
    its = partial(number, config)
    prefix, counts = _OWN_FIELDS.get(kind, ("", "num_key_value_heads"))
    queries = its("num_attention_heads", "n_head")
    usual = 1 if config.get("multi_query") else queries
    heads = its(counts, "num_key_value_heads", default=usual)
    size = its(f"{prefix}head_dim", "head_dim", default=0)
    size = size or its("hidden_size", "n_embd") // max(queries, 1)
    value_size = its(f"{prefix}v_head_dim", "v_head_dim", default=size)
    if not heads or not size or max(heads, tp) % min(heads, tp):
        raise ConfigError(f"{heads} KV heads of size {size} cannot be split over --tp {tp}")
    tokens, name = 0, "full attention"
    if kind != "full":
        tokens = its("sliding_window" if kind == "window" else "attention_chunk_size")
        name = f"{kind} of {tokens} tokens"
    held = max(heads // tp, 1) * (size + value_size) * kv_bytes
    return CacheGroup(name, layers, held, tokens, False, min(tp, heads))


def _latent(config: Config, layers: int, kv_bytes: int) -> list[CacheGroup]:
    """Groups of MLA layers: one latent vector per token, on every rank. DeepSeek V3.2's sparse
    attention has an index of 128 numbers and a scale beside it; its fp8 vector has scales and the
    rope part in bf16.
    """
    rank = number(config, "kv_lora_rank")
    rope = number(config, "qk_rope_head_dim")
    size, made = (rank + rope) * kv_bytes, []
    if number(config, "index_topk", default=0):
        size = rank + rank // 128 * 4 + rope * 2 if kv_bytes == 1 else size
        index = number(config, "index_head_dim")
        made = [CacheGroup("index of MLA", layers, index + index // 128 * 4, 0, False, 1)]
    return [CacheGroup("latent (MLA)", layers, size, 0, False, 1), *made]


def _state_bytes(config: Config, kind: str, tp: int, draft_tokens: int) -> int:
    """Bytes of a sequence's recurrent state in one layer, on one rank; its convolution has 2 bytes
    per number.
    """
    its, kda = partial(number, config), config.get("linear_attn_config")
    dtype = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype"))
    wide = 4 if "32" in dtype else 2
    if kind == "conv":  # LFM2
        width, kernel, state = its("hidden_size"), its("conv_L_cache"), 0
    elif kind == "linear" and isinstance(kda, Mapping):
        heads, size = number(kda, "num_heads"), number(kda, "head_dim")
        width, kernel, wide = 3 * heads * size, number(kda, "short_conv_kernel_size"), 4
        state = heads * size * size
    elif kind == "linear":  # gated delta net
        size, keys = its("linear_value_head_dim"), its("linear_key_head_dim")
        values = its("linear_num_value_heads") * size
        width = 2 * its("linear_num_key_heads") * keys + values
        kernel, state = its("linear_conv_kernel_dim"), values * keys
    elif config.get("mamba_d_state") and not config.get("mamba_n_heads"):  # Mamba 1
        width = its("mamba_expand") * its("hidden_size")
        kernel, state = its("mamba_d_conv"), width * its("mamba_d_state")
    else:
        size = its("mamba_num_heads", "mamba_n_heads") * its("mamba_head_dim", "mamba_d_head")
        inner, groups = its("ssm_state_size", "mamba_d_state"), its("n_groups", "mamba_n_groups")
        width = size + 2 * inner * (groups if groups % tp == 0 else tp)
        kernel, state = its("conv_kernel", "mamba_d_conv"), size * inner
    if width % tp or state % tp:
        raise ConfigError(f"the recurrent layers cannot be split over --tp {tp}")
    return width // tp * (kernel - 1 + draft_tokens) * 2 + state // tp * wide


def loaded_bytes(groups: Sequence[CacheGroup], tokens: int) -> int:
    """Bytes that all ranks together move to load a prefix of this many tokens."""
    return sum(group.sequence_bytes(tokens) for group in groups)


# ── parameters ────────────────────────────────────────────────────────────────────────────────────


def head_size(config: Config) -> tuple[int, int]:
    """(number of query heads, size of one)."""
    heads = number(config, "num_attention_heads")
    usual = number(config, "hidden_size") // max(heads, 1)
    return heads, number(config, "head_dim", default=0) or usual


def parameters_of(config: Config) -> tuple[int, int]:
    """(all parameters, those that a token uses). Estimate: attention, feed-forward, experts and
    embeddings; recurrent layers count as attention. Norms and biases are left out."""
    its, (queries, size) = partial(number, config), head_size(config)
    hidden, layers = its("hidden_size"), its("num_hidden_layers")
    attention = 2 * hidden * size * (queries + its("num_key_value_heads", default=queries))
    if rank := its("kv_lora_rank", default=0):
        rope, value, key = its("qk_rope_head_dim"), its("v_head_dim"), its("qk_nope_head_dim")
        query, query_rank = queries * (key + rope), its("q_lora_rank", default=0)
        attention = query_rank * (hidden + query) if query_rank else hidden * query
        attention += hidden * (rank + rope) + rank * queries * (key + value)
        attention += queries * value * hidden
    experts = its("num_experts", "n_routed_experts", "num_local_experts", default=0)
    plain = its("first_k_dense_replace", default=0) if experts else layers
    dense = 3 * hidden * its("intermediate_size", default=0)
    expert = 3 * hidden * its("moe_intermediate_size", "intermediate_size", default=0)
    mixed, end = (layers - plain) * expert, hidden * its("vocab_size")
    always = layers * attention + plain * dense + end
    always += mixed * its("n_shared_experts", default=0)
    return always + mixed * experts + end, always + mixed * its("num_experts_per_tok", default=1)
