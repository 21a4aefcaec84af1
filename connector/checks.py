"""Which engine configurations this connector serves. All others stop the start and name the flag.

Mistakes of configuration raise here; failures of the node never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.connector.groups import is_full, specs_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class NotServed(Exception):
    """This rank's cache cannot be shared; its text is one sentence for the log."""


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Raises ValueError with one sentence that names the flag to change."""
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    assert transfer is not None, "the base class refuses this"
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            "KVStoreConnector copies from and to the KV cache beside the engine's steps, and sleep "
            "mode unmaps that memory: drop --enable-sleep-mode"
        )
    if cache.prefix_caching_hash_algo != "sha256_cbor":
        raise ValueError(
            "KVStoreConnector shares blocks by hashes that every process can compute: add "
            "--prefix-caching-hash-algo sha256_cbor "
            f"(it is {cache.prefix_caching_hash_algo})"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            "KVStoreConnector recomputes after a failed load: add "
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
            "KVStoreConnector supports engines on one machine only: set --nnodes "
            f"{parallel.nnodes // parallel.nnodes_within_dp} (an engine spans "
            f"{parallel.nnodes_within_dp} machines)"
        )
    _check_images(vllm_config)
    if kv_cache_config is not None:
        _check_groups(vllm_config, kv_cache_config)


def _check_images(vllm_config: VllmConfig) -> None:
    """Refuse images where both caches that make the engine hash them are off: a key names an image
    by its identifier, and without a hash this is a number, the same for another user's image."""
    images = vllm_config.model_config.multimodal_config
    if (
        images is not None
        and images.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ValueError(
            "KVStoreConnector identifies images by a hash of their content, which the engine"
            " does not compute with --mm-processor-cache-gb 0 and --no-enable-prefix-caching"
            " together: drop one of them"
        )


def _check_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    groups, hash_tokens = kv_cache_config.kv_cache_groups, kv_cache_config.hash_block_size
    if len(groups) == 1 and hash_tokens not in (None, groups[0].kv_cache_spec.block_size):
        raise ValueError(
            f"KVStoreConnector stores whole blocks of {groups[0].kv_cache_spec.block_size} tokens, "
            f"but keys are made every {hash_tokens}: drop --prefix-match-unit"
        )
    specs = [spec for group in groups for spec in specs_of(group)]
    _check_kinds(specs, are_several=len(groups) > 1)
    if groups and not any(map(is_full, groups)):
        raise ValueError(
            "KVStoreConnector finds hits by the layers with full attention, and this model has "
            "none: run it without --kv-transfer-config"
        )
    _check_states(specs, hash_tokens, has_drafts=vllm_config.speculative_config is not None)
    speculative = vllm_config.speculative_config
    if len(groups) > 1 and speculative is not None and speculative.use_eagle_block_drop():
        raise ValueError(
            "KVStoreConnector serves drafts that read the model's hidden states (EAGLE, MTP) with "
            f"one KV cache group, this model has {len(groups)}: drop --speculative-config, or run "
            "it without --kv-transfer-config"
        )


def _check_kinds(specs: Sequence[KVCacheSpec], *, are_several: bool) -> None:
    from vllm.v1 import kv_cache_interface as kinds

    # Exactly these: blocks of subclasses, such as sinks, do not hold what the key says. Scratch
    # memory of a request has no keys: a hit begins with none.
    served: set[type] = {kinds.FullAttentionSpec, kinds.MLAAttentionSpec, kinds.CircularBufferSpec}
    if are_several:
        served |= {kinds.SlidingWindowSpec, kinds.SlidingWindowMLASpec}
        served |= {kinds.ChunkedLocalAttentionSpec, kinds.MambaSpec}
    for spec in specs:
        if spec.prefix_replay_tokens:
            raise ValueError(
                "KVStoreConnector serves windows that a hit restores, and this model computes "
                f"the last {spec.prefix_replay_tokens} tokens of a hit again: run it without "
                "--kv-transfer-config"
            )
        if type(spec) not in served:
            raise ValueError(
                "KVStoreConnector serves full attention, alone or beside windows, chunks and "
                f"recurrent layers; this model has {type(spec).__name__}: run it "
                "without --kv-transfer-config"
            )


def _check_states(
    specs: Sequence[KVCacheSpec], hash_tokens: int | None, *, has_drafts: bool
) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    for state in (spec for spec in specs if isinstance(spec, MambaSpec)):
        if has_drafts:
            raise ValueError(
                "KVStoreConnector serves models with recurrent layers without drafts, whose states "
                "hold tokens that may be rejected: drop --speculative-config, or run it without "
                "--kv-transfer-config"
            )
        if state.mamba_cache_mode != "align":
            raise ValueError(
                "KVStoreConnector stores the states that the engine hands over at the end of "
                "blocks: add --enable-prefix-caching and --mamba-cache-mode align (the mode is "
                f"{state.mamba_cache_mode})"
            )
        if hash_tokens not in (None, state.block_size):
            raise ValueError(
                f"KVStoreConnector stores the states of whole blocks of {state.block_size} tokens, "
                f"but keys are made every {hash_tokens}: drop --prefix-match-unit"
            )
