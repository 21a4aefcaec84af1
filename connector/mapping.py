"""A vllm engine's configuration and cache in kvstore's terms: space and shard.

Pure: reads objects, opens no file (the weights' digest is an argument). Models that cannot be
distinguished for certain are not served: a cold cache is cheap, a wrong one is not. Code that
depends on the engine's version is here and in `vllm.py` alone.

**The draft model** of speculative decoding has its cache beside the model's in every block. Its
layers are stored and loaded with the others: they are part of the space, with a digest of the draft
model. A draft that reads the model's hidden states (EAGLE, MTP) computes the entry of a token from
the next ones, too, so the last entries of a block depend on tokens that its key does not hold: a
block is stored when those tokens are known, and a hit leaves its last block out, as the engine's
own cache does.

**A KV format** is shared by engine versions that make the same bytes of a KV cache. A block
outlives an upgrade of the engine only where golden caches show that both versions make the same
bytes (tests/integration/engine/test_kv_format.py). A version or a kind of model that was not
compared stands alone: a cold start, and never a wrong answer. ADR 2 says how a version is added.

Does not cover: digests of weights (`weights.py`).
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvstore.connector.checks import NotServed
from kvstore.connector.groups import is_state, kind_of, served_groups, specs_of
from kvstore.types import Shard
from kvstore.wire.messages import PROTOCOL_VERSION
from kvstore.wire.space import Group, Space, name_group, shard_bytes

if TYPE_CHECKING:
    import torch
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from kvstore.connector.config import ConnectorConfig


_NOT_THE_MODEL = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a model's configuration about its origin, name or decoding, or with a field of their own
in Space."""
_OF_IMAGES = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Settings for processing and encoding of images: a key holds a hash of the image itself and of the
request's options, but not of these."""


LAYOUTS = ("LBHNC", "BLHNC", "LBNHC", "BLNHC")
"""KV cache layouts in which a block of a layer is one run of bytes."""


class RankPart(msgspec.Struct, frozen=True):
    """A rank's part of the model."""

    shard: Shard
    layer_count: int
    """Layers of the whole model."""
    head_count: int
    """KV heads of the whole model; their greatest common divisor where layers differ."""


class GroupLayers(NamedTuple):
    """The caches of a KV cache group, by layer."""

    caches: Mapping[str, torch.Tensor]
    uncompared: Collection[int]
    """Layers, by their place in the order, that shadow checks leave out: their bytes may differ for
    the same key."""


def hello_fields(config: ConnectorConfig, vllm_config: VllmConfig) -> dict[str, Any]:
    """Fields that the Hellos of all processes of an engine share."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    return {
        "protocol": PROTOCOL_VERSION,
        "engine_id": transfer.engine_id,
        "nonce": vllm_config.instance_id or "0",
        "tenant": config.tenant,
    }


def layers_in_order(kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the layers that own memory, by the numbers in their names. A layer that shares
    another's cache is not listed."""

    def numbers(name: str) -> tuple[list[int], str]:
        return [int(number) for number in re.findall(r"\d+", name)], name

    owners: dict[int, str] = {}
    for name in sorted(kv_caches, key=numbers):
        owners.setdefault(kv_caches[name].data_ptr(), name)
    return list(owners.values())


def page_order(caches: Iterable[torch.Tensor], block_count: int) -> str:
    """Orders of the bytes of a page that caches have other than [head][token][content], as one
    text; empty if all have that one. `devices.cache_pages` must have found pages in the caches."""
    orders: dict[str, None] = {}
    for cache in caches:
        if cache.shape[1] > 1 and cache.shape[0] != block_count:
            orders[f"in kernel blocks of {cache.shape[2]} tokens"] = None
        if not cache[0].is_contiguous():
            axes = sorted(range(1, 4), key=lambda axis: -cache.stride(axis))
            orders["as " + "".join("BHNC"[axis] for axis in axes)] = None
    return ", ".join(orders)


