"""`kvstore inspect savings`: GPU hours that loads saved and cost, and what they are worth.

Covers: hours, money, the row of all. Does not cover: the sums (`kvstore.engine.why.ledger`).
"""

from __future__ import annotations

from collections.abc import Sequence
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


class SavingsRow(msgspec.Struct, frozen=True):
    """Savings in hours of one model, tenant and tier, or of all of them."""

    model: str
    tenant: str
    tier: str
    loaded_tokens: int
    saved_hours: float
    """Hours of engines, also in `spent_hours` and `lost_hours`: an engine computes on all of its
    GPUs at once.
    """
    spent_hours: float
    lost_hours: float
    net_gpu_hours: float
    """Hours saved less hours spent, times GPUs; negative: a loss."""
    net_money: float | None = None
    """`net_gpu_hours` at the price of a GPU hour; None: no price was given."""


def in_hours(rows: Sequence[SavingsReport], gpu_hour: float | None) -> list[SavingsRow]:
    """Rows of a node in hours, and their sum as the last row. `gpu_hour`: price of one, in any
    currency.
    """
    names = SavingsReport.__struct_fields__[3:]
    sums = (sum(getattr(row, name) for row in rows) for name in names)
    every = [*rows, SavingsReport(ALL, ALL, ALL, *sums)]
    return [_in_hours(row, gpu_hour) for row in every]


def _in_hours(row: SavingsReport, gpu_hour: float | None) -> SavingsRow:
    net = row.net_gpu_ms / MS_PER_HOUR
    return SavingsRow(
        *(row.model, row.tenant, row.tier, row.loaded_tokens),
        saved_hours=row.saved_ms / MS_PER_HOUR,
        spent_hours=row.spent_ms / MS_PER_HOUR,
        lost_hours=row.lost_ms / MS_PER_HOUR,
        net_gpu_hours=net,
        net_money=None if gpu_hour is None else net * gpu_hour,
    )


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
        *(TableColumn(name, name) for name in ("model", "tenant", "tier")),
        number("loaded tokens", "loaded_tokens", "{:,}".format),
        number("saved h", "saved_hours", _figure),
        number("spent h", "spent_hours", _figure),
        number("lost h", "lost_hours", _figure),
        number("net GPU h", "net_gpu_hours", _figure),
    ]
    return shown if gpu_hour is None else [*shown, number("net money", "net_money", _figure)]


def _figure(value: Any) -> Text:
    """Text of a number; small ones with more digits, and losses in yellow."""
    digits = 2 if abs(value) >= 10 else 4
    shown = round(value, digits) + 0.0  # no minus before a zero
    return Text(f"{shown:,.{digits}f}", style="yellow" if value < 0 else "")
