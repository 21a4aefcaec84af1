"""`kvstore doctor`: gathers facts, has the checks judge them, prints findings with their mends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvstore.cli.commands import JSON_OPTION, as_json, settings_options
from kvstore.config.settings import NodeSettings

_SYMPTOMS = ("ttft", "throughput", "memory", "misses")
_ROOT = Path("/")


@click.command()
@settings_options(NodeSettings)
@click.option(
    "--symptom",
    type=click.Choice(_SYMPTOMS),
    help="Only checks that can explain it, the likeliest first: slow first tokens, low throughput,"
    " want of memory, prompts that are computed again.",
)
@click.option(
    "--disk-rate",
    is_flag=True,
    help="Measure the disk of --file: write and read 64 MiB of a file without a name, or for 1 s.",
)
@JSON_OPTION(help="Print one JSON object with a list of checks.")
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
    from kvstore.cli.doctor_checks import CHECKS, SYMPTOMS
    from kvstore.cli.doctor_facts import EXIT_STATUS, NOT_APPLICABLE, WARNING, Diagnosis
    from kvstore.cli.doctor_reads import expand, read_texts

    facts = _facts(config_path, flags, disk_rate=disk_rate)
    by_name = {check.name: check for check in CHECKS}
    names = SYMPTOMS[symptom].split() if symptom else list(by_name)
    process = str(facts.node.pid or "self") if facts.node else "self"
    engines = [str(each.pid) for each in facts.engines if each.is_ours]
    rows = []
    for check in map(by_name.__getitem__, names):
        files = [pattern for pattern in check.reads if pattern[0] in "/{"]
        expanded = [p for each in files for p in expand(each, _ROOT, node=process, engines=engines)]
        texts, hidden = read_texts(_ROOT, expanded)
        finding = check.judge(texts, facts) if not hidden else None
        found = finding or Diagnosis(WARNING, f"not readable: {hidden[0]}", "sudo kvstore doctor")
        rows.append((check, found))
    verdict = max((found.verdict for _, found in rows), key=EXIT_STATUS.__getitem__)
    verdict = "ok" if verdict == NOT_APPLICABLE else verdict
    if json_:
        checks = [
            {"check": check.name, "verdict": its.verdict, "finding": its.text, "mend": its.mend}
            | {"reads": check.reads}
            for check, its in rows
        ]
        click.echo(as_json(verdict=verdict, symptom=symptom, checks=checks))
    else:
        for check, (its, text, mend) in rows:
            shown = "-" if its == NOT_APPLICABLE else its
            click.echo(
                f"{shown:<8} {check.name:<13} {text}" + f"\n{'':23}mend: {mend}" * bool(mend)
            )
    sys.exit(EXIT_STATUS[verdict])


def _facts(path: Path | None, flags: dict[str, Any], *, disk_rate: bool) -> Any:
    """Raises ConfigError: a wrong setting."""
    from kvstore.cli import doctor_reads as reads
    from kvstore.cli.doctor_facts import Facts
    from kvstore.config.cluster import resolve_cluster, resolve_tls
    from kvstore.config.machine import available_memory
    from kvstore.config.node import file_of
    from kvstore.config.reading import load_settings
    from kvstore.config.values import size_of
    from kvstore.errors import ConfigError

    settings = load_settings(path, flags, NodeSettings)
    node, no_node = reads.node(settings.socket)
    dram_bytes = node.dram_bytes if node else available_memory()[0] // 2
    if settings.dram != "auto":
        dram_bytes = size_of("dram", settings.dram)
    file = file_of(settings.file, settings.node_name, dram_bytes=dram_bytes)
    has_cluster = bool(settings.index or settings.index_listen)
    days, refusal = None, ""
    try:
        if has_cluster and (tls := resolve_tls(settings, what="the index")):
            days = (tls.ends_s - time.time()) / 86_400
    except ConfigError as error:
        refusal = str(error)
    cluster = None if refusal else resolve_cluster(settings)
    transport = cluster.peers.transport if cluster and cluster.peers else None
    versions, plugins = reads.packages()
    return Facts(
        socket=str(settings.socket),
        dram_bytes=dram_bytes,
        transport=transport.name if transport else "",
        plugin=transport.options.get("plugin", "UCX") if transport else "",
        has_cluster=has_cluster,
        file=reads.disk(file, with_rate=disk_rate) if file else None,
        versions=versions,
        plugins=plugins,
        engines=reads.engines(_ROOT),
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        clock=reads.clock(),
        certificate_days=days,
        certificate_refusal=refusal,
        node=node,
        no_node=no_node,
    )
