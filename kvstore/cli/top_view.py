"""Layout of `kvstore top`: one line a node; two short tables where one is too wide.

Pure: figures in, something to print out. Does not cover: where figures come from (`top`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.ask import printable
from kvstore.cli.top import GONE, SILENT, UP, Figures
from kvstore.proto.rows import UNKNOWN

WIDE_COLUMNS: Final = 138
"""From here on all is in one table."""
NODE_COLUMNS: Final = 12
"""Longer names are cut in a table, not in JSON."""
HEAD_LINES: Final = 2
TABLE_LINES: Final = 2
US_PER_MS: Final = 1000
_UNITS: Final = "BKMGTPE"
_STYLES: Final = {UP: "green", SILENT: "yellow", GONE: "red", UNKNOWN: "yellow"}

Column = tuple[str, Callable[[Figures], Text]]


def page(
    figures: Sequence[Figures],
    *,
    head: str,
    trouble: str = "",
    width: int,
    height: int | None = None,
) -> RenderableType:
    """All nodes, as many of them as fit `height` lines.

    Args:
        figures: of each node.
        head: the first line.
        trouble: why there is no answer, or it may be wrong.
        width: of the terminal.
        height: of the terminal; None: any.
    """
    is_wide = width >= WIDE_COLUMNS
    groups = [(*MEMORY, *TRAFFIC)] if is_wide else [MEMORY, TRAFFIC]
    shown = figures[: _room(height, len(groups), has_trouble=bool(trouble))]
    parts: list[RenderableType] = [Text(_cut(head, width), style="bold")]
    if trouble:
        parts.append(Text(_cut(printable(trouble).plain, width), style="yellow"))
    for group in groups:
        parts += [Text(""), _table(group, shown)]
    if not figures:
        parts.append(Text("no node is known", style="dim"))
    elif len(shown) < len(figures):
        more = len(figures) - len(shown)
        parts.append(Text(_cut(f"and {more} more: --json has all of them", width), style="dim"))
    return Group(*parts)


def _room(height: int | None, tables: int, *, has_trouble: bool) -> int | None:
    """Nodes that fit; None: all."""
    if height is None:
        return None
    lines = height - HEAD_LINES - has_trouble - TABLE_LINES * tables
    return max(1, lines // tables)


def _table(columns: Sequence[Column], figures: Sequence[Figures]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("node", header_style="dim", no_wrap=True, max_width=NODE_COLUMNS)
    for name, _ in columns:
        justify = "left" if name in ("state", "index") else "right"
        table.add_column(name, header_style="dim", no_wrap=True, justify=justify)  # type: ignore[arg-type]
    for each in figures:
        table.add_row(printable(each.node), *(cell(each) for _, cell in columns))
    return table


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def size(count: float | None) -> str:
    """Bytes in five characters or less: 0B, 9.9M, 512G."""
    if count is None:
        return "-"
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    digits = f"{count:.1f}" if unit and count < 10 else f"{count:.0f}"
    return digits + _UNITS[unit]


def _of(used: int | None, whole: int | None) -> Text:
    return Text(f"{size(used)}/{size(whole)}" if whole else "-")


def _state(each: Figures) -> Text:
    return Text(each.state, style=_STYLES[each.state])


def _hits(each: Figures) -> Text:
    return Text("-" if each.hit_percent is None else f"{each.hit_percent:.0f}%")


def _count(count: int | None, style: str = "") -> Text:
    return Text("-" if count is None else str(count), style=style if count else "")


def _ms(us: int | None) -> Text:
    if not us:
        return Text("-")
    ms = us / US_PER_MS
    return Text(f"{ms:.1f}ms" if ms < 100 else f"{ms:.0f}ms")


def _index(each: Figures) -> Text:
    reached, count = each.replicas_reached, each.replicas
    if count and reached is not None and reached < count:
        return Text(f"{reached} of {count}", style="yellow")
    return Text(each.index or ("-" if not count else "told"))


MEMORY: Final[Sequence[Column]] = (
    ("state", _state),
    ("dram", lambda each: _of(each.dram_used_bytes, each.dram_bytes)),
    ("file", lambda each: _of(each.file_used_bytes, each.file_bytes)),
    ("hits", _hits),
    ("leases", lambda each: _count(each.leases)),
    ("engines", lambda each: _count(each.engines)),
    ("quar.", lambda each: _count(each.slots_quarantined, "yellow")),
)
TRAFFIC: Final[Sequence[Column]] = (
    ("stored/s", lambda each: Text(size(each.stored_bytes_per_s))),
    ("loaded/s", lambda each: Text(size(each.leased_bytes_per_s))),
    ("fetched/s", lambda each: Text(size(each.fetched_bytes_per_s))),
    ("lent/s", lambda each: Text(size(each.lent_bytes_per_s))),
    ("p50", lambda each: _ms(each.fetch_p50_us)),
    ("p99", lambda each: _ms(each.fetch_p99_us)),
    ("index", _index),
)
