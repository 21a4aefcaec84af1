"""The work of `kvstore inspect` and `explain` after their flags are read: ask, and print.

Separate from the commands, because it imports gRPC, tables and the types of rows. Covers: facts and
tables of an answer; hours and money of savings. Does not cover: clients (`ask`), locations of a
prompt (`prefix`), tables of plain rows (`tables`), texts (`kvstore.obs.reasons`), sums of savings
(`kvstore.engine.why.ledger`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from kvstore.cli import prefix
from kvstore.cli.ask import index_client, node_client
from kvstore.cli.commands import as_json, fail
from kvstore.cli.look_commands import ExplainSettings, InspectSettings
from kvstore.cli.prefix import PrefixRow
from kvstore.cli.tables import TableColumn, console, number, show, table
from kvstore.config.defaults import (
    BLOCK_ROWS_MAX,
    BLOCKS_LISTED,
    DEFAULT_TENANT,
    REQUEST_ROWS_MAX,
    REQUESTS_LISTED,
)
from kvstore.engine.why.curve import CurveReport
from kvstore.engine.why.explain import HashingReport, RequestReport
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.ledger import SavingsReport
from kvstore.errors import ConfigError
from kvstore.index.feed import Trust
from kvstore.obs import reasons
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import INDEX_IS_STALE, TOPICS, Row, member_report
from kvstore.units import US_PER_MS, format_size, format_us
from kvstore.wording import printable

WITH_NODES: Final = ("nodes", "unserved", "members", "engines")
SUMMARY: Final = (*WITH_NODES, "tiers", "quotas", "spaces", "leases", "jobs")
"""Topics of the summary; those of OPTIONAL are left out when empty."""
OPTIONAL: Final = ("unserved", "members", "engines", "quotas")
_NO_NODE_HINT: Final = (
    "keys are computed with the settings of the engines at --socket; no node is needed with"
    " --keys-file and all 64 digits of --space"
)
_TRUSTS: Final = {
    "exact": "exact: no node but those listed holds the first block",
    "catching-up": "catching-up: updates are still missing, other nodes may hold some too",
    "stale": INDEX_IS_STALE,
}


def inspect_members(asked: InspectSettings) -> None:
    """Print the nodes of the cluster, as an index lists them."""
    with index_client(asked) as client:
        known = client.nodes(engines=True)
    rows: list[Row] = [member_report(member, known.trust) for member in known.nodes]
    if asked.json:
        click.echo(as_json(members=rows, index=known.trust.word))
        return
    if known.trust is Trust.STALE:
        click.echo(INDEX_IS_STALE)
    show({"members": rows})
    if known.trust is Trust.CATCHING_UP:
        click.echo(f"the index is {known.trust.word}: there may be more", err=True)


def inspect_node(asked: InspectSettings, topic: str | None) -> None:
    """Print the state of one node. `topic` None: all topics but single blocks."""
    both = {"tiers": ("tiers", "quotas"), "nodes": WITH_NODES}
    topics = SUMMARY if topic is None else both.get(topic, (topic,))
    shown = asked.limit or BLOCKS_LISTED
    with node_client(asked.socket) as client:
        which = pb.Filter(limit=shown + 1, space=asked.space or "")
        found = {name: client.rows(name, TOPICS[name], which) for name in topics}
    found = {name: rows for name, rows in found.items() if rows or name not in OPTIONAL}
    left_out = len(found.get("blocks", ())) > shown
    if left_out:
        found["blocks"] = found["blocks"][:shown]
    if asked.json:
        click.echo(as_json(**found))
        return
    if topic == "curve":
        show_curve(found["curve"])
    else:
        show(found)
    if left_out:
        hint = f": --limit shows up to {BLOCK_ROWS_MAX}" if shown < BLOCK_ROWS_MAX else ""
        click.echo(f"more than these {shown} blocks exist{hint}", err=True)


def inspect_prefix(asked: InspectSettings) -> None:
    """Print the locations of the blocks of one prompt: in the cluster, or, without --index, on the
    node.
    """
    keys_file, tokens_file, text = asked.keys_file, asked.tokens_file, asked.text
    space, tenant, tokenizer = asked.space or "", asked.tenant, asked.tokenizer
    if sum(given is not None for given in (tokens_file, keys_file, text)) != 1:
        raise click.UsageError(
            "name one prompt: --tokens-file FILE, --keys-file FILE or --text TEXT"
        )
    if (text is None) != (tokenizer is None):
        raise click.UsageError("--text and --tokenizer go together")
    if keys_file is not None and asked.cache_salt is not None:
        raise click.UsageError("--cache-salt is in the keys already: leave it out")
    keys = prefix.read_keys(keys_file) if keys_file is not None else []
    tokens = prefix.read_tokens(tokens_file) if tokens_file is not None else []
    if text is not None and tokenizer is not None:
        tokens = prefix.tokenize(text, tokenizer)
    whole = prefix.hashing_of_keys(space, tenant or DEFAULT_TENANT)
    if asked.index and keys and whole is not None:
        prompt = prefix.prompt_of(whole, keys)
    else:
        with node_client(asked.socket, hint=_NO_NODE_HINT if asked.index else "") as client:
            known = client.rows("hashings", HashingReport)
            hashing = prefix.choose(known, space=space, tenant=tenant or "")
            prompt = prefix.prompt_of(hashing, keys, tokens, asked.cache_salt or "")
            if not asked.index:
                found = prefix.look_up(client, prompt)
    if asked.index:
        with index_client(asked) as index:
            try:
                found = prefix.look_up_everywhere(index, prompt)
            except ValueError as error:
                raise ConfigError(str(error)) from None
    if asked.json and not asked.index:
        found["ranges"] = [reasons.range_as_dict(row, None) for row in found["ranges"]]
    if asked.json:
        click.echo(as_json(prefix=found))
    elif asked.index:
        show_cluster_prefix(found)
    else:
        show_prefix(found)


def explain_request(asked: ExplainSettings, request_id: str | None) -> None:
    """Print why one request hit or missed, or a list of the latest. Exits with 1: no such
    request.
    """
    limit = REQUEST_ROWS_MAX if request_id is not None else asked.last or REQUESTS_LISTED
    with node_client(asked.socket) as client:
        question = pb.Filter(request=request_id or "", limit=limit)
        found = client.rows("requests", RequestReport, question)
        one = request_id is not None and len(found) == 1
        wanted = found if one or (asked.json and request_id is not None) else []
        ranges = [client.rows("ranges", RangeReport, pb.Filter(number=r.number)) for r in wanted]
    if request_id is not None and not found:
        fail(
            f"the node has no record of a request with the id {request_id!r}: it may still be"
            " running, or be too old; 'kvstore explain' lists the latest",
            code=1,
        )
    if asked.json:
        stories = itertools.zip_longest(found, ranges)  # no ranges: nobody asked for them
        click.echo(as_json(requests=[reasons.story_as_dict(*story) for story in stories]))
    elif one:
        show_story(found[0], ranges[0])
    elif found:
        console().print(table(_STORIES, found))
        if request_id is not None:
            click.echo(f"{len(found)} requests fit {request_id!r}: give one of these ids")
    else:
        click.echo("no request has ended since the node started")


# ── what it looks like ───────────────────────────────────────────────────────────────────────────


def show_story(request: RequestReport, ranges: Sequence[RangeReport]) -> None:
    """Print one request to stdout."""
    lines = {
        "request": request.request,
        "engine": f"{_named(request.engine_id, request.label)}, tenant {request.tenant}, space "
        f"{request.space}",
        "ended": f"{format_us(request.ended_ms_ago * US_PER_MS)} ago",
        "prompt": _prompt(request),
        "outcome": f"{reasons.word(request.outcome)}: {reasons.of_request(request)}"
        if request.outcome
        else "loaded",
        "times": _times(request),
        "saved": _saved(request),
        "stored": f"{request.stored_blocks} blocks of it are stored, or were already",
    }
    if pushed := reasons.of_pushes(request):
        lines["pushed"] = pushed
    _facts(lines)
    _blocks(ranges, request.block_tokens, request.prompt_tokens, request)


_STORIES: Final = (
    TableColumn("request", "request"),
    number("ended", lambda row: f"{format_us(row.ended_ms_ago * US_PER_MS)} ago"),
    number("prompt", "prompt_tokens"),
    number("prefix cache", "local_tokens"),
    number("loaded", "loaded_tokens"),
    number("from disk", "file_tokens"),
    number("lookup", "lookup_us", format_us),
    TableColumn("outcome", lambda row: reasons.word(row.outcome) or "loaded"),
)
"""Columns of the list of requests, which has one line each, newest first."""


def show_prefix(found: PrefixRow) -> None:
    """Print the locations of a prompt's blocks on one node to stdout."""
    lines = {
        "space": f"{_named(found['space'], found['label'])}, tenant {found['tenant']}",
        "prompt": f"{found['prompt_tokens']} tokens, of which a request would find "
        f"{found['held_tokens']}",
    }
    if found["engines"]:
        lines["hbm"] = ", ".join(
            f"{row.blocks} blocks in engine {row.engine} rank {row.rank}"
            for row in found["engines"]
        )
    _facts(lines)
    _blocks(found["ranges"], found["block_tokens"], found["prompt_tokens"], None)


