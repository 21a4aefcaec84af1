"""Times and sizes of a workload: roofline of a GPU, loads of each tier, what has to be kept.

Prefill is bound by FLOPs (2 a parameter and token, attention beside it) times `mfu`; a decode step
reads the weights and the caches of its batch once at the HBM rate. Rates of loads have no other
latency than `overhead_s`. Measured rates take precedence where they are given.
Does not cover: queues, chunked prefill, communication of ranks, disks that are busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.errors import ConfigError
from kvstore.plan.caches import CacheGroup, Config, number

ENGINE_MEMORY: Final = 0.9
"""vLLM's default `gpu_memory_utilization`."""
GPUS_OF_A_NODE: Final = 8
BUSY_MAX: Final = 0.7
"""Share of time that an engine works, so that queues stay short."""


class Gpu(NamedTuple):
    """Dense rates of a vendor's data sheet, per second."""

    memory_bytes: float
    bf16_flops: float
    fp8_flops: float
    hbm_bytes: float
    pcie_bytes: float
    """One direction."""


GPUS: Final = {
    "A100-80G": Gpu(80e9, 312e12, 312e12, 2.039e12, 32e9),
    "L40S": Gpu(48e9, 362e12, 733e12, 0.864e12, 32e9),
    "H100": Gpu(80e9, 989e12, 1979e12, 3.35e12, 64e9),
    "H200": Gpu(141e9, 989e12, 1979e12, 4.8e12, 64e9),
    "B200": Gpu(180e9, 2250e12, 4500e12, 8e12, 64e9),
}
"""NVIDIA's data sheets (SXM and PCIe 4/5 x16), without sparsity: A100 80 GB SXM, L40S, H100 SXM,
H200 SXM, HGX B200 per GPU. An A100 has no fp8 and computes such weights in bf16."""


class Weights(NamedTuple):
    """Parameters of a model."""

    total: int
    active: int
    """Used by a token."""


def weights_of(config: Config) -> Weights:
    """Estimate: attention, feed-forward, experts and embeddings; recurrent layers count as
    attention. Norms and biases are left out."""
    hidden, layers = number(config, "hidden_size"), number(config, "num_hidden_layers")
    queries = number(config, "num_attention_heads")
    size = number(config, "head_dim", default=0) or hidden // max(queries, 1)
    heads = number(config, "num_key_value_heads", default=queries)
    attention = 2 * hidden * size * (queries + heads)
    if rank := number(config, "kv_lora_rank", default=0):
        rope, value = number(config, "qk_rope_head_dim"), number(config, "v_head_dim")
        key = number(config, "qk_nope_head_dim")
        query_rank = number(config, "q_lora_rank", default=0)
        query = queries * (key + rope)
        attention = query_rank * (hidden + query) if query_rank else hidden * query
        attention += (
            hidden * (rank + rope) + rank * queries * (key + value) + queries * value * hidden
        )
    dense = 3 * hidden * number(config, "intermediate_size", default=0)
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = number(config, *names, default=0)
    each = 3 * hidden * number(config, "moe_intermediate_size", "intermediate_size", default=0)
    used = number(config, "num_experts_per_tok", default=1)
    shared = number(config, "n_shared_experts", default=0)
    plain = number(config, "first_k_dense_replace", default=0) if experts else layers
    ends = 2 * hidden * number(config, "vocab_size")
    total = layers * attention + ends + plain * dense + (layers - plain) * (experts + shared) * each
    active = (
        layers * attention + ends // 2 + plain * dense + (layers - plain) * (used + shared) * each
    )
    return Weights(total, active)


class Workload(NamedTuple):
    """Requests, and the rates at which they are served. Rates in bytes per second."""

    prompt_tokens: int
    reused: float
    """Share of the prompt that an earlier request had."""
    output_tokens: int
    requests_per_s: float
    users: int
    tp: int
    pp: int
    weight_bytes: int
    """Bytes of a parameter."""
    mfu: float
    token_s: float
    """Measured time to compute a token of a prompt; 0: by FLOPs."""
    overhead_s: float
    dram_rate: float
    """Loads of one rank; 0: 80 % of PCIe's."""
    disk_rate: float
    network_rate: float
    host_bytes: float


class TierLoad(NamedTuple):
    """Loads of the reused part of a prompt from one place."""

    name: str
    load_s: float
    breakeven_tokens: int | None
    """From so many tokens on a load is faster than computing; None: never."""


class Plan(NamedTuple):
    """Answers, in bytes, seconds and tokens."""

    groups: list[CacheGroup]
    weights: Weights
    prompt_bytes: int
    sequence_bytes: int
    gpu_sequences: int
    """Sequences that the GPUs of one engine hold at once."""
    working_set_bytes: int
    nodes: int
    """Machines that hold all engines."""
    dram_bytes: int
    """Dram of each node, for its share of the working set; `file_bytes` likewise."""
    file_bytes: int
    token_s: float
    miss_ttft_s: float
    tiers: list[TierLoad]
    prefill_s: float
    decode_s: float
    """Engine time of a request, shared with its batch."""
    engines: int
    prefill_engines: int
    push_s: float
    network_bytes: float
    path: str


