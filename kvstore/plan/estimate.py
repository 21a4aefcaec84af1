"""Times and sizes of a workload: roofline of a GPU, loads of each tier, what has to be kept.

Prefill is bound by FLOPs (2 a parameter and token, attention beside it) times `mfu`; a decode step
reads the weights and the caches of its batch once at the HBM rate. Rates of loads have no other
latency than `overhead_ms`. Measured rates take precedence where they are given.
Does not cover: queues, chunked prefill, communication of ranks, disks that are busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kvstore.errors import ConfigError
from kvstore.plan.caches import CacheGroup, Config, cache_groups, number
from kvstore.units import US_PER_S

ENGINE_MEMORY: Final = 0.9
"""vLLM's default `gpu_memory_utilization`."""
GPUS_OF_A_NODE: Final = 8
BUSY_MAX: Final = 0.7
"""Highest share of time that an engine works, so that queues stay short."""
PCIE_SHARE: Final = 0.8
"""Share of PCIe's rate that loads from dram reach, unless measured."""
NUMBER_BYTES: Final = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}


class Gpu(NamedTuple):
    """Dense rates of a vendor's data sheet, per second."""

    memory_bytes: float
    bf16_flops: float
    fp8_flops: float
    hbm_bytes: float
    pcie_bytes: float
    """Rate in one direction."""


GPUS: Final = {
    "A100-80G": Gpu(80e9, 312e12, 312e12, 2.039e12, 32e9),
    "L40S": Gpu(48e9, 362e12, 733e12, 0.864e12, 32e9),
    "H100": Gpu(80e9, 989e12, 1979e12, 3.35e12, 64e9),
    "H200": Gpu(141e9, 989e12, 1979e12, 4.8e12, 64e9),
    "B200": Gpu(180e9, 2250e12, 4500e12, 8e12, 64e9),
}
"""NVIDIA's data sheets (SXM and PCIe 4/5 x16), without sparsity: A100 80 GB SXM, L40S, H100 SXM,
H200 SXM, HGX B200 per GPU. An A100 has no fp8 and computes such weights in bf16."""


class Workload(NamedTuple):
    """Requests, engines and rates: the flags of `kvstore plan`. Sizes in bytes, rates per second;
    None: the GPU's data sheet has the value.
    """

    gpu: str
    gpu_memory: int | None
    flops: float | None
    """TFLOP/s."""
    tp: int
    pp: int
    kv_dtype: str
    weight_dtype: str
    mtp: int
    """Draft tokens of speculative decoding with the model's own layers."""
    prompt_tokens: int
    output_tokens: int
    reused: float
    """Share of a prompt that an earlier request had, 0 to 1."""
    requests_per_s: float
    users: int
    host_memory: int
    dram_rate: int | None
    """Bytes per second that one rank loads from dram."""
    disk_rate: int
    network: int
    mfu: float
    token_us: float
    """Measured microseconds to compute a token of a prompt; 0: estimated by FLOPs."""
    overhead_ms: float