def show_cluster_prefix(found: PrefixRow) -> None:
    """Print the locations of a prompt's blocks, each with its prefix length, to stdout."""
    size, asked, trust = found["block_tokens"], found["asked_blocks"], str(found["trust"])
    prompt = f"{asked} blocks asked for; at most {found['held_blocks']} of them"
    if size is not None:
        prompt = f"{found['prompt_tokens']} tokens, {asked} blocks of {size} asked for"
        prompt += f"; at most {found['held_tokens']} of them"
    is_known = found["holders"] or trust != Trust.STALE.word
    lines = {
        "space": f"{_named(found['space'], found['label'])}, tenant {found['tenant']}",
        "prompt": f"{prompt} at one location" if is_known else prompt.partition(";")[0],
        "index": _TRUSTS.get(trust, trust),
    }
    _facts(lines)
    if found["holders"]:
        title = "blocks from the first on, in this tier or a faster one"
        console().print(table(_HOLDERS, found["holders"], title=title))
    else:
        nobody = "no node holds the first block"
        text = nobody if is_known else "not known: the index is stale"
        console().print(Text(text, style="dim"))


_HOLDERS: Final = (
    TableColumn("node", "node"),
    TableColumn("engine", lambda row: row["engine"] and f"{row['engine']} rank {row['rank']}"),
    TableColumn("trust", "trust"),
    number("gpu", "hbm_blocks"),
    number("dram", "dram_blocks"),
    number("disk", "file_blocks"),
)