def plan(config: Config, groups: list[CacheGroup], gpu: Gpu, work: Workload) -> Plan:
    """The plan of a workload on engines of `tp` × `pp` GPUs.

    Raises:
        ConfigError: the weights or one sequence do not fit.
    """
    weights, ranks = weights_of(config), work.tp * work.pp
    tokens = work.prompt_tokens + work.output_tokens
    sequence = sum(g.sequence_bytes(tokens) for g in groups)
    # A replicated group is on each rank of tensor parallelism.
    allocated = sum(g.sequence_bytes(tokens) * work.tp // g.shards for g in groups)
    room = gpu.memory_bytes * ENGINE_MEMORY * ranks - weights.total * work.weight_bytes
    if room < allocated:
        raise ConfigError(
            f"{weights.total / 1e9:.3g} B parameters and a sequence of {tokens} tokens do not fit"
            f" {ranks} GPUs of {gpu.memory_bytes / 1e9:.3g} GB: raise --tp or --pp"
        )
    token_s = work.token_s or _token_s(config, weights, gpu, work)
    held = int(room // allocated)
    step_s = (weights.total * work.weight_bytes + held * allocated) / gpu.hbm_bytes / ranks
    reused = int(work.prompt_tokens * work.reused)
    prefill_s = (work.prompt_tokens - reused) * token_s
    decode_s = work.output_tokens * step_s / held
    busy = work.requests_per_s * (prefill_s + decode_s) / BUSY_MAX
    engines = max(1, math.ceil(busy))
    prefill = round(engines * prefill_s / (prefill_s + decode_s))
    kept = sum(g.kept_bytes(work.prompt_tokens) for g in groups)
    push_s = sequence_part(groups, work.prompt_tokens) / work.network_rate
    kept_all = work.users * sum(g.kept_bytes(tokens) for g in groups)
    nodes = math.ceil(engines * ranks / GPUS_OF_A_NODE)
    share = math.ceil(kept_all / nodes)
    dram = min(share, int(work.host_bytes / 2))
    return Plan(
        groups=groups,
        weights=weights,
        prompt_bytes=kept,
        sequence_bytes=sequence,
        gpu_sequences=held,
        working_set_bytes=kept_all,
        nodes=nodes,
        dram_bytes=dram,
        file_bytes=share if share > dram else 0,
        token_s=token_s,
        miss_ttft_s=work.overhead_s + work.prompt_tokens * token_s,
        tiers=_tiers(groups, gpu, work, token_s),
        prefill_s=prefill_s,
        decode_s=decode_s,
        engines=engines,
        prefill_engines=min(max(prefill, 1), engines - 1),
        push_s=push_s,
        network_bytes=work.requests_per_s * sequence_part(groups, work.prompt_tokens),
        path=_path(engines, ranks, prefill_s, decode_s, push_s),
    )


def sequence_part(groups: Sequence[CacheGroup], tokens: int) -> int:
    """Bytes that a load of a prefix of so many tokens moves, of all ranks."""
    return sum(group.sequence_bytes(tokens) for group in groups)


def _token_s(config: Config, weights: Weights, gpu: Gpu, work: Workload) -> float:
    flops = gpu.fp8_flops if work.weight_bytes == 1 else gpu.bf16_flops
    queries, hidden = number(config, "num_attention_heads"), number(config, "hidden_size")
    size = number(config, "head_dim", default=0) or hidden // max(queries, 1)
    # Scores and values: 4 a query number and token before it, half of the prompt on average.
    attention = 2 * number(config, "num_hidden_layers") * queries * size * work.prompt_tokens
    return (2 * weights.active + attention) / (flops * work.mfu * work.tp * work.pp)


def _tiers(
    groups: Sequence[CacheGroup], gpu: Gpu, work: Workload, token_s: float
) -> list[TierLoad]:
    reused = int(work.prompt_tokens * work.reused)
    dram = (work.dram_rate or 0.8 * gpu.pcie_bytes) * work.tp * work.pp
    rates = {"dram": dram, "disk": work.disk_rate, "another node": work.network_rate}
    made = []
    for name, rate in rates.items():
        load = work.overhead_s + sequence_part(groups, reused) / rate
        enough = (
            at
            for at in (16 << step for step in range(20))
            if work.overhead_s + sequence_part(groups, at) / rate < at * token_s
        )
        made.append(
            TierLoad(name, load + (work.prompt_tokens - reused) * token_s, next(enough, None))
        )
    return made


def _path(engines: int, ranks: int, prefill_s: float, decode_s: float, push_s: float) -> str:
    if engines * ranks <= GPUS_OF_A_NODE:
        return "one node: all engines fit one machine and share its memory"
    share = prefill_s / (prefill_s + decode_s)
    if 0.25 <= share <= 0.75 and push_s < prefill_s:
        return (
            f"prefill and decode: prefill is {share:.0%} of the work, and a push is shorter than"
            " the prefill that it follows"
        )
    why = "a push is longer than the prefill" if push_s >= prefill_s else f"prefill is {share:.0%}"
    return f"cluster: engines need several machines, and {why}, so one pool of engines serves both"
