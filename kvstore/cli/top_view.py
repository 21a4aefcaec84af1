"""Layout of `kvstore top`: for each process its health, its facts, and a table a section.

Sections and figures are those of the page (`kvstore/net/site/app.js`), of which a terminal has less
room: the last columns that do not fit are left out, and rows beyond the lines. Pure: states in,
something to print out. Does not cover: where states come from (`top`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvstore.cli.tables import TableColumn, cell, number, table, title_of
from kvstore.units import short
from kvstore.wording import printable

ROWS_PRINTED: Final = 20
"""Most rows of a table where lines are not limited."""
TEXT_MAX: Final = 60
COLUMNS: Final = {
    "unserved": "engine, reason",
    "tiers": "tier, used_bytes, capacity_bytes, share=used_bytes/capacity_bytes, blocks,"
    " slots_quarantined, reads, writes, policy",
    "hits": "source, blocks, share=blocks/whole",
    "flows": "flow, now, total",
    "savings": "model, tier, saved_ms, waited=spent_ms, net_gpu_ms, tenant",
    "prediction": "prompt tokens=prompt_tokens_total,"
    " cached=cached_tokens_total/prompt_tokens_total,"
    " predicted=predicted_tokens_total/prompt_tokens_total, TTFT=achieved_ms, predicted_ms",
    "pools": "pool, saturation=saturation/1, cause",
    "transfers": "part=kind, backend, count, p50_us, p99_us, bytes_per_s",
    "workers": "worker=name, state, in_flight, request_count, failure_count,"
    " cached=cached_tokens/prompt_tokens, predicted=predicted_tokens/prompt_tokens, pool, role,"
    " why",
    "nodes": "node, trust, dram_used_bytes, dram_bytes, file_used_bytes, file_bytes,"
    " hits=blocks_hit/blocks_hit+blocks_missed, engines, saved_ms, waited_ms, models, address",
    "requests": "ended_ms_ago, model=label, prompt_tokens, loaded_tokens, lookup_us, promotion_us,"
    " load_us, outcome=text, tenant, engine=engine_id",
    "decisions": "decided=ms_ago, worker=chosen, prompt_tokens, cached_tokens, expected_tokens,"
    " ttft_s, predicted_s, held_s, end, model, tenant",
}
"""Section → fields, the most important first. `title=field` gives a title; `a/b` is a share of
field b, or of a sum `b+c`.
"""
_GOOD: Final = {"state": "up", "trust": "exact"}
State = dict[str, Any]
"""Sections of a /state.json (`kvstore.net.site`)."""
Rows = list[dict[str, Any]]


class Seen(NamedTuple):
    """A process, with its last state."""

    place: str
    """Its socket or address."""
    state: State | None = None
    """Last state; None: it has not answered yet."""
    rates: Mapping[str, float] = {}
    """Flow → change per second between the last two states."""
    trouble: str = ""
    """Reason for no answer now; empty: it has answered."""


def screen(
    seen: Sequence[Seen], head: str = "", *, width: int, height: int | None = None
) -> RenderableType:
    """Output for all processes, with as many rows as fit `height` lines; None: ROWS_PRINTED per
    table.

    Raises LookupError, TypeError, ValueError, AttributeError, ArithmeticError: a state is invalid.
    """
    sections = [_sections(each) for each in seen]
    lengths = [len(rows) for its in sections for rows in its.values()]
    heads = [[_line(text, width, style) for text, style in _head(each)] for each in seen]
    parts: list[RenderableType] = [_line(head, width, "bold")] if head else []
    most, free = ROWS_PRINTED, (height or 0) - len(parts) - sum(map(len, heads))
    while height and most and sum(1 + min(most, length) for length in lengths) > free:
        most -= 1
    for each, its, found in zip(seen, heads, sections, strict=True):
        parts += its
        for name, rows in found.items() if most else ():
            total = max(len(rows), (each.state or {})["totals"].get(name, 0))
            parts.append(_table(COLUMNS[name], rows[:most], total, width))
    return Group(*parts)


def _head(seen: Seen) -> list[tuple[str, str]]:
    """(text, style) of the lines above a process's tables: role, reason for an old state, health,
    facts.
    """
    state = seen.state
    if state is None:
        return [(f"{seen.place}: {seen.trouble}", "yellow")]
    health, role = state["health"], f"kvstore {state['role']} {state.get('name', '')}".rstrip()
    style = "green" if health["text"] == "ok" else "yellow" if health["is_ok"] else "red"
    facts = " · ".join(f"{name} {value}" for name, value in state["facts"].items())
    late = [(f"shown as it was: {seen.trouble}", "yellow")] if seen.trouble else []
    return [(f"{role} at {seen.place}", "bold"), *late, (health["text"], style), (facts, "")]


def _sections(seen: Seen) -> dict[str, Rows]:
    """Section → rows, for each section that has some."""
    made = dict(seen.state or {})
    made["tiers"] = [row for row in made.get("tiers", ()) if row["capacity_bytes"]]
    if "hits" in made:
        counts = {f"hit: {tier}": count for tier, count in made["hits"].items()}
        often = sorted(made["misses"].items(), key=lambda each: -each[1])
        counts |= {f"missed: {why}": count for why, count in often}
        row = {"whole": sum(counts.values())}
        made["hits"] = [
            row | {"source": k, "blocks": count} for k, count in counts.items() if count
        ]
    if its := made.get("prediction"):
        ttfts = {f"{kind}_ms": value for kind, value in its["ttft_p50_ms"].items()}
        made["prediction"] = [its | ttfts] if its["prompt_tokens_total"] else []
    flows, rates = made.get("flows", {}), seen.rates
    made["flows"] = [
        {
            "flow": title_of(name),
            "now": f"{cell(name, rates)}/s" if name in rates else "…",
            "total": cell(name, flows),
        }
        for name, total in flows.items()
        if total
    ]
    return {name: rows for name in COLUMNS if (rows := made.get(name))}


def _table(fields: str, rows: Rows, total: int, width: int) -> Table:
    """Table of rows, with as many of the columns as fit `width`. `total`: number of rows
    there are.
    """
    columns = list[TableColumn]()
    for each in fields.split(", "):
        title, _, field = each.rpartition("=")
        kind = TableColumn if isinstance(rows[0].get(field), str) else number
        columns.append(kind(title or title_of(field), partial(_cell, field)))
    if total > len(rows):
        columns[0] = columns[0]._replace(title=f"{columns[0].title} ({len(rows)} of {total})")
    out = Console(width=10 * width)
    while True:
        made = table(columns, rows, is_cut=True)
        if len(columns) == 1 or Measurement.get(out, out.options, made).maximum <= width:
            return made
        columns.pop()


def _cell(field: str, row: dict[str, Any]) -> Text | str | None:
    part, _, whole = field.partition("/")
    value = row.get(part)
    if whole:
        sums = [1 if name == "1" else row[name] or 0 for name in whole.split("+")]
        return f"{short(100 * value / sum(sums))} %" if value is not None and any(sums) else None
    if part in _GOOD and value:
        return Text(printable(value), "green" if value == _GOOD[part] else "yellow")
    return value[:TEXT_MAX] if isinstance(value, str) else cell(part, row)


def _line(text: str, width: int, style: str = "") -> Text:
    """The text as one line, cut to `width`."""
    line = Text(printable(text), style)
    line.truncate(width, overflow="ellipsis")
    return line