def show_curve(rows: Sequence[Any]) -> None:
    """Print a line per capacity of dram (CurveReports), and the effect of twice the dram, to
    stdout."""
    now = next(row for row in rows if row.capacity == "1x")
    if now.trouble:
        click.echo(f"the curve is off until the node restarts, by an error: {now.trouble}")
        return
    if now.hit_ratio is None:
        click.echo(f"not enough lookups yet: {now.blocks} of {now.blocks_needed} blocks")
        return

    def change(row: CurveReport) -> str:
        points = 100 * ((row.hit_ratio or 0) - (now.hit_ratio or 0))
        return "-" if row is now else f"{points:+.1f} points"

    columns = [
        number("", "capacity"),
        number("dram", "capacity_bytes", format_size),
        number("served", lambda row: f"{_least(row)}{row.hit_ratio:.1%}"),
        number("change", change),
        number("prefill saved a day", lambda row: _day(row.prefill_ms_per_day)),
    ]
    console().print(table(columns, rows))
    double = next(row for row in rows if row.capacity == "2x")
    text = f"with {format_size(double.capacity_bytes)} instead of {format_size(now.capacity_bytes)}"
    text += f": {now.hit_ratio:.0%} -> {_least(double)}{double.hit_ratio:.0%} of the looked-up"
    text += " prompt tokens from dram"
    if now.prefill_ms_per_day is not None and double.prefill_ms_per_day is not None:
        more_ms = max(0, double.prefill_ms_per_day - now.prefill_ms_per_day)
        text += f", {_day(more_ms)} of prefill a day"
    click.echo(text)


def _least(row: CurveReport) -> str:
    return ">= " if row.is_least else ""


def _day(ms: int | None) -> str | None:
    return None if ms is None else format_us(ms * US_PER_MS)


def _named(name: str, label: str) -> str:
    return f"{name} ({label})" if label else name


def _facts(lines: dict[str, str]) -> None:
    out = console()
    for name, text in lines.items():
        out.print(Text(f"{name:<9}", style="bold") + Text(printable(text)), soft_wrap=True)
    out.print()


def _prompt(request: RequestReport) -> str:
    loaded = f"{request.loaded_tokens} loaded"
    if request.loaded_tokens:
        dram = request.loaded_tokens - request.file_tokens - request.peer_tokens
        loaded += f" ({dram} from dram, {request.file_tokens} from disk"
        loaded += f", {request.peer_tokens} from other nodes)" if request.peer_tokens else ")"
    computed = max(0, request.prompt_tokens - request.local_tokens - request.loaded_tokens)
    return (
        f"{request.prompt_tokens} tokens: {request.local_tokens} in the engine's own cache, "
        f"{loaded}, {computed} computed"
    )


