"""`kvstore plan`: sizes, times and numbers of machines for a workload, from a model's config.json.

Prefill is bound by FLOPs (2 a parameter and token, attention beside it) times `mfu`; a decode step
reads the weights and the caches of its batch once at the HBM rate. Rates of loads have no other
latency than `overhead_ms`. Measured rates take precedence where they are given.

Does not cover: sizes of caches and parameters (`kvstore.plan`); queues, chunked prefill,
communication of ranks, disks that are busy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from kvstore import plan as model
from kvstore.cli.commands import Number, Whole, option, options
from kvstore.config.settings import Settings
from kvstore.errors import ConfigError
from kvstore.units import GIB, MIB, US_PER_S, format_size, format_us, parse_size

_FILE_BYTES_MAX: Final = 4 << 20


def read_config(path: Path) -> model.Config:
    """The language model's part of a config.json, or of the one in a directory.

    Raises:
        ConfigError: no such file, or no JSON object.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}: name a config.json") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object: name a model's config.json")
    return model.text_config(found)


# ── workload ──────────────────────────────────────────────────────────────────────────────────────

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


def _size(text: str) -> int:
    """Bytes of a size of at least 1 MiB: less is a number without its unit. Raises
    click.BadParameter.
    """
    try:
        if (size_bytes := parse_size(text)) >= MIB:
            return size_bytes
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    raise click.BadParameter(f"{text!r} is less than 1 MiB: give it with its unit, such as 6GB")


_of: Final = partial(option, show_default=True)
_size_of: Final = partial(_of, type=_size, metavar="SIZE")
_COUNT: Final = Whole(1, 1 << 30)
_RATE: Final = Number(1e-6, 1e9)
_TIME: Final = Number(0)


class Workload(Settings):
    """Settings of `kvstore plan`: requests, engines and rates. Sizes in bytes, rates per second;
    None: the GPU's data sheet has the value.
    """

    gpu: str = _of(type=click.Choice(list(GPUS)), default="H100")("")
    gpu_memory: int | None = _size_of()("In place of the GPU's.")
    flops: float | None = _of(type=_RATE)("Dense TFLOP/s, in place of the GPU's.")
    tp: int = _of(type=_COUNT, default=1)("Tensor parallelism.")
    pp: int = _of(type=_COUNT, default=1)("Pipeline parallelism.")
    kv_dtype: str = _of(type=click.Choice(list(NUMBER_BYTES)), default="bf16")("")
    weight_dtype: str = _of(type=click.Choice(["bf16", "fp8"]), default="bf16")("")
    mtp: int = _of(type=Whole(0, 16), default=0)("Draft tokens of MTP layers.")
    prompt_tokens: int = _of(type=_COUNT, default=8000)("")
    output_tokens: int = _of(type=_COUNT, default=500)("")
    reused: float = _of(type=Number(0, 1), default=0.75)("Share of a prompt that was sent before.")
    requests_per_s: float = _of(type=_RATE, default=2.0)("")
    users: int = _of(type=_COUNT, default=500)("Conversations whose caches are kept.")
    host_memory: int = _size_of(default="1TiB")("Memory of a machine.")
    dram_rate: int | None = _size_of()("Bytes/s of loads of one rank; default 80 % of PCIe.")
    disk_rate: int = _size_of(default="6GB")("Bytes/s.")
    network: int = _size_of(default="50GB")("Bytes/s between two nodes; 50GB are 400 Gbit/s.")
    mfu: float = _of(type=Number(1e-6, 1), default=0.5)("Share of FLOP/s that prefill reaches.")
    token_us: float = _of(type=_TIME, default=0.0)("Per prompt token, measured; 0: by FLOP/s.")
    overhead_ms: float = _of(type=_TIME, default=5.0)("Time beside computing and loading.")
    json: bool = option(is_flag=True)("Print one JSON object; bytes, seconds and tokens.")


# ── times ─────────────────────────────────────────────────────────────────────────────────────────