def plan(config: Config, work: Workload) -> dict[str, Any]:
    """The plan of a workload on engines of `tp` × `pp` GPUs, as `--json` prints it: bytes, seconds
    and tokens.

    Raises:
        ConfigError: no language model's configuration; the weights or one sequence do not fit.
    """
    kv_bytes = NUMBER_BYTES[work.kv_dtype]
    groups = cache_groups(config, kv_bytes=kv_bytes, tp=work.tp, draft_tokens=work.mtp)
    gpu, ranks = GPUS[work.gpu], work.tp * work.pp
    memory_bytes = work.gpu_memory or gpu.memory_bytes
    total, active = parameters_of(config)
    weight_bytes = total * NUMBER_BYTES[work.weight_dtype]
    tokens = work.prompt_tokens + work.output_tokens
    # A replicated group is on each rank of tensor parallelism.
    allocated = sum(g.sequence_bytes(tokens) * work.tp // g.shards for g in groups)
    room = memory_bytes * ENGINE_MEMORY * ranks - weight_bytes
    if room < allocated:
        raise ConfigError(
            f"{total / 1e9:.3g} B parameters and a sequence of {tokens} tokens do not fit"
            f" {ranks} GPUs of {memory_bytes / 1e9:.3g} GB: raise --tp or --pp"
        )
    held = int(room // allocated)
    step_s = (weight_bytes + held * allocated) / gpu.hbm_bytes / ranks
    token_s = work.token_us / US_PER_S or _token_s(config, active, work)
    prefill_s = (work.prompt_tokens - int(work.prompt_tokens * work.reused)) * token_s
    decode_s = work.output_tokens * step_s / held
    engines = max(1, math.ceil(work.requests_per_s * (prefill_s + decode_s) / BUSY_MAX))
    prefill_share = prefill_s / (prefill_s + decode_s)
    nodes = math.ceil(engines * ranks / GPUS_OF_A_NODE)
    pushed = loaded_bytes(groups, work.prompt_tokens)
    push_s = pushed / work.network
    working_set = work.users * sum(g.kept_bytes(tokens) for g in groups)
    share = math.ceil(working_set / nodes)
    dram = min(share, work.host_memory // 2)
    return {
        "groups": [group._asdict() for group in groups],
        "weights": {"total": total, "active": active},
        "prompt_bytes": sum(g.kept_bytes(work.prompt_tokens) for g in groups),
        "sequence_bytes": loaded_bytes(groups, tokens),
        "gpu_sequences": held,
        "working_set_bytes": working_set,
        "nodes": nodes,
        "dram_bytes": dram,
        "file_bytes": share if share > dram else 0,
        "token_s": token_s,
        "miss_ttft_s": work.overhead_ms / 1000 + work.prompt_tokens * token_s,
        "tiers": _tiers(groups, token_s, work),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "engines": engines,
        "prefill_engines": min(max(round(engines * prefill_share), 1), engines - 1),
        "push_s": push_s,
        "network_bytes": work.requests_per_s * pushed,
        "path": _path(engines * ranks, prefill_share, is_push_long=push_s >= prefill_s),
    }


def loaded_bytes(groups: Sequence[CacheGroup], tokens: int) -> int:
    """Bytes that all ranks together move to load a prefix of this many tokens."""
    return sum(group.sequence_bytes(tokens) for group in groups)


def _head_size(config: Config) -> tuple[int, int]:
    """(number of query heads, size of one)."""
    heads = number(config, "num_attention_heads")
    usual = number(config, "hidden_size") // max(heads, 1)
    return heads, number(config, "head_dim", default=0) or usual


def parameters_of(config: Config) -> tuple[int, int]:
    """(all parameters, those that a token uses). Estimate: attention, feed-forward, experts and
    embeddings; recurrent layers count as attention. Norms and biases are left out."""
    its, (queries, size) = partial(number, config), _head_size(config)
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


def _token_s(config: Config, active: int, work: Workload) -> float:
    gpu, (queries, size) = GPUS[work.gpu], _head_size(config)
    sheet = gpu.fp8_flops if work.weight_dtype == "fp8" else gpu.bf16_flops
    flops = work.flops * 1e12 if work.flops else sheet
    # Scores and values: 4 a query number and token before it, half of the prompt on average.
    attention = 2 * number(config, "num_hidden_layers") * queries * size * work.prompt_tokens
    return (2 * active + attention) / (flops * work.mfu * work.tp * work.pp)


def _tiers(groups: Sequence[CacheGroup], token_s: float, work: Workload) -> list[dict[str, Any]]:
    """For each place that blocks are loaded from: seconds until the first token with the reused
    part of a prompt loaded, and the tokens from which on a load is faster than computing; None:
    never.
    """
    dram = (work.dram_rate or PCIE_SHARE * GPUS[work.gpu].pcie_bytes) * work.tp * work.pp
    rates = {"dram": dram, "disk": work.disk_rate, "another node": work.network}
    reused = int(work.prompt_tokens * work.reused)
    computed_s = (work.prompt_tokens - reused) * token_s
    counts, made = [16 << step for step in range(20)], []
    for name, rate in rates.items():
        loads_s = [
            work.overhead_ms / 1000 + loaded_bytes(groups, n) / rate for n in [reused, *counts]
        ]
        pays = (n for n, load_s in zip(counts, loads_s[1:], strict=True) if load_s < n * token_s)
        least = next(pays, None)
        made.append({"name": name, "load_s": loads_s[0] + computed_s, "breakeven_tokens": least})
    return made


def _path(gpus: int, prefill_share: float, *, is_push_long: bool) -> str:
    if gpus <= GPUS_OF_A_NODE:
        return "one node: all engines fit one machine and share its memory"
    prefill = f"prefill is {prefill_share:.0%}"
    if 0.25 <= prefill_share <= 0.75 and not is_push_long:
        why = "of the work, and a push is shorter than the prefill that it follows"
        return f"prefill and decode: {prefill} {why}"
    why = "a push is longer than the prefill" if is_push_long else prefill
    return f"cluster: engines need several machines, and {why}, so one pool of engines serves both"
