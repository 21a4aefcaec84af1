"""Which engine configurations this connector serves. All others stop the start and name the flag.

Mistakes of configuration raise here; failures of the node never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NotServed(msgspec.Struct, frozen=True):
    """This rank's cache cannot be shared; `reason` is one sentence for the log."""

    reason: str


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Raises ValueError with one sentence that names the flag to change."""
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    assert transfer is not None, "the base class refuses this"
    if cache.prefix_caching_hash_algo != "sha256_cbor":
        raise ValueError(
            "KVStoreConnector shares blocks by hashes that every process can compute: add "
            "--prefix-caching-hash-algo sha256_cbor "
            f"(it is {cache.prefix_caching_hash_algo})"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            "KVStoreConnector turns every fault into a recompute: add "
            '"kv_load_failure_policy":"recompute" to --kv-transfer-config '
            f"(it is {transfer.kv_load_failure_policy})"
        )
    for flag, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size != 1:
            raise ValueError(
                "KVStoreConnector stores whole blocks, which context parallelism spreads over "
                f"ranks: set {flag} 1 (it is {size})"
            )
    if parallel.nnodes_within_dp != 1:
        raise ValueError(
            "KVStoreConnector serves engines whose ranks are all on one machine: set --nnodes "
            f"{parallel.nnodes // parallel.nnodes_within_dp} (an engine spans "
            f"{parallel.nnodes_within_dp} machines)"
        )
    _check_images(vllm_config)
    if kv_cache_config is not None:
        _check_groups(kv_cache_config)


def _check_images(vllm_config: VllmConfig) -> None:
    """A key names an image by its identifier. Without either cache the engine numbers images
    instead: the first of another user would be found under the key of this one's."""
    images = vllm_config.model_config.multimodal_config
    if (
        images is not None
        and images.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ValueError(
            "KVStoreConnector finds images by a hash of their content, which the engine does not "
            "make with --mm-processor-cache-gb 0 and --no-enable-prefix-caching together: drop one "
            "of them"
        )


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs

    groups = kv_cache_config.kv_cache_groups
    hash_tokens = kv_cache_config.hash_block_size
    if groups and hash_tokens not in (None, groups[0].kv_cache_spec.block_size):
        raise ValueError(
            f"KVStoreConnector stores whole blocks of {groups[0].kv_cache_spec.block_size} tokens, "
            f"but keys are made every {hash_tokens}: drop --prefix-match-unit"
        )
    if len(groups) > 1:
        raise ValueError(
            f"KVStoreConnector serves models with one KV cache group, this one has {len(groups)}: "
            "try --disable-hybrid-kv-cache-manager, or run it without --kv-transfer-config"
        )
    # Exactly these: subclasses keep windows or sinks, whose blocks do not hold what the key says.
    for spec in iter_layer_specs(groups[0].kv_cache_spec) if groups else ():
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            raise ValueError(
                "KVStoreConnector serves full attention only, this model has "
                f"{type(spec).__name__}: run it without --kv-transfer-config"
            )
