"""Tables in a terminal: columns as data, and how the rows of a node look.

Does not cover: where rows come from (`ask`, `prefix`, `top`), texts of reasons
(`kvstore.obs.reasons`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.engine.trust import NO_PASS
from kvstore.engine.why.findings import SPACE_DIGITS
from kvstore.engine.why.report import NO_BUDGET, NodeReport, TierReport
from kvstore.proto.rows import Row
from kvstore.units import US_PER_MS, US_PER_S, format_size, format_us
from kvstore.wording import printable

WIDE_COLUMNS: Final = 240
"""Width of output that is no terminal: scripts must not see a line break in a row."""


class TableColumn(NamedTuple):
    """One column of a table."""

    title: str
    value: str | Callable[[Any], object]
    """Name of a field of the row, which may be a mapping, or a function of the row; None and "" are
    shown as -."""
    form: Callable[[Any], str | Text] = str
    justify: Literal["left", "right"] = "left"

    def cell(self, row: object) -> Text:
        """Content of this column in a row."""
        value = _field(self.value, row) if isinstance(self.value, str) else self.value(row)
        if not isinstance(value, Text):
            value = "-" if value in (None, "") else self.form(value)
        return value if isinstance(value, Text) else Text(printable(value))


def _field(name: str, row: object) -> Any:
    """Value of a field; None: a mapping lacks it."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name)


def number(
    title: str, value: str | Callable[[Any], object], form: Callable[[Any], str | Text] = str
) -> TableColumn:
    """A column of figures, to the right."""
    return TableColumn(title, value, form, "right")


def table(
    columns: Iterable[TableColumn],
    rows: Sequence[object],
    *,
    title: str | None = None,
    is_cut: bool = False,
) -> Table:
    """Table with one line per row. `is_cut`: cells that do not fit are cut, not wrapped, and
    columns stand closer.
    """
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    made.header_style, made.padding = "dim", (0, 1, 0, 0) if is_cut else (0, 1)
    for column in columns:
        made.add_column(column.title, justify=column.justify, no_wrap=is_cut)
    for row in rows:
        made.add_row(*(column.cell(row) for column in columns))
    return made


def console() -> Console:
    """Console on stdout, as wide as the terminal, or wide enough for scripts."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDE_COLUMNS)


# ── rows of a node ───────────────────────────────────────────────────────────────────────────────

_OF_DISKS: Final = ("not_admitted", "over_budget", "budget_left_bytes", "reads", "writes")
_OF_DRAM: Final = (
    *("pinned_bytes", "slots_sealed", "slots_granted", "slots_quarantined", "slots_leased"),
)
NOT_OF: Final = {"dram": _OF_DISKS, "file": _OF_DRAM, "hbm": (*_OF_DISKS, *_OF_DRAM)}
"""Tier → fields that do not apply to it."""
BREAKERS: Final = {"closed": "ok", "half-open": "being tried again", "open": "off: errors"}
"""Circuit breaker of a disk → text."""
_DURATION: Final = re.compile(r"(?:^|_)(us|ms|s)(_ago|)$")
"""Unit of a duration at the end of a field's name."""
_UNITS_US: Final = {"us": 1, "ms": US_PER_MS, "s": US_PER_S}


def show(found: dict[str, list[Row]]) -> None:
    """Print tables to stdout: one line a row, numbers to the right, sizes readable."""
    out = console()
    for at, (topic, every) in enumerate(found.items()):
        rows = [row for row in every if not _is_absent(row)]
        if at:
            out.print()
        nodes = [row for row in rows if isinstance(row, NodeReport)]
        if topic == "nodes" and not any(row.connections or row.owners for row in nodes):
            out.print(Text(topic, style="bold"), _without_engines(rows))
        elif rows:
            tiers = [row for row in rows if isinstance(row, TierReport)]
            out.print(_columns(topic, tiers) if tiers else _table(topic, rows))
        else:
            out.print(Text(topic, style="bold"), Text("none", style="dim"))


def _without_engines(rows: Sequence[Row]) -> Text:
    """Figures of a node without engines as one sentence, in place of a row of zeros."""
    values = (pair for row in rows for pair in msgspec.structs.asdict(row).items())
    facts = [f"{title_of(name)} {value}" for name, value in values if value]
    return Text(printable(", ".join(["no engine is attached", *facts])))


def _is_absent(row: Row) -> bool:
    """Whether a row is of a tier that this node does not have."""
    return isinstance(row, TierReport) and not row.capacity_bytes and not row.blocks


def _table(topic: str, rows: Sequence[Row]) -> Table:
    """Table with one line per row and a column per field."""
    columns = [
        TableColumn(
            title_of(name),
            functools.partial(cell, name),
            justify="right" if any(type(getattr(row, name)) is int for row in rows) else "left",
        )
        for name in rows[0].__struct_fields__
    ]
    return table(columns, rows, title=topic)


def _columns(topic: str, rows: Sequence[TierReport]) -> Table:
    """Table with a column per tier and a line per field: there are few tiers, with many fields that
    apply to some of them only.
    """
    tiers = [number(row.tier, functools.partial(_cell_of_tier, row)) for row in rows]
    heads = TableColumn("", title_of, functools.partial(Text, style="dim"))
    names = TierReport.__struct_fields__[1:]
    shown = [name for name in names if any(tier.cell(name).plain != "-" for tier in tiers)]
    return table([heads, *tiers], shown, title=topic)


def _cell_of_tier(row: TierReport, name: str) -> Text | str | None:
    return None if name in NOT_OF.get(row.tier, ()) else cell(name, row)


def title_of(name: str) -> str:
    """Title of a field: its name without the unit."""
    name = name.removesuffix("_bytes").replace("_per_", "/")
    return _DURATION.sub(r"\2", name).replace("_", " ")


def cell(name: str, row: Row | Mapping[str, Any]) -> Text | str | None:
    """Value of a field as people read it, formatted by the field's name. A mapping may lack the
    field.
    """
    value = _field(name, row)
    if (name, value) == ("budget_left_bytes", NO_BUDGET):
        return "any"
    if (name, value) in (("pinned_bytes", 0), ("scrub_age_ms", NO_PASS)):
        return None
    if name == "space" and isinstance(value, str):
        return value[:SPACE_DIGITS]
    if name in ("reads", "writes") and isinstance(value, str):
        return f"breaker {BREAKERS.get(value, value)}"
    if name == "quota" and not value:
        return "(all others)"
    if "bytes" in name and isinstance(value, (int, float)):
        return format_size(round(value))
    if isinstance(value, (int, float)) and (found := _DURATION.search(name)):
        return format_us(_UNITS_US[found[1]] * value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("slots_quarantined", "scrub_bad") and value:
        return Text(str(value), style="yellow")
    if isinstance(value, float):
        return f"{value:,.0f}"
    return None if value is None else str(value)
