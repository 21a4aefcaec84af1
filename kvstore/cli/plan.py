"""`kvstore plan`: reads a config.json, prints what `kvstore.plan` makes of it."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from kvstore.cli.commands import Number, Whole
from kvstore.errors import ConfigError
from kvstore.plan import GPUS, NUMBER_BYTES, Config, Workload, plan, text_config
from kvstore.units import GIB, MIB, US_PER_S, format_size, format_us, parse_size

_FILE_BYTES_MAX: Final = 4 << 20


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
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object: name a model's config.json")
    return text_config(found)


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


_option: Final = partial(click.option, show_default=True)
_size_option: Final = partial(_option, type=_size, metavar="SIZE")
_COUNT: Final = Whole(1, 1 << 30)
_RATE: Final = Number(1e-6, 1e9)
_SHARE: Final = Number(0, 1)
_TIME: Final = Number(0)


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path, readable=False))
@_option("--gpu", type=click.Choice(list(GPUS)), default="H100")
@_size_option("--gpu-memory", help="In place of the GPU's.")
@_option("--flops", type=_RATE, help="Dense TFLOP/s, in place of the GPU's.")
@_option("--tp", type=_COUNT, default=1, help="Tensor parallelism.")
@_option("--pp", type=_COUNT, default=1, help="Pipeline parallelism.")
@_option("--kv-dtype", type=click.Choice(list(NUMBER_BYTES)), default="bf16")
@_option("--weight-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16")
@_option("--mtp", type=Whole(0, 16), default=0, help="Draft tokens of MTP layers.")
@_option("--prompt-tokens", type=_COUNT, default=8000)
@_option("--output-tokens", type=_COUNT, default=500)
@_option("--reused", type=_SHARE, default=0.75, help="Share of a prompt that was sent before.")
@_option("--requests-per-s", type=_RATE, default=2.0)
@_option("--users", type=_COUNT, default=500, help="Conversations whose caches are kept.")
@_size_option("--host-memory", default="1TiB", help="Memory of a machine.")
@_size_option("--dram-rate", help="Bytes/s of loads of one rank; default 80 % of PCIe.")
@_size_option("--disk-rate", default="6GB", help="Bytes/s.")
@_size_option("--network", default="50GB", help="Bytes/s between two nodes; 50GB are 400 Gbit/s.")
@_option("--mfu", type=Number(1e-6, 1), default=0.5,
         help="Share of FLOP/s that prefill reaches.")  # fmt: skip
@_option("--token-us", type=_TIME, default=0.0, help="Per prompt token, measured; 0: by FLOP/s.")
@_option("--overhead-ms", type=_TIME, default=5.0, help="Time beside computing and loading.")
@click.option(
    "--json", "json_", is_flag=True, help="Print one JSON object; bytes, seconds and tokens."
)
def plan_command(config: Path, *, json_: bool, **flags: Any) -> None:
    """Size a deployment for a model: bytes per token, tiers, load or compute, P:D.

    CONFIG is a model's config.json or its directory. Nothing is measured; rates are those of data
    sheets unless given.

    \b
    Examples:
      kvstore plan Llama-3.1-8B/config.json --gpu H100 --prompt-tokens 16000
      kvstore plan DeepSeek-V3/ --gpu H200 --tp 8 --weight-dtype fp8 --requests-per-s 10
    """
    work = Workload(**flags)
    model = read_config(config)
    try:
        made = plan(model, work)
    except ConfigError as error:
        name = "config.json" if config.is_dir() else str(config)
        raise ConfigError(str(error).replace("config.json", name, 1)) from None
    click.echo(json.dumps(made, indent=1) if json_ else "\n".join(_lines(made, work)))


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
    flags = f"--dram {math.ceil(made['dram_bytes'] / GIB)}GiB"
    if made["file_bytes"]:
        flags += f" --file /var/lib/kvstore:{math.ceil(made['file_bytes'] / GIB)}GiB"
    shown = [f"{name:<22} {value}" for name, value in rows]
    return [*shown, "", f"kvstore node {flags}", "", f"Path: {made['path']}."]