def grouped(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """The caches by layer of each group that is served, in that order. Groups share the memory of
    their layers: a block belongs to one of them at a time. Raises NotServed."""
    names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    owned = {cache.data_ptr() for name, cache in kv_caches.items() if name in names}
    if any(cache.data_ptr() not in owned for cache in kv_caches.values()):
        raise NotServed("layers outside of the KV cache groups have a cache")
    return [
        {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        for group in (kv_cache_config.kv_cache_groups[n] for n in served_groups(kv_cache_config))
    ]


def describe(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    weights: Sequence[str],
    group: int = 0,
) -> tuple[Group, GroupLayers]:
    """A KV cache group whose caches have pages (`devices.cache_pages`), in the terms of the attach
    protocol, and its caches.

    Args:
        vllm_config, kv_cache_config: of this rank.
        kv_caches: by layer, as of `grouped`.
        weights: digests of the weights of `models_of` the engine.
        group: number of the group, as of `grouped`.

    Raises:
        NotServed: the model cannot be distinguished for certain.
    """
    names = layers_in_order(kv_caches)
    _check_layout(vllm_config, kv_cache_config)
    drafts = draft_layers(vllm_config, names)
    caches = {name: kv_caches[name] for name in names}
    heads = {name: int(cache.shape[1]) for name, cache in caches.items()}
    number = served_groups(kv_cache_config)[group]
    of = kv_cache_config.kv_cache_groups[number]
    if is_state(of):
        part = state_part(vllm_config, of, heads)
    else:
        part = part_of(vllm_config, kv_cache_config, heads, drafts=drafts)
    if order := page_order(caches.values(), kv_cache_config.num_blocks):
        part = _as_one_head(part)
    held = part.shard.head_end - part.shard.head_begin
    sizes = tuple(c.nbytes // kv_cache_config.num_blocks // held for c in caches.values())
    if len(set(sizes)) > 1 and part.layer_count != len(names):
        raise NotServed("its layers differ in size, and those of other pipeline stages are hidden")
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in names]
    is_packed = all(cache.device.type == "cpu" for cache in caches.values())
    isa = _machine() if is_state(of) else _each(map(_isa, layers))
    if not is_packed:
        isa = "cuda"  # its backends do not pack pages for a processor
    elif not is_state(of) and "" in map(_isa, layers):
        raise NotServed("the attention backend does not say how it packs its pages")
    spec = of.kv_cache_spec
    space = Space(
        **_settings(vllm_config, kv_cache_config, int(spec.block_size), caches, layers, isa=isa),
        kv_layout=f"{kv_cache_config.kv_cache_layout} {order}".strip(),
        weights=weights[0],
        draft=_draft_digest(vllm_config, weights[-1]) if drafts else "",
        group=_group_digest(kv_cache_config, of, names),
        layer_count=part.layer_count,
        kv_head_count=part.head_count,
        head_bytes=sizes if len(set(sizes)) > 1 else sizes[:1],
    )
    volatile = drafts if lookahead_tokens(vllm_config) else ()
    uncompared = frozenset(at for at, name in enumerate(names) if name in volatile)
    group_of_rank = Group(space, part.shard, shard_bytes(space, part.shard))
    return group_of_rank, GroupLayers(kv_caches, uncompared)


def _settings(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_tokens: int,
    caches: Mapping[str, torch.Tensor],
    layers: Sequence[Any],
    *,
    isa: str,
) -> dict[str, Any]:
    """Fields of the space that do not depend on the rank's part of the model."""
    import vllm

    model, cache_config = vllm_config.model_config, vllm_config.cache_config
    types = _each(cache.dtype for cache in caches.values())
    return {
        "model": model_digest(model),
        "dtype": str(model.dtype),
        "kv_dtype": f"{cache_config.cache_dtype} as {types}",
        "quantization": str(model.quantization or ""),
        "attention_backend": _each(layer.get_attn_backend().get_name() for layer in layers),
        "isa": isa,
        "block_tokens": block_tokens,
        "hash_block_tokens": int(kv_cache_config.hash_block_size or block_tokens),
        "hash_algorithm": str(cache_config.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(cache_config.prefix_caching_hash_algo),
        "kv_format": kv_format(vllm.__version__, vllm_config, isa=isa),
    }


def _each(values: Iterable[object]) -> str:
    """Different values, in order, as one text."""
    return ", ".join(dict.fromkeys(map(str, values)))


def part_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    heads: Mapping[str, int],
    *,
    drafts: frozenset[str] = frozenset(),
) -> RankPart:
    """Which layers and KV heads of the model a rank holds.

    Ranks are numbered stage by stage, and within a stage by the heads they hold. With fewer KV
    heads than ranks, consecutive ones hold the same head; so they do with MLA, whose latent vector
    counts as one head. Parts that do not add up to the model are not served.

    Args:
        vllm_config: of this rank.
        kv_cache_config: of this rank.
        heads: KV heads in each of its layers that own memory, in order.
        drafts: layers of the draft model.

    Raises NotServed.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    names, ranks = list(heads), parallel.tensor_parallel_size
    models = [each for each, _ in models_of(vllm_config)]
    totals, alike = [], set()
    for name, held in heads.items():
        of = models[-1] if name in drafts else model
        # A single rank holds all heads, and layers may differ in their number.
        total = held if ranks == 1 else 1 if of.use_mla else int(of.get_total_num_kv_heads())
        replicas = max(1, ranks // total)
        # The engine itself says how many ranks are alike for MLA only; elsewhere it says 1.
        agrees = kv_cache_config.kv_tp_replicas in (1, replicas)
        if not agrees or ranks % replicas or ranks // replicas * held != total:
            raise NotServed(
                f"each of {ranks} ranks holds {held} of {total} KV heads of {name}, which does not "
                "say which"
            )
        totals.append(total)
        alike.add(replicas)
    if len(alike) != 1:
        raise NotServed("some of its layers have their KV heads on several ranks, others do not")
    (replicas,) = alike
    heads_total = math.gcd(*totals)
    head_count = heads_total * replicas // ranks
    head_begin = parallel.rank % ranks // replicas * head_count
    layer_begin, layers_total = 0, len(names)
    if parallel.pipeline_parallel_size > 1:
        layer_begin, layer_end = model.get_layers_start_end_indices(parallel)
        layers_total = int(model.get_total_num_hidden_layers())
        numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in names]
        if numbers != [[number] for number in range(layer_begin, layer_end)]:
            raise NotServed(
                "the layers of this pipeline stage do not each have a cache of their own, so their "
                "place in the model is not known"
            )
    return RankPart(
        shard=Shard(layer_begin, layer_begin + len(names), head_begin, head_begin + head_count),
        layer_count=layers_total,
        head_count=heads_total,
    )


def _as_one_head(part: RankPart) -> RankPart:
    """The part with its heads counted as one, for bytes in which heads have no places of their own.
    Ranks of another parallel size then have another space."""
    begin, end = part.shard.head_begin, part.shard.head_end
    held = end - begin
    shard = msgspec.structs.replace(
        part.shard, head_begin=begin // held, head_end=begin // held + 1
    )
    return msgspec.structs.replace(part, shard=shard, head_count=part.head_count // held)


def state_part(
    vllm_config: VllmConfig, group: KVCacheGroupSpec, heads: Mapping[str, int]
) -> RankPart:
    """As `part_of`, of a group of recurrent layers: a state is bytes in an order that only its
    layer knows, and the part of one rank counts as one head. Raises NotServed."""
    parallel = vllm_config.parallel_config
    alike = {bool(spec.tp_replicated) for spec in specs_of(group)}
    if len(alike) != 1 or set(heads.values()) != {1}:
        raise NotServed("its recurrent layers are not shared by ranks in one way")
    total = 1 if alike == {True} else parallel.tensor_parallel_size
    begin = parallel.rank % total
    return RankPart(
        shard=Shard(0, len(heads), begin, begin + 1), layer_count=len(heads), head_count=total
    )


def model_digest(model: ModelConfig) -> str:
    """Digest (hex) of the model's computation, the weights aside.

    Not vllm's own `compute_hash`: that is equal in all processes of an engine, but differs with the
    model's path and with settings that leave the KV cache alone.
    """
    config = _without(model.hf_config.to_dict())
    parts = {
        "config": config,
        "architecture": model.hf_config.architectures,
        "implementation": str(model.model_impl),
        "sliding window off": bool(model.disable_sliding_window),
        "quantization": model.quantization_config,
        "classes": model.model_class_overrides,
    }
    if "longrope" in str(config) or "dynamic" in str(config):
        parts["context"] = model.max_model_len  # these scale positions by the context's length
    if (images := model.multimodal_config) is not None:
        parts["images"] = {name: getattr(images, name) for name in _OF_IMAGES}
    text = msgspec.json.encode(parts, order="deterministic", enc_hook=repr)
    return hashlib.sha256(text).hexdigest()


def _without(config: Any) -> Any:
    """A configuration, at every depth, without the keys that are not the model's."""
    if isinstance(config, Mapping):
        return {
            str(key): _without(value) for key, value in config.items() if key not in _NOT_THE_MODEL
        }
    if isinstance(config, list | tuple):
        return [_without(value) for value in config]
    return config


def _group_digest(kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec, names: list[str]) -> str:
    """`Space.group`: kind and digest of a group's layers; empty for the only one."""
    if len(kv_cache_config.kv_cache_groups) == 1:
        return ""
    kinds = []
    for spec in specs_of(group):
        reach = [getattr(spec, name, 0) for name in ("sliding_window", "attention_chunk_size")]
        states = [str(getattr(spec, name, "")) for name in ("mamba_type", "shapes", "dtypes")]
        kinds.append((type(spec).__name__, reach, states))
    digest = hashlib.sha256(msgspec.json.encode((kinds, names))).hexdigest()
    return name_group(kind_of(group), digest)


def _draft_digest(vllm_config: VllmConfig, weights: str) -> str:
    """Digest (hex) of the draft model: its computation, weights and lookahead."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    model = speculative.draft_model_config
    parts = (
        speculative.method,
        lookahead_tokens(vllm_config),
        model_digest(model),
        str(model.dtype),
        str(model.quantization or ""),
        weights,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _check_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    layout, groups = kv_cache_config.kv_cache_layout, len(kv_cache_config.kv_cache_groups)
    if layout not in LAYOUTS:
        raise NotServed(f"the KV cache layout is {layout}, not {' or '.join(LAYOUTS)}")
    if groups > 1 and vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise NotServed(f"the layers of {groups} KV cache groups are on several pipeline stages")


def _isa(layer: Any) -> str:
    """Page order of a CPU backend, and its processor; empty if the layer hides the order.

    MLA layers hide it, which costs nothing: vllm's reference MLA for CPUs turns prefix caching
    off, because it cannot continue a prefix that it did not compute.
    """
    isa = getattr(layer, "isa", None)
    if not isinstance(isa, str) or not isa:
        return ""
    return f"{isa}/{_machine()}"


def _machine() -> str:
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()}/{platform.machine()}"


def _hash_seed(algorithm: str) -> str:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


# ── the draft model ───────────────────────────────────────────────────────────────────────────────

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


# ── KV formats ────────────────────────────────────────────────────────────────────────────────────

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
