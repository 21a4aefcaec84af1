"""`kvstore inspect`, `explain`, `top` and `doctor`: their flags, which other modules answer.

Does not cover: the answers (`look`, `top`), checks of `doctor` (`doctor_checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from kvstore.cli.commands import (
    A_FILE,
    JSON_OPTION,
    SOCKET_OPTION,
    Number,
    Whole,
    as_json,
    index_options,
    settings_options,
)
from kvstore.config import defaults
from kvstore.config.settings import AskSettings, NodeSettings


def _topic(_context: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    if given is not None and given not in defaults.TOPICS:
        from kvstore.wording import did_you_mean

        near = did_you_mean(given, defaults.TOPICS) or f": use one of {', '.join(defaults.TOPICS)}"
        raise click.UsageError(f"there is no topic {given!r}{near}")
    return given


@click.command()
@click.argument("topic", required=False, metavar="[TOPIC]", callback=_topic)
@SOCKET_OPTION
@JSON_OPTION(help="Print one JSON object with a list per topic.")
@click.option(
    "--limit",
    type=Whole(1, defaults.BLOCK_ROWS_MAX),
    help=f"Number of blocks to list at most.  [default: {defaults.BLOCKS_LISTED}]",
)
@index_options
@click.option("--space", metavar="HEX", help="For blocks and prefix: only this space.")
@click.option("--tenant", metavar="NAME", help="For prefix: only this tenant.")
@click.option(
    "--tokens-file",
    type=A_FILE,
    help="Prompt as token ids: a JSON list, or numbers separated by spaces.",
)
@click.option("--keys-file", type=A_FILE, help="Prompt as block keys: 64 hex digits each.")
@click.option("--text", help="Prompt as text; needs --tokenizer.")
@click.option(
    "--tokenizer", metavar="PATH|NAME", help="Tokenizer of the model, as the engine finds it."
)
@click.option("--cache-salt", metavar="TEXT", help="Cache salt of the request, if any.")
@click.option(
    "--gpu-hour",
    type=Number(0, 1_000_000),
    metavar="PRICE",
    help="For savings: price of a GPU hour, to print what they are worth.",
)
def inspect(
    topic: str | None,
    socket: Path,
    limit: int | None,
    space: str | None,
    *,
    json_: bool,
    asked: AskSettings | None,
    gpu_hour: float | None,
    **prompt: Any,
) -> None:
    """Show the state of a node: a summary, or one TOPIC.

    \b
    Topics:
      nodes    attached engines, engines that are not served and why, cluster members
      tiers    capacity, used, being written, leased; quotas, if any
      curve    expected hits with more or less dram, from the live lookups
      spaces   models, with the fingerprint that their engines share
      blocks   single blocks
      leases   blocks being read by engines
      jobs     blocks being written
      transfers  duration of transfers from other nodes, by part and back end, and of pushes by
                 stage: push_grant, push_first, push (last byte), land_copy, land_verify,
                 push_seal, push_token (first token); write: of pushes to other nodes
      savings  hours of prefill that loads saved, hours that requests waited for them, and hours
               of requests that were slower for it, by model, tenant and tier, since the node
               started; with --gpu-hour what they are worth. Losses are negative
      prefix   location of each block of one prompt, or the reason for the miss
    \b
    With --index, 'nodes' and 'prefix' cover the cluster: its nodes, and the matching prefix length
    of each in each tier. Keys are computed with the hash settings of the node at --socket; no node
    is needed with --keys-file and all 64 digits of --space (and --tenant).
    \b
    Examples:
      kvstore inspect
      kvstore inspect blocks --space 3f9a --limit 20
      kvstore inspect savings --gpu-hour 2.50
      kvstore inspect tiers --json | jq '.tiers[0].used_bytes'
      kvstore inspect prefix --tokens-file prompt.json
      kvstore inspect prefix --text "Once upon" --tokenizer /models/llama --space 3f9a
      kvstore inspect prefix --tokens-file prompt.json --index 10.0.0.1:9470 \\
        --ca pki/ca.crt --cert pki/node-n1.crt --key pki/node-n1.key
      kvstore inspect nodes --index 10.0.0.1:9470 --insecure
    """
    _check_flags(topic, limit, space, asked, gpu_hour, prompt)
    from kvstore.cli import look

    if topic == "prefix":
        look.inspect_prefix(socket, asked, space=space or "", json_=json_, **prompt)
    elif topic == "savings":
        look.inspect_savings(socket, gpu_hour=gpu_hour, json_=json_)
    elif asked is not None:
        look.inspect_members(asked, json_=json_)
    else:
        look.inspect_node(socket, topic, limit=limit, space=space, json_=json_)


def _check_flags(
    topic: str | None,
    limit: int | None,
    space: str | None,
    asked: AskSettings | None,
    gpu_hour: float | None,
    prompt: Mapping[str, Any],
) -> None:
    """Raises UsageError: a flag is of another topic."""
    if asked is not None and topic not in ("nodes", "prefix"):
        raise click.UsageError("--index is for 'kvstore inspect nodes' and 'prefix': name one")
    if gpu_hour is not None and topic != "savings":
        raise click.UsageError("--gpu-hour is for 'kvstore inspect savings'")
    if topic == "prefix" and limit is not None:
        raise click.UsageError("--limit chooses blocks: use 'kvstore inspect blocks'")
    if topic != "prefix" and any(value is not None for value in prompt.values()):
        raise click.UsageError("a prompt is for 'kvstore inspect prefix'")
    if topic not in ("blocks", "prefix") and (limit is not None or space is not None):
        raise click.UsageError("--limit and --space choose blocks: use 'kvstore inspect blocks'")


@click.command()
@click.argument("request_id", required=False)
@SOCKET_OPTION
@JSON_OPTION(help="Print one JSON object with a list of requests.")
@click.option(
    "--last",
    type=Whole(1, defaults.REQUEST_ROWS_MAX),
    help=f"Number of requests to list, without an id.  [default: {defaults.REQUESTS_LISTED}]",
)
def explain(request_id: str | None, socket: Path, last: int | None, *, json_: bool) -> None:
    """Show why a recent request hit or missed: the source of each block of its prompt or the reason
    for the miss, and the duration of each step.

    REQUEST_ID is the id that the client received, such as cmpl-4f1a, or its beginning; without one
    the latest requests are listed. The node keeps about 1000 requests since its start.

    \b
    Examples:
      kvstore explain
      kvstore explain cmpl-4f1a22
      kvstore explain cmpl-4f1a22 --json | jq '.requests[0].ranges'
    """
    if request_id is not None and last is not None:
        raise click.UsageError("--last lists the latest requests: leave REQUEST_ID out")
    from kvstore.cli import look

    look.explain_request(socket, request_id, last, json_=json_)


@click.command()
@SOCKET_OPTION
@index_options
@click.option(
    "--interval",
    type=Number(0.5, 60),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples.",
)
@click.option(
    "--page",
    "--router",
    "pages",
    multiple=True,
    metavar="URL",
    help="Show the router, node or index whose --metrics are at this URL; repeatable. A node or an"
    " index are shown, too, with --socket or --index.",
)
@click.option(
    "--page-ca",
    "--router-ca",
    "page_ca",
    type=A_FILE,
    help="CA certificate of https:// pages.  [default: CAs of the system]",
)
@click.option("--once", is_flag=True, help="Print one sample over one interval and exit.")
@JSON_OPTION(help="Print that sample as one JSON object.")
@click.pass_context
def top(context: click.Context, /, socket: Path, *, once: bool, json_: bool, **flags: Any) -> None:
    """Show the page of a node in the terminal, or with --index the nodes of the cluster; with
    --page, the page of any process. q quits.

    These are the figures of the page beside /metrics: health; of a node its tiers, the sources of
    prompt blocks, savings, transfers and the latest requests; of a router its workers, pools,
    cached tokens beside predicted ones and the latest decisions; of an index its nodes, those in
    doubt first. Counts and shares cover the time since the process started; 'now' in the table of
    flows is the rate of the last interval. With --index flows are sums over all nodes, which
    publish them every two seconds.

    A process that does not answer is shown as it was, and delays nothing. Columns and rows that do
    not fit the terminal are left out: --json has all of them.

    \b
    Examples:
      kvstore top
      kvstore top --index 10.0.0.1:9470 --ca pki/ca.crt --cert pki/node-n1.crt --key pki/node-n1.key
      kvstore top --json | jq '.processes[0].state.tiers'
      kvstore top --page http://127.0.0.1:9472 --page http://10.0.0.9:9472
    """
    once |= json_
    if not (once or sys.stdout.isatty()):
        raise click.UsageError("top draws on a terminal: add --once or --json for scripts")
    from kvstore.cli.top import watch

    is_default = context.get_parameter_source("socket") is ParameterSource.DEFAULT
    node = None if flags["pages"] and is_default else socket
    watch(node, once=once, json_=json_, **flags)


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
