"""`kvstore plan`: reads a config.json, prints what `kvstore.plan` makes of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvstore.cli.commands import JSON_OPTION
from kvstore.errors import ConfigError
from kvstore.plan.caches import Config, cache_groups, text_config
from kvstore.plan.estimate import GPUS, Plan, Workload, plan
from kvstore.units import GIB, US_PER_S, format_size, format_us, parse_size

_F = TypeVar("_F", bound=Callable[..., Any])

_FILE_BYTES_MAX: Final = 4 << 20
_NUMBER_BYTES: Final = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}


def read_config(path: Path) -> Config:
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
        raise ConfigError(f"{path} is no JSON: name a model's config.json") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object: name a model's config.json")
    return text_config(found)


class _Size(click.ParamType[int]):
    """Bytes above 0."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a text with a unit; figures pass."""
        try:
            size_bytes = value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return size_bytes or self.fail("0 is no size: give one above it", param, ctx)


def _sized(flag: str, default: str | None, about: str) -> Callable[[_F], _F]:
    return click.option(flag, type=_Size(), default=default, show_default=True, help=about)


_COUNT: Final = click.IntRange(1, 1 << 30)
_RATE: Final = click.FloatRange(0, 1e9, min_open=True)


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path, readable=False))
@click.option("--gpu", type=click.Choice(list(GPUS)), default="H100", show_default=True)
@_sized("--gpu-memory", None, "In place of the GPU's.")
@click.option("--flops", type=_RATE, help="Dense TFLOP/s, in place of the GPU's.")
@click.option("--tp", type=_COUNT, default=1, show_default=True, help="Tensor parallelism.")
@click.option("--pp", type=_COUNT, default=1, show_default=True, help="Pipeline parallelism.")
@click.option(
    "--kv-dtype", type=click.Choice(list(_NUMBER_BYTES)), default="bf16", show_default=True
)
@click.option("--weight-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16",
              show_default=True)  # fmt: skip
@click.option("--mtp", type=click.IntRange(0, 16), default=0, help="Draft tokens of MTP layers.")
@click.option("--prompt-tokens", type=_COUNT, default=8000, show_default=True)
@click.option("--output-tokens", type=_COUNT, default=500, show_default=True)
@click.option("--reused", type=click.FloatRange(0, 1), default=0.75, show_default=True,
              help="Share of a prompt that an earlier request had.")  # fmt: skip
@click.option("--requests-per-s", type=_RATE, default=2.0, show_default=True)
@click.option("--users", type=_COUNT, default=500, show_default=True,
              help="Conversations whose caches are kept.")  # fmt: skip
@_sized("--host-memory", "1TiB", "Memory of a machine.")
@_sized("--dram-rate", None, "Bytes/s of loads of one rank; default 80 % of PCIe.")
@_sized("--disk-rate", "6GB", "Bytes/s.")
@_sized("--network", "50GB", "Bytes/s between two nodes; 50GB are 400 Gbit/s.")
@click.option("--mfu", type=click.FloatRange(0, 1, min_open=True), default=0.5, show_default=True,
              help="Share of FLOP/s that prefill reaches.")  # fmt: skip
@click.option("--token-us", type=click.FloatRange(0), default=0.0,
              help="Measured time to compute a token of a prompt, in place of FLOP/s.")  # fmt: skip
@click.option("--overhead-ms", type=click.FloatRange(0), default=5.0, show_default=True,
              help="Time of a request beside computing and loading.")  # fmt: skip
@JSON_OPTION(help="Print one JSON object; bytes, seconds and tokens.")
def plan_command(config: Path, *, json_: bool, **flags: Any) -> None:
    """Size a deployment for a model: bytes per token, tiers, load or compute, P:D.

    CONFIG is a model's config.json or its directory. Nothing is measured; rates are those of data
    sheets unless given.

    \b
    Examples:
      kvstore plan Llama-3.1-8B/config.json --gpu H100 --prompt-tokens 16000
      kvstore plan DeepSeek-V3/ --gpu H200 --tp 8 --weight-dtype fp8 --requests-per-s 10
    """
    read = read_config(config)
    gpu = GPUS[flags["gpu"]]
    if flags["gpu_memory"]:
        gpu = gpu._replace(memory_bytes=flags["gpu_memory"])
    if flags["flops"]:
        gpu = gpu._replace(bf16_flops=flags["flops"] * 1e12, fp8_flops=flags["flops"] * 1e12)
    groups = cache_groups(
        read, kv_bytes=_NUMBER_BYTES[flags["kv_dtype"]], tp=flags["tp"], draft_tokens=flags["mtp"]
    )
    same = ("prompt_tokens", "reused", "output_tokens", "requests_per_s", "users", "tp", "pp")
    work = Workload(
        **{name: flags[name] for name in (*same, "mfu", "disk_rate")},
        weight_bytes=_NUMBER_BYTES[flags["weight_dtype"]],
        token_s=flags["token_us"] / US_PER_S,
        dram_rate=flags["dram_rate"] or 0,
        overhead_s=flags["overhead_ms"] / 1000,
        network_rate=flags["network"],
        host_bytes=flags["host_memory"],
    )
    made = plan(read, groups, gpu, work)
    click.echo(json.dumps(_as_json(made), indent=1) if json_ else "\n".join(_lines(made, work)))


def _as_json(made: Plan) -> dict[str, Any]:
    parts = {"groups": [group._asdict() for group in made.groups]}
    tiers = [tier._asdict() for tier in made.tiers]
    return made._asdict() | parts | {"weights": made.weights._asdict(), "tiers": tiers}


def _time(seconds: float) -> str:
    return format_us(seconds * US_PER_S)


def _lines(made: Plan, work: Workload) -> list[str]:
    weights = made.weights
    rows = [("parameters", f"{weights.total / 1e9:.3g} B, {weights.active / 1e9:.3g} B a token")]
    for group in made.groups:
        size = format_size(group.layers * group.layer_bytes * group.shards)
        rows.append((group.kind, f"{size} a {'sequence' if group.is_state else 'token'}"))
    rows += [
        ("cache of a prompt", f"{format_size(made.prompt_bytes)} kept by kvstore"),
        ("GPUs of an engine", f"hold {made.gpu_sequences} sequences"),
        (
            "working set",
            f"{format_size(made.working_set_bytes)} of {work.users} users; nodes: {made.nodes}",
        ),
        ("first token", f"{_time(made.miss_ttft_s)} computed"),
    ]
    for tier in made.tiers:
        least = tier.breakeven_tokens
        faster = f"faster from {least} tokens on" if least else "never faster than computing"
        rows.append((f"… from {tier.name}", f"{_time(tier.load_s)}; {faster}"))
    decode = made.engines - made.prefill_engines
    rows += [
        ("engines", f"{made.engines}, each with {work.tp * work.pp} GPUs"),
        ("P:D", f"{made.prefill_engines}:{decode}" if made.engines > 1 else "one engine does both"),
        ("push of a prompt", _time(made.push_s)),
        ("network", f"{format_size(int(made.network_bytes))}/s if every prompt is pushed"),
    ]
    flags = f"--dram {math.ceil(made.dram_bytes / GIB)}GiB"
    if made.file_bytes:
        flags += f" --file /var/lib/kvstore:{math.ceil(made.file_bytes / GIB)}GiB"
    shown = [f"{name:<22} {value}" for name, value in rows]
    return [*shown, "", f"kvstore node {flags}", "", f"Path: {made.path}."]
