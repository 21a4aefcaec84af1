"""What each feature costs: the price list in `kvstore/README.md` is true, and the sum only falls.

    python -m tests.style.test_prices     writes the counts into the list

Does not cover: protobuf's generated code, `.proto` and CUDA sources.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.style.tree import PRODUCT, ROOT, Nodes, asked, nodes

LINES_MAX = 44_487
"""Lines of code of the product, without blanks, comments and docstrings. It only falls: whoever
needs more takes it from elsewhere."""
SLACK = 40
"""Whoever removes more than that lowers `LINES_MAX`, so that it does not come back."""
LIST = ROOT / "kvstore" / "README.md"
_ROW = re.compile(
    r"^\| (?P<feature>[^|]+) \| (?P<lines>[\d,]+) \| (?P<places>`[^|]+`) \|$", re.MULTILINE
)
_NEAR = 0.05
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


class Price(NamedTuple):
    """A row of the list."""

    feature: str
    lines: int
    places: tuple[str, ...]
    """Folders and files, from `kvstore/` or the root."""


def code_lines(text: str, found: Nodes) -> int:
    """Lines that hold code."""
    quoted: set[int] = set()
    for node in found:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            quoted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - quoted)


@asked
def _code_lines_of(file: Path, found: Nodes) -> Iterator[int]:
    if file.parts[0] in PRODUCT:
        yield code_lines((ROOT / file).read_text(), found)


def counted() -> dict[str, int]:
    """Lines of code of each module of the product."""
    return {str(file): lines for file, its in _code_lines_of().items() for lines in its}


def prices(page: str) -> list[Price]:
    """Rows of the list on a page."""
    return [
        Price(
            row["feature"], int(row["lines"].replace(",", "")), tuple(row["places"][1:-1].split())
        )
        for row in _ROW.finditer(page)
    ]


def owner(module: str, rows: list[Price]) -> tuple[str, str]:
    """Feature that a module is for, and the place that says so: the longest that names it."""
    named = [
        (place, row.feature)
        for row in rows
        for place in row.places
        if any(f"{base}{place}" == module[: len(base + place)] for base in ("kvstore/", ""))
    ]
    place, feature = max(named, key=lambda each: len(each[0]), default=("", ""))
    return feature, place


def costs(modules: dict[str, int], rows: list[Price]) -> Counter[str]:
    """Lines of each feature; those of modules that no row names under ''."""
    lines = Counter[str]({row.feature: 0 for row in rows})
    for module, count in modules.items():
        lines[owner(module, rows)[0]] += count
    return lines


def far(rows: list[Price], lines: Counter[str]) -> list[str]:
    """Rows whose number is more than a twentieth off."""
    return [
        f"{row.feature}: {lines[row.feature]:,}, and the list says {row.lines:,}"
        for row in rows
        if abs(row.lines - lines[row.feature]) > lines[row.feature] * _NEAR
    ]


def test_the_product_only_gets_smaller() -> None:
    lines = sum(counted().values())
    assert lines <= LINES_MAX, "take the lines from elsewhere"
    assert lines > LINES_MAX - SLACK, "lower LINES_MAX: what has gone does not come back"


def test_every_module_has_a_price() -> None:
    rows = prices(LIST.read_text())
    assert [module for module in counted() if not owner(module, rows)[0]] == []
    named = {owner(module, rows)[1] for module in counted()}
    assert [place for row in rows for place in row.places if place not in named] == []


def test_the_price_list_is_true() -> None:
    rows = prices(LIST.read_text())
    lines = costs(counted(), rows)
    for feature, count in lines.most_common():
        sys.stdout.write(f"{count:7,}  {feature}\n")
    assert far(rows, lines) == [], "python -m tests.style.test_prices writes them"


def test_what_is_wrong_in_a_list_is_seen() -> None:
    rows = prices("| disk | 100 | `tiers/file/ cli/fsck.py` |\n| tiers | 50 | `tiers/` |\n")
    modules = {"kvstore/tiers/file/log.py": 60, "kvstore/cli/fsck.py": 50, "kvstore/tiers/a.py": 49}
    lines = costs(modules | {"kvstore/net/new.py": 7}, rows)
    assert lines == {"disk": 110, "tiers": 49, "": 7}
    assert far(rows, lines) == ["disk: 110, and the list says 100"]


def test_lines_of_code_are_counted_without_text() -> None:
    text = '"""Map.\n\nMore.\n"""\n\nx = (  # why\n    1\n)\ny = """\n\n"""\n'
    assert code_lines(text, nodes(text)) == 6


def _write(path: Path) -> None:
    page = path.read_text()
    lines = costs(counted(), prices(page))
    path.write_text(
        _ROW.sub(
            lambda row: f"| {row['feature']} | {lines[row['feature']]:,} | {row['places']} |", page
        )
    )
    sys.stdout.write(f"{sum(lines.values()):,} lines, at most {LINES_MAX:,}\n")


if __name__ == "__main__":
    _write(LIST)
