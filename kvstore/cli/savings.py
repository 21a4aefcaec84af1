"""`kvstore inspect savings`: GPU hours that loads saved and cost, and what they are worth.

Covers: hours, money, the row of all. Does not cover: the sums (`kvstore.engine.why.ledger`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from kvstore.cli.ask import node_client
from kvstore.cli.commands import as_json
from kvstore.cli.tables import TableColumn, console, number, table
from kvstore.engine import SavingsReport

MS_PER_HOUR: Final = 3_600_000
ALL: Final = "(all)"
KINDS: Final = ("saved", "spent", "lost")


Row = dict[str, Any]
"""Savings of one model, tenant and tier, or of all of them: fields of a SavingsReport, with hours
in place of milliseconds, and `net_money`.
"""


def in_hours(rows: Sequence[SavingsReport], gpu_hour: float | None) -> list[Row]:
    """Rows of a node in hours, and their sum as the last row. Hours saved, spent and lost are those
    of engines, each of which computes on all of its GPUs at once. `gpu_hour`: price of one, in any
    currency; None: there is no `net_money`.
    """
    names = SavingsReport.__struct_fields__[3:]
    sums = (sum(getattr(row, name) for row in rows) for name in names)
    return [_in_hours(row, gpu_hour) for row in (*rows, SavingsReport(ALL, ALL, ALL, *sums))]


def _in_hours(report: SavingsReport, gpu_hour: float | None) -> Row:
    row: Row = {}
    for name, value in msgspec.structs.asdict(report).items():
        is_time = name.endswith("_ms")
        row[name.replace("_ms", "_hours")] = value / MS_PER_HOUR if is_time else value
    return row | {"net_money": None if gpu_hour is None else row["net_gpu_hours"] * gpu_hour}


def inspect_savings(socket: Path, *, gpu_hour: float | None, json_: bool) -> None:
    """Print the savings of one node since its start."""
    with node_client(socket) as client:
        rows = in_hours(client.rows("savings", SavingsReport), gpu_hour)
    if json_:
        *each, total = rows
        click.echo(as_json(savings=each, total=[total]))
        return
    if len(rows) == 1:
        click.echo("no request has loaded or waited for anything since the node started")
        return
    console().print(table(columns(gpu_hour), rows, title="savings"))


def columns(gpu_hour: float | None) -> list[TableColumn]:
    """Columns of the table; money only where there is a price."""
    shown = [
        *(TableColumn(name, itemgetter(name)) for name in ("model", "tenant", "tier")),
        number("loaded tokens", itemgetter("loaded_tokens"), "{:,}".format),
        *(number(f"{kind} h", itemgetter(f"{kind}_hours"), _figure) for kind in KINDS),
        number("net GPU h", itemgetter("net_gpu_hours"), _figure),
    ]
    money = number("net money", itemgetter("net_money"), _figure)
    return shown if gpu_hour is None else [*shown, money]


def _figure(value: Any) -> Text:
    """Text of a number; small ones with more digits, and losses in yellow."""
    digits = 2 if abs(value) >= 10 else 4
    shown = round(value, digits) + 0.0  # no minus before a zero
    return Text(f"{shown:,.{digits}f}", style="yellow" if value < 0 else "")