def plan(config: model.Config, work: Workload) -> dict[str, Any]:
    """The plan of a workload on engines of `tp` × `pp` GPUs, as `--json` prints it: bytes, seconds
    and tokens.

    Raises:
        ConfigError: no language model's configuration; the weights or one sequence do not fit.
    """
    kv_bytes = NUMBER_BYTES[work.kv_dtype]
    groups = model.cache_groups(config, kv_bytes=kv_bytes, tp=work.tp, draft_tokens=work.mtp)
    gpu, ranks = GPUS[work.gpu], work.tp * work.pp
    if work.pp > (layers := model.number(config, "num_hidden_layers")):
        raise ConfigError(f"--pp {work.pp} is more than the model's {layers} layers: choose less")
    memory_bytes = work.gpu_memory or gpu.memory_bytes
    total, active = model.parameters_of(config)
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
    pushed = model.loaded_bytes(groups, work.prompt_tokens)
    push_s = pushed / work.network
    working_set = work.users * sum(g.kept_bytes(tokens) for g in groups)
    share = math.ceil(working_set / nodes)
    dram = min(share, work.host_memory // 2)
    return {
        "groups": [group._asdict() for group in groups],
        "weights": {"total": total, "active": active},
        "prompt_bytes": sum(g.kept_bytes(work.prompt_tokens) for g in groups),
        "sequence_bytes": model.loaded_bytes(groups, tokens),
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


def _token_s(config: model.Config, active: int, work: Workload) -> float:
    gpu, (queries, size) = GPUS[work.gpu], model.head_size(config)
    sheet = gpu.fp8_flops if work.weight_dtype == "fp8" else gpu.bf16_flops
    flops = work.flops * 1e12 if work.flops else sheet
    # Scores and values: 4 a query number and token before it, half of the prompt on average.
    attention = 2 * model.number(config, "num_hidden_layers") * queries * size * work.prompt_tokens
    return (2 * active + attention) / (flops * work.mfu * work.tp * work.pp)


def _tiers(
    groups: Sequence[model.CacheGroup], token_s: float, work: Workload
) -> list[dict[str, Any]]:
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
        # The overhead is that of a computed prompt, too.
        pays = (n for n in counts if model.loaded_bytes(groups, n) / rate < n * token_s)
        load_s = work.overhead_ms / 1000 + model.loaded_bytes(groups, reused) / rate + computed_s
        made.append({"name": name, "load_s": load_s, "breakeven_tokens": next(pays, None)})
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


# ── command ───────────────────────────────────────────────────────────────────────────────────────


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path, readable=False))
@options(Workload)
def plan_command(work: Workload, config: Path) -> None:
    """Size a deployment for a model: bytes per token, tiers, load or compute, P:D.

    CONFIG is a model's config.json or its directory. Nothing is measured; rates are those of data
    sheets unless given.

    \b
    Examples:
      kvstore plan Llama-3.1-8B/config.json --gpu H100 --prompt-tokens 16000
      kvstore plan DeepSeek-V3/ --gpu H200 --tp 8 --weight-dtype fp8 --requests-per-s 10
    """
    found = read_config(config)
    try:
        made = plan(found, work)
    except ConfigError as error:
        name = "config.json" if config.is_dir() else str(config)
        raise ConfigError(str(error).replace("config.json", name, 1)) from None
    click.echo(json.dumps(made, indent=1) if work.json else "\n".join(_lines(made, work)))


def _time(seconds: float) -> str:
    return format_us(seconds * US_PER_S)


def _lines(made: dict[str, Any], work: Workload) -> list[str]:
    total, active = made["weights"].values()
    rows = [("parameters", f"{total / 1e9:.3g} B, {active / 1e9:.3g} B a token")]
    for group in made["groups"]:
        size = format_size(group["layers"] * group["layer_bytes"] * group["shards"])
        rows.append((group["kind"], f"{size} a {'sequence' if group['is_state'] else 'token'}"))
    working_set = f"{format_size(made['working_set_bytes'])} of {work.users} users"
    rows += [
        ("cache of a prompt", f"{format_size(made['prompt_bytes'])} kept by kvstore"),
        ("GPUs of an engine", f"hold {made['gpu_sequences']} sequences"),
        ("working set", f"{working_set}; nodes: {made['nodes']}"),
        ("first token", f"{_time(made['miss_ttft_s'])} computed"),
    ]
    for tier in made["tiers"]:
        least = tier["breakeven_tokens"]
        faster = f"faster from {least} tokens on" if least else "never faster than computing"
        rows.append((f"… from {tier['name']}", f"{_time(tier['load_s'])}; {faster}"))
    prefill, engines = made["prefill_engines"], made["engines"]
    rows += [
        ("engines", f"{engines}, GPUs each: {work.tp * work.pp}"),
        ("P:D", f"{prefill}:{engines - prefill}" if prefill else "one engine does both"),
        ("push of a prompt", _time(made["push_s"])),
        ("network", f"{format_size(int(made['network_bytes']))}/s if every prompt is pushed"),
    ]
    # A whole number of GiB, unless that is more than half of the machine.
    dram = min(math.ceil(made["dram_bytes"] / GIB) * GIB, max(work.host_memory // 2, MIB))
    flags = f"--dram {dram // GIB}GiB" if dram % GIB == 0 else f"--dram {dram // MIB}MiB"
    if made["file_bytes"]:
        flags += f" --file /var/lib/kvstore:{math.ceil(made['file_bytes'] / GIB)}GiB"
    shown = [f"{name:<22} {value}" for name, value in rows]
    return [*shown, "", f"kvstore node {flags}", "", f"Path: {made['path']}."]
