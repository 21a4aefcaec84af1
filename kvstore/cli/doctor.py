"""`kvstore doctor`: what the checks find on this machine, with a mend for each finding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from kvstore.cli.commands import JSON_OPTION, as_json, settings_options
from kvstore.config.settings import NodeSettings

SYMPTOMS: Final = {
    "ttft": "node hits disk memlock thp huge-pages numa rdma transport engine-flags",
    "throughput": "node memlock numa thp huge-pages disk rdma transport engine-flags",
    "memory": "memory memlock huge-pages thp numa node kernel",
    "misses": "hits node engine-flags vllm memlock certificates clock transport disk",
}
"""Checks that can explain a symptom, the likeliest first."""
_ROOT: Final = Path("/")


@click.command()
@settings_options(NodeSettings)
@click.option(
    "--symptom",
    type=click.Choice(list(SYMPTOMS)),
    help="Only checks that can explain it, the likeliest first: slow first tokens, low throughput,"
    " want of memory, prompts that are computed again.",
)
@click.option(
    "--disk-rate",
    is_flag=True,
    help="Measure the disk of --file: write and read 64 MiB of a file without a name, or for 1 s.",
)
@JSON_OPTION(help="Print one JSON object with a list of findings of checks.")
def doctor(
    config_path: Path | None, *, symptom: str | None, disk_rate: bool, json_: bool, **flags: Any
) -> None:
    """Check this machine for a node with these settings, and what runs here already; each finding
    has a mend.

    Takes the flags and the --config of 'kvstore node'. Run it where the node runs, as its user, and
    once more in the engine's environment. A running node at --socket is asked for what only it
    knows. Nothing is changed.

    Exit status 0: all is well. 1: warnings. 2: errors, or a wrong flag.

    \b
    Examples:
      kvstore doctor --dram 64GiB --file /var/lib/kvstore:2TiB --disk-rate
      kvstore doctor --config node.yaml
      kvstore doctor --symptom misses
      kvstore doctor --json | jq '.checks[] | select(.verdict == "error")'
    """
    from kvstore.cli.doctor_checks import CHECKS, EXIT_STATUS, Machine, judge
    from kvstore.config.reading import load_settings

    machine = Machine(load_settings(config_path, flags, NodeSettings), _ROOT, with_rate=disk_rate)
    names = SYMPTOMS[symptom].split() if symptom else CHECKS
    found = [(name, its) for name in names for its in judge(name, machine)]
    status = max(EXIT_STATUS[its.verdict] for _, its in found)
    if json_:
        checks = [{"check": name} | its._asdict() for name, its in found]
        verdict = ("ok", "warning", "error")[status]
        click.echo(as_json(verdict=verdict, symptom=symptom, checks=checks))
    else:
        for name, (verdict, text, mend) in found:
            shown = "-" if verdict == "not applicable" else verdict
            click.echo(f"{shown:<8} {name:<13} {text}" + f"\n{'':23}mend: {mend}" * bool(mend))
    sys.exit(status)
