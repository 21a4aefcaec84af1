"""Layout of `kvstore top --router`: one line a router; two short tables where one is too wide.

A sentence, of /healthz or why there is no answer, follows its row. Pure: figures in, something to
print out. Does not cover: where figures come from (`top_routers`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.text import Text

from kvstore.cli.ask import printable
from kvstore.cli.top import SILENT, UP
from kvstore.cli.top_routers import DRAINING, UNREADY, RouterFigures
from kvstore.cli.top_view import cut
from kvstore.units import US_PER_S, format_us, short

WIDE_COLUMNS: Final = 144
NAME_COLUMNS: Final = 21
_STYLES: Final = {UP: "green", DRAINING: "yellow", UNREADY: "red", SILENT: "yellow"}
_FEW: Final[dict[str, Any]] = {"max_lines": 3, "placeholder": " …"}
"""/healthz names every worker with a fault."""

Cell = Callable[[RouterFigures], str]


def routers_page(
    figures: Sequence[RouterFigures], *, width: int, height: int | None = None
) -> list[Text]:
    """Lines; `height`: as many at the most."""
    is_wide = width >= WIDE_COLUMNS
    tables = [(*REQUESTS, *WORKERS)] if is_wide else [REQUESTS, WORKERS]
    lines: list[Text] = []
    for number, columns in enumerate(tables, start=1):
        is_last = number == len(tables)
        lines += [Text(""), *_table(columns, figures, width=width, has_sentences=is_last)]
    if height is not None and len(lines) > height:
        hidden = "more routers: --json has all of them"
        lines = [*lines[: max(0, height - 1)], Text(hidden[:width], style="dim")]
    return lines


def _table(
    columns: Sequence[tuple[str, Cell]],
    figures: Sequence[RouterFigures],
    *,
    width: int,
    has_sentences: bool,
) -> list[Text]:
    names = [cut(printable(each.router).plain, NAME_COLUMNS) for each in figures]
    rows = [[cell(each) for _, cell in columns] for each in figures if each.state != SILENT]
    heads = [head for head, _ in columns]
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    first = max(map(len, ["router", *names]))
    states = max(map(len, ["state", *(each.state for each in figures)]))

    gap = "  " if width >= WIDE_COLUMNS else " "

    def line(cells: Sequence[str]) -> str:
        return gap.join(f"{cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True))

    lines = [Text(cut(f"{'router':{first}} {'state':{states}} {line(heads)}", width), style="dim")]
    left = iter(rows)
    for name, each in zip(names, figures, strict=True):
        text = Text(f"{name:{first}} ").append(f"{each.state:{states}}", _STYLES[each.state])
        if each.state != SILENT:
            text.append(cut(f" {line(next(left))}", width - len(text)))
        lines.append(text)
        if has_sentences:
            sentence = textwrap.wrap(printable(each.trouble).plain, width - 2, **_FEW)
            lines += [Text(f"  {part}", style="yellow") for part in sentence]
    return lines


def _rate(value: float | None) -> str:
    return "-" if value is None else short(value)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_us(value * US_PER_S)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _full(each: RouterFigures) -> str:
    if each.saturation is None:
        return "-"
    text = f"{100 * each.saturation:.0f}%"
    return f"{text} {each.saturation_cause}".rstrip()


REQUESTS: Final[Sequence[tuple[str, Cell]]] = (
    ("req/s", lambda each: _rate(each.requests_per_s)),
    ("rej/s", lambda each: _rate(each.rejected_per_s)),
    ("flight", lambda each: _count(each.in_flight)),
    ("held", lambda each: _count(each.held)),
    ("ttft", lambda each: _seconds(each.ttft_s)),
    ("pred.", lambda each: _seconds(each.ttft_predicted_s)),
    ("hits", lambda each: _percent(each.hit_percent)),
    ("pred.", lambda each: _percent(each.hit_predicted_percent)),
)
WORKERS: Final[Sequence[tuple[str, Cell]]] = (
    ("workers", lambda each: f"{_count(each.workers_serving)}/{_count(each.workers)}"),
    ("keys", lambda each: each.parity or "-"),
    ("full", _full),
    ("remote", lambda each: _rate(each.remote_prefills_per_s)),
    ("peers", lambda each: _count(each.other_routers)),
)
