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
from kvstore.units import format_size, format_us, short

WIDE_COLUMNS: Final = 148
"""From here on all is in one table."""
NODE_COLUMNS: Final = 10
"""Longer names are cut in a table, not in JSON."""
HEAD_LINES: Final = 3
"""With the last one, on savings."""
TABLE_LINES: Final = 2
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
    parts: list[RenderableType] = [Text(cut(head, width), style="bold")]
    if trouble:
        parts.append(Text(cut(printable(trouble).plain, width), style="yellow"))
    for group in groups:
        parts += [Text(""), _table(group, shown)]
    if saved := [each.saved_per_s for each in figures if each.saved_per_s is not None]:
        line = f"saved: {sum(saved):.2f} s of prefill per second, waits deducted"
        parts.append(Text(line, style="yellow" if sum(saved) < 0 else ""))
    if not figures:
        parts.append(Text("no node is known", style="dim"))
    elif len(shown) < len(figures):
        more = len(figures) - len(shown)
        parts.append(Text(cut(f"and {more} more: --json has all of them", width), style="dim"))
    return Group(*parts)


def _room(height: int | None, tables: int, *, has_trouble: bool) -> int | None:
    """Nodes that fit; None: all."""
    if height is None:
        return None
    lines = height - HEAD_LINES - has_trouble - TABLE_LINES * tables
    return max(1, lines // tables)


def _table(columns: Sequence[Column], figures: Sequence[Figures]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("node", header_style="dim", no_wrap=True, max_width=NODE_COLUMNS)
    for name, _ in columns:
        justify = "left" if name in ("state", "index") else "right"
        table.add_column(name, header_style="dim", no_wrap=True, justify=justify)  # type: ignore[arg-type]
    for each in figures:
        table.add_row(printable(each.node), *(cell(each) for _, cell in columns))
    return table


def cut(text: str, width: int) -> str:
    """The text, or as much of it as fits."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _size(count: float | None) -> Text:
    return Text("-" if count is None else format_size(round(count)))


def _of(used: int | None, whole: int | None) -> Text:
    """Both in the unit of the whole: 2.5/64 GiB."""
    if not whole:
        return Text("-")
    text = format_size(whole)
    return Text(f"{short(float(text.split()[0]) * (used or 0) / whole)}/{text}")


def _state(each: Figures) -> Text:
    return Text(each.state, style=_STYLES[each.state])


def _hits(each: Figures) -> Text:
    return Text("-" if each.hit_percent is None else f"{each.hit_percent:.0f}%")


def _count(count: int | None, style: str = "") -> Text:
    return Text("-" if count is None else str(count), style=style if count else "")


def _duration(us: int | None) -> Text:
    return Text(format_us(us) if us else "-")


def _index(each: Figures) -> Text:
    reached, count = each.replicas_reached, each.replicas
    if not count or reached is None or (each.index and reached >= count):
        return Text(each.index or "-")
    return Text(f"{reached} of {count}", style="yellow" if reached < count else "")


MEMORY: Final[Sequence[Column]] = (
    ("state", _state),
    ("dram", lambda each: _of(each.dram_used_bytes, each.dram_bytes)),
    ("file", lambda each: _of(each.file_used_bytes, each.file_bytes)),
    ("hits", _hits),
    ("leases", lambda each: _count(each.leases)),
    ("engines", lambda each: _count(each.engines)),
    ("quarantined", lambda each: _count(each.slots_quarantined, "yellow")),
)
TRAFFIC: Final[Sequence[Column]] = (
    ("stored/s", lambda each: _size(each.stored_bytes_per_s)),
    ("loaded/s", lambda each: _size(each.leased_bytes_per_s)),
    ("fetched/s", lambda each: _size(each.fetched_bytes_per_s)),
    ("served/s", lambda each: _size(each.lent_bytes_per_s)),
    ("p50", lambda each: _duration(each.fetch_p50_us)),
    ("p99", lambda each: _duration(each.fetch_p99_us)),
    ("index", _index),
)
