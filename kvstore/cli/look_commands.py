"""`kvstore inspect`, `explain`, `top` and `doctor`: their flags, which other modules answer.

Does not cover: the answers (`look`, `top`), checks of `doctor` (`doctor_checks`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from kvstore.cli.commands import (
    A_FILE,
    SOCKET,
    Number,
    Whole,
    as_json,
    option,
    options,
    settings_options,
)
from kvstore.config import defaults
from kvstore.config.settings import AskSettings, NodeSettings, Settings


def _topic(_context: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    if given is not None and given not in defaults.TOPICS:
        from kvstore.wording import did_you_mean

        near = did_you_mean(given, defaults.TOPICS) or f": use one of {', '.join(defaults.TOPICS)}"
        raise click.UsageError(f"there is no topic {given!r}{near}")
    return given


class _OfTopics(Settings):
    """Settings of single topics of `kvstore inspect`."""

    space: str | None = option(metavar="HEX")("For blocks and prefix: only this space.")
    tenant: str | None = option(metavar="NAME")("For prefix: only this tenant.")
    tokens_file: Path | None = option(type=A_FILE)(
        "Prompt as token ids: a JSON list, or numbers separated by spaces."
    )
    keys_file: Path | None = option(type=A_FILE)("Prompt as block keys: 64 hex digits each.")
    text: str | None = option()("Prompt as text; needs --tokenizer.")
    tokenizer: str | None = option(metavar="PATH|NAME")(
        "Tokenizer of the model, as the engine finds it."
    )
    cache_salt: str | None = option(metavar="TEXT")("Cache salt of the request, if any.")
    gpu_hour: float | None = option(type=Number(0, 1_000_000), metavar="PRICE")(
        "For savings: price of a GPU hour, to print what they are worth."
    )


_OF_PROMPTS: Final = ("tenant", "tokens_file", "keys_file", "text", "tokenizer", "cache_salt")


class InspectSettings(AskSettings, _OfTopics):
    """Settings of `kvstore inspect`."""

    socket: Path = SOCKET
    json: bool = option(is_flag=True)("Print one JSON object with a list per topic.")
    limit: int | None = option(type=Whole(1, defaults.BLOCK_ROWS_MAX))(
        f"Number of blocks to list at most.  [default: {defaults.BLOCKS_LISTED}]"
    )


@click.command()
@click.argument("topic", required=False, metavar="[TOPIC]", callback=_topic)
@options(InspectSettings)
def inspect(asked: InspectSettings, topic: str | None) -> None:
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
    _check_flags(asked, topic)
    from kvstore.cli import look

    if topic == "prefix":
        look.inspect_prefix(asked)
    elif topic == "savings":
        look.inspect_savings(asked)
    elif asked.index:
        look.inspect_members(asked)
    else:
        look.inspect_node(asked, topic)


def _check_flags(asked: InspectSettings, topic: str | None) -> None:
    """Raises UsageError: a flag is of another topic."""
    limit, space = asked.limit, asked.space
    if asked.index and topic not in ("nodes", "prefix"):
        raise click.UsageError("--index is for 'kvstore inspect nodes' and 'prefix': name one")
    if asked.gpu_hour is not None and topic != "savings":
        raise click.UsageError("--gpu-hour is for 'kvstore inspect savings'")
    if topic == "prefix" and limit is not None:
        raise click.UsageError("--limit chooses blocks: use 'kvstore inspect blocks'")
    if topic != "prefix" and any(getattr(asked, each) is not None for each in _OF_PROMPTS):
        raise click.UsageError("a prompt is for 'kvstore inspect prefix'")
    if topic not in ("blocks", "prefix") and (limit is not None or space is not None):
        raise click.UsageError("--limit and --space choose blocks: use 'kvstore inspect blocks'")


class ExplainSettings(Settings):
    """Settings of `kvstore explain`."""

    socket: Path = SOCKET
    json: bool = option(is_flag=True)("Print one JSON object with a list of requests.")
    last: int | None = option(type=Whole(1, defaults.REQUEST_ROWS_MAX))(
        f"Number of requests to list, without an id.  [default: {defaults.REQUESTS_LISTED}]"
    )


@click.command()
@click.argument("request_id", required=False)
@options(ExplainSettings)
def explain(asked: ExplainSettings, request_id: str | None) -> None:
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
    if request_id is not None and asked.last is not None:
        raise click.UsageError("--last lists the latest requests: leave REQUEST_ID out")
    from kvstore.cli import look

    look.explain_request(asked, request_id)


class _Sampling(Settings):
    """Settings of `kvstore top` besides the processes of a node or an index."""

    interval: float = option(
        type=Number(0.5, 60), default=2.0, show_default=True, metavar="SECONDS"
    )("Time between two samples.")
    page: tuple[str, ...] = option("--router", multiple=True, metavar="URL")(
        "Show the router, node or index whose --metrics are at this URL; repeatable. A node or an"
        " index are shown, too, with --socket or --index."
    )
    page_ca: Path | None = option("--router-ca", type=A_FILE)(
        "CA certificate of https:// pages.  [default: CAs of the system]"
    )
    once: bool = option(is_flag=True)("Print one sample over one interval and exit.")
    json: bool = option(is_flag=True)("Print that sample as one JSON object.")


class TopSettings(AskSettings, _Sampling):
    """Settings of `kvstore top`."""

    socket: Path = SOCKET


@click.command()
@options(TopSettings)
def top(asked: TopSettings) -> None:
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
    if not (asked.once or asked.json or sys.stdout.isatty()):
        raise click.UsageError("top draws on a terminal: add --once or --json for scripts")
    from kvstore.cli.top import watch

    source = click.get_current_context().get_parameter_source("socket")
    watch(asked, has_node=not asked.page or source is not ParameterSource.DEFAULT)


SYMPTOMS: Final = {
    "ttft": "node hits disk memlock thp huge-pages numa rdma transport engine-flags",
    "throughput": "node memlock numa thp huge-pages disk rdma transport engine-flags",
    "memory": "memory memlock huge-pages thp numa node kernel",
    "misses": "hits node engine-flags vllm memlock certificates clock transport disk",
}
"""Checks that can explain a symptom, the likeliest first."""
_ROOT: Final = Path("/")


class DoctorSettings(Settings):
    """Settings of `kvstore doctor` besides those of a node."""

    symptom: str | None = option(type=click.Choice(list(SYMPTOMS)))(
        "Only checks that can explain it, the likeliest first: slow first tokens, low throughput,"
        " want of memory, prompts that are computed again."
    )
    disk_rate: bool = option(is_flag=True)(
        "Measure the disk of --file: write and read 64 MiB of a file without a name, or for 1 s."
    )
    json: bool = option(is_flag=True)("Print one JSON object with a list of findings of checks.")


@click.command()
@settings_options(NodeSettings)
@options(DoctorSettings)
def doctor(asked: DoctorSettings, config_path: Path | None, **flags: Any) -> None:
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

    settings, symptom = load_settings(config_path, flags, NodeSettings), asked.symptom
    machine = Machine(settings, _ROOT, with_rate=asked.disk_rate)
    names = SYMPTOMS[symptom].split() if symptom else CHECKS
    found = [(name, its) for name in names for its in judge(name, machine)]
    status = max(EXIT_STATUS[its.verdict] for _, its in found)
    if asked.json:
        checks = [{"check": name} | its._asdict() for name, its in found]
        verdict = ("ok", "warning", "error")[status]
        click.echo(as_json(verdict=verdict, symptom=symptom, checks=checks))
    else:
        for name, (verdict, text, mend) in found:
            shown = "-" if verdict == "not applicable" else verdict
            click.echo(f"{shown:<8} {name:<13} {text}" + f"\n{'':23}mend: {mend}" * bool(mend))
    sys.exit(status)