def _times(request: RequestReport) -> str:
    return (
        f"queued {format_us(request.queued_us)}, lookup {format_us(request.lookup_us)}, "
        f"waited for blocks {format_us(request.promotion_us)}, load {format_us(request.load_us)}"
        + f", first token {format_us(request.first_token_us)}"
        * bool(request.first_token_us)
    )


def _saved(request: RequestReport) -> str:
    waited_us = request.lookup_us + request.promotion_us + request.load_us
    net, saved, waited = map(format_us, (request.saved_us - waited_us, request.saved_us, waited_us))
    return f"{net}: {saved} of prefill less {waited} of waits"


def _blocks(
    ranges: Sequence[RangeReport],
    block_tokens: int,
    prompt_tokens: int,
    request: RequestReport | None,
) -> None:
    def tokens(row: RangeReport) -> str:
        end = (row.first_block + row.blocks) * block_tokens
        return _from_to(row.first_block * block_tokens, end)

    columns = [
        TableColumn("blocks", lambda row: _from_to(row.first_block, row.first_block + row.blocks)),
        TableColumn("tokens", tokens),
        TableColumn("tier", "tier"),
        TableColumn("node", "node"),
        TableColumn("missed", lambda row: reasons.word(row.reason)),
        TableColumn("why", lambda row: reasons.of_range(row, request)),
    ]
    if not any(row.node for row in ranges):
        del columns[3]
    made = table(columns, ranges)
    end = (ranges[-1].first_block + ranges[-1].blocks) * block_tokens if ranges else 0
    if end < prompt_tokens:
        full = "a block that is not full is never stored"
        dashes = ["-"] * (len(columns) - 4)
        made.add_row("-", _from_to(end, prompt_tokens), *dashes, "no full block", full)
    console().print(made)


def _from_to(begin: int, end: int) -> str:
    return str(begin) if end == begin + 1 else f"{begin}-{end - 1}"


# ── savings ───────────────────────────────────────────────────────────────────────────────────────

MS_PER_HOUR: Final = 3_600_000
ALL: Final = "(all)"

SavingsRow = dict[str, Any]
"""Savings of one model, tenant and tier, or of all of them: fields of a SavingsReport, with hours
in place of milliseconds, and `net_money`.
"""


def in_hours(rows: Sequence[SavingsReport], gpu_hour: float | None) -> list[SavingsRow]:
    """Rows of a node in hours, and their sum as the last row. Hours saved, spent and lost are those
    of engines, each of which computes on all of its GPUs at once. `gpu_hour`: price of one, in any
    currency; None: there is no `net_money`.
    """
    names = SavingsReport.__struct_fields__[3:]
    sums = (sum(getattr(row, name) for row in rows) for name in names)
    found = [msgspec.structs.asdict(row) for row in (*rows, SavingsReport(ALL, ALL, ALL, *sums))]
    for row in found:
        for name in names[1:]:
            row[name.replace("_ms", "_hours")] = row.pop(name) / MS_PER_HOUR
        row["net_money"] = None if gpu_hour is None else row["net_gpu_hours"] * gpu_hour
    return found


def inspect_savings(asked: InspectSettings) -> None:
    """Print the savings of one node since its start."""
    with node_client(asked.socket) as client:
        rows = in_hours(client.rows("savings", SavingsReport), asked.gpu_hour)
    if asked.json:
        *each, total = rows
        click.echo(as_json(savings=each, total=[total]))
        return
    if len(rows) == 1:
        click.echo("no request has loaded or waited for anything since the node started")
        return
    console().print(table(_savings_columns(asked.gpu_hour), rows, title="savings"))


def _savings_columns(gpu_hour: float | None) -> list[TableColumn]:
    """Columns of the table; money only where there is a price."""
    money = number("net money", "net_money", _figure)
    return [
        *(TableColumn(name, name) for name in ("model", "tenant", "tier")),
        number("loaded tokens", "loaded_tokens", "{:,}".format),
        *(number(f"{kind} h", f"{kind}_hours", _figure) for kind in ("saved", "spent", "lost")),
        number("net GPU h", "net_gpu_hours", _figure),
        *([money] if gpu_hour is not None else []),
    ]


def _figure(value: Any) -> Text:
    """Text of a number; small ones with more digits, and losses in yellow."""
    digits = 2 if abs(value) >= 10 else 4
    shown = round(value, digits) + 0.0  # no minus before a zero
    return Text(f"{shown:,.{digits}f}", style="yellow" if value < 0 else "")
