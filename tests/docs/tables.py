"""Rows of the tables in a page, and the numbers that they print as measured."""

from __future__ import annotations

import re
from typing import NamedTuple

_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+\.\d+(?![\w.])")
_GOAL = re.compile(r"\(?goal [≤≥]? ?[\d.]+\)?|[≤≥] ?[\d.]+( [^|]*)?")
_SPAN = re.compile(r"`[^`]*`")
NOT_MEASURED = {"goal", "by"}


class Row(NamedTuple):
    """One row of a table."""

    heading: str
    """Of the section."""
    name: str
    """Its first cell."""
    numbers: tuple[str, ...]
    """With a decimal point, from left to right, the first cell's too, goals left out."""


def rows(text: str) -> list[Row]:
    """All rows of all tables of a page in Markdown."""
    found: list[Row] = []
    heading = ""
    header: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        elif set(line) - set("|-: "):
            measured = [
                _GOAL.sub("", _SPAN.sub("", cell))
                for name, cell in zip(header, cells, strict=True)
                if name not in NOT_MEASURED
            ]
            numbers = tuple(n for cell in measured for n in _NUMBER.findall(cell))
            found.append(Row(heading, cells[0], numbers))
    return found
