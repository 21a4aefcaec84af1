"""Layout of `kvstore top`: one line a node or router; two short tables where one is too wide.

Nodes above routers. Sentences, such as the troubles of a router's /healthz, follow the tables.
Pure: figures in, something to print out. Does not cover: where figures come from (`top`,
`top_routers`).
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.tables import TableColumn, number, table
from kvstore.cli.top import GONE, UP, Figures
from kvstore.cli.top_routers import UNREADY, RouterFigures
from kvstore.units import US_PER_S, format_size, format_us, short
from kvstore.wording import printable

NOTE_LINES: Final = 3
"""Lines of a sentence at most: /healthz names every worker with a fault."""
_STYLES: Final = {UP: "green", GONE: "red", UNREADY: "red"}
"""The other states are yellow."""


class Seen(NamedTuple):
    """Contents of the screen."""

    nodes: Sequence[Figures] | None
    """None: nodes are not shown."""
    routers: Sequence[RouterFigures]
    trouble: str = ""
    """Why there is no answer, or it may be wrong."""


def page(seen: Seen, head: str, *, width: int, height: int | None = None) -> RenderableType:
    """All nodes and routers, as many of them as fit `height` lines; None: any."""
    most = max(len(seen.nodes or ()), len(seen.routers))
    most = most if height is None else min(most, height)
    while True:
        parts = [_line(head, width, "bold"), *_parts(seen, most, width)]
        lines = sum(part.row_count + 1 if isinstance(part, Table) else 1 for part in parts)
        if most <= 1 or height is None or lines <= height:
            return Group(*parts)
        most -= 1


def _parts(seen: Seen, most: int, width: int) -> Iterator[Text | Table]:
    """All below the first line, with `most` nodes and routers at most."""
    if seen.trouble:
        yield _line(seen.trouble, width, "yellow")
    if seen.nodes is not None:
        yield from _tables(NODES, seen.nodes[:most], width)
        yield from _savings(seen.nodes)
        yield from _left_out(len(seen.nodes) - most, width)
    if seen.routers:
        yield from _tables(ROUTERS, seen.routers[:most], width)
        yield from _troubles(seen.routers[:most], width)
        yield from _left_out(len(seen.routers) - most, width)


def _tables(layout: Layout, figures: Sequence[object], width: int) -> Iterator[Text | Table]:
    name, first, second, wide_columns = layout
    for columns in [(*first, *second)] if width >= wide_columns else [first, second]:
        yield Text("")
        yield table((name, *columns), figures, is_cut=True)


def _left_out(count: int, width: int) -> Iterator[Text]:
    if count > 0:
        yield _line(f"and {count} more: --json has all of them", width, "dim")


def _line(text: str, width: int, style: str = "") -> Text:
    """As much of the text as fits."""
    line = Text(printable(text), style)
    line.truncate(width, overflow="ellipsis")
    return line


def _savings(nodes: Sequence[Figures]) -> Iterator[Text]:
    if not nodes:
        yield Text("no node is known", style="dim")
    elif saved := [each.saved_per_s for each in nodes if each.saved_per_s is not None]:
        line = f"saved: {sum(saved):.2f} s of prefill per second, waits deducted"
        yield Text(line, style="yellow" if sum(saved) < 0 else "")


def _troubles(routers: Sequence[RouterFigures], width: int) -> Iterator[Text]:
    """A sentence for each router that has one."""
    few = textwrap.TextWrapper(
        width, subsequent_indent="  ", max_lines=NOTE_LINES, placeholder=" …"
    )
    for each in routers:
        text = printable(f"{each.router}: {each.trouble}") if each.trouble else ""
        for line in few.wrap(text):
            yield Text(line, style="yellow")


def _size(count: float) -> str:
    return format_size(round(count))


def _seconds(value: float) -> str:
    return format_us(value * US_PER_S)


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state, "yellow"))


def _suspicious(count: int) -> Text:
    return Text(str(count), style="yellow" if count else "")


def _of(used: int | None, whole: int | None) -> str | None:
    """Both in the unit of the whole: 2.5/64 GiB."""
    if not whole:
        return None
    text = format_size(whole)
    return f"{short(float(text.split()[0]) * (used or 0) / whole)}/{text}"


def _index(each: Figures) -> Text | str:
    reached, count = each.replicas_reached, each.replicas
    if not count or reached is None or (each.index and reached >= count):
        return each.index
    return Text(f"{reached} of {count}", style="yellow" if reached < count else "")


def _workers(each: RouterFigures) -> str | None:
    return None if each.workers is None else f"{each.workers_serving}/{each.workers}"


def _full(each: RouterFigures) -> str | None:
    if each.saturation is None:
        return None
    return f"{_percent(100 * each.saturation)} {each.saturation_cause}".rstrip()


class Layout(NamedTuple):
    """Columns of nodes or of routers."""

    name: TableColumn
    """First column of each table."""
    first: Sequence[TableColumn]
    second: Sequence[TableColumn]
    wide_columns: int
    """From here on all is in one table."""


STATE: Final = TableColumn("state", "state", _state)
NODES: Final = Layout(
    TableColumn("node", "node", functools.partial(_line, width=10)),
    [
        STATE,
        number("dram", lambda each: _of(each.dram_used_bytes, each.dram_bytes)),
        number("file", lambda each: _of(each.file_used_bytes, each.file_bytes)),
        number("hits", "hit_percent", _percent),
        number("leases", "leases"),
        number("engines", "engines"),
        number("quarantined", "slots_quarantined", _suspicious),
    ],
    [
        number("stored/s", "stored_bytes_per_s", _size),
        number("loaded/s", "leased_bytes_per_s", _size),
        number("fetched/s", "fetched_bytes_per_s", _size),
        number("served/s", "served_bytes_per_s", _size),
        number("p50", lambda each: each.fetch_p50_us or None, format_us),
        number("p99", lambda each: each.fetch_p99_us or None, format_us),
        TableColumn("index", _index),
    ],
    148,
)
ROUTERS: Final = Layout(
    TableColumn("router", "router", functools.partial(_line, width=21)),
    [
        STATE,
        number("req/s", "requests_per_s", short),
        number("rej/s", "rejected_per_s", short),
        number("flight", "in_flight"),
        number("held", "held"),
        number("ttft", "ttft_s", _seconds),
        number("pred.", "ttft_predicted_s", _seconds),
        number("hits", "hit_percent", _percent),
        number("pred.", "hit_predicted_percent", _percent),
    ],
    [
        number("workers", _workers),
        number("keys", "parity"),
        number("full", _full),
        number("remote", "remote_prefills_per_s", short),
        number("peers", "other_routers"),
    ],
    144,
)
