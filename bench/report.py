"""`make report`: bench/REPORT.md from its template and the records in bench/results.

REPORT.md.in is the report with places for numbers. A place `{{PATH @ FORMAT}}` holds what stands in
a record: the record's name and its keys, between slashes. `A ÷ B` is a ratio, `A × 0.001` another
unit, and `min`, `max` or `sum` before a path with `*` is over all that match. Behind the format:

±    with the 95 % interval that stands beside the number
≤ 1  with ✓ or ✗, for a goal of this number alone
!    the goal of the row is about the numbers that are marked so, where not about all
-    not about this one

In a table with a column "goal", `{{verdict}}` is ✓ or ✗ for each number of the row behind the first
cell, ≈ when its interval includes the goal. A goal of "lowest" or "highest" is that of the number
marked "!" among the others, and the verdict won, equal or lost; it may follow a limit, as in
"≤ 5, lowest". `{{losses}}`, `{{surface}}` and
`{{records}}` are tables made here. Nothing else is computed: what the records' ratios are made from
is checked by tests/docs/test_figures.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # bench/ is not installed

from bench import record

TEMPLATE: Final = record.ROOT / "bench" / "REPORT.md.in"
REPORT: Final = record.ROOT / "bench" / "REPORT.md"
Read = Callable[[str], Any]
"""A record by its name."""
_PLACE: Final = re.compile(r"\{\{([^{}]+?) @ ([^{}±!≤≥-]*)([±!-]*)([≤≥][^{}]*)?\}\}")
_PLACE_ALONE: Final = re.compile(r"\{\{[^{}]+? @ [^{}]*\}\}")
_GOAL: Final = re.compile(r"([≤≥])\s*([\d.]+)|^([\d.]+)$")
_OVER_ALL: Final[dict[str, Callable[[list[float]], float]]] = {"min": min, "max": max, "sum": sum}


class ReportError(Exception):
    """One sentence about a place of the template that no record fills."""


class Number(NamedTuple):
    """One place of the template, filled."""

    value: float
    interval: tuple[float, float] | None
    printed: str
    marks: str
    goal: str
    """Of this number alone."""
    cell: tuple[str, str] = ("", "")
    """Column and filled cell that it stands in."""


class Loss(NamedTuple):
    """A row whose goal was missed, or in which another system is better."""

    section: str
    name: str
    result: str
    goal: str
    away: float
    """The factor between it and the goal, or the best other: at least 1."""


@functools.cache
def read_record(name: str) -> Any:
    """The record as it is written."""
    return json.loads((record.RESULTS / f"{name}.json").read_text("utf-8"))


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


def value_of(expression: str, read: Read) -> float:
    """What a place holds. Raises ReportError."""
    expression = expression.strip()
    if " ÷ " in expression:
        over, under = expression.split(" ÷ ")
        return value_of(over, read) / value_of(under, read)
    if " × " in expression:
        path, factor = expression.split(" × ")
        return value_of(path, read) * float(factor)
    how, _, path = expression.partition(" ")
    if how in _OVER_ALL:
        return float(_OVER_ALL[how](list(_matches(path, read))))
    (found,) = _matches(expression, read)
    return float(found)


def _matches(path: str, read: Read) -> Iterator[Any]:
    """Everything at a path, whose parts may be patterns."""
    name, *keys = path.split("/")
    found = [read(name)]
    for key in keys:
        found = [inner for outer in found for inner in _inside(outer, key)]
    if not found:
        raise ReportError(f"nothing stands at {path} in the records")
    yield from found


def _inside(outer: Any, key: str) -> list[Any]:
    if isinstance(outer, list):
        outer = {str(number): inner for number, inner in enumerate(outer)}
    if not isinstance(outer, dict):
        return []
    if key in outer:
        return [outer[key]]
    return [inner for name, inner in outer.items() if fnmatch.fnmatchcase(name, key)]


def interval_of(path: str, read: Read) -> tuple[float, float]:
    """The 95 % interval beside a number: under its name, or in the same container."""
    above, _, _ = path.rpartition("/")
    for beside in (f"{path}_interval_95", f"{above}/interval_95"):
        try:
            return value_of(f"{beside}/0", read), value_of(f"{beside}/1", read)
        except ReportError:
            continue
    raise ReportError(f"no interval stands beside {path}")


def _fill(place: re.Match[str], read: Read) -> Number:
    expression, form, marks, goal = place.groups()
    try:
        value = value_of(expression, read)
        interval = interval_of(expression, read) if "±" in marks else None
        printed = _print(value, form)
        if interval:
            printed += f" [{', '.join(_print(edge, form) for edge in interval)}]"
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ReportError(f"the place {place[0]} is not filled: {error!r}") from error
    return Number(value, interval, printed, marks, goal or "")


def _print(value: float, form: str) -> str:
    return f"{value:{form.strip()}}".replace("-", "−")


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────


class Verdict(NamedTuple):
    """Of one or several numbers with a goal."""

    text: str
    away: float
    """The largest factor between a missed goal and its number; 0: none is missed."""


def judge(numbers: Sequence[Number], goal: str) -> Verdict:
    """Of the numbers of a row. Raises ReportError: as many goals as numbers, or one for all."""
    if ", " in goal:  # a limit, and a place among the others
        both = [judge(numbers, each) for each in goal.split(", ")]
        return Verdict(" ".join(v.text for v in both), max(v.away for v in both))
    marked = [number for number in numbers if "!" in number.marks]
    ours = marked or [number for number in numbers if "-" not in number.marks]
    if goal in {"lowest", "highest"}:
        others = [n.value for n in numbers if n not in ours and "-" not in n.marks]
        if len(ours) != 1 or not others:
            raise ReportError(f"one number with ! beside others is what {goal!r} is about")
        away = ours[0].value / min(others) if goal == "lowest" else max(others) / ours[0].value
        text = "lost" if away > 1 else "equal" if away == 1 else "won"
        return Verdict(text, away if away > 1 else 0.0)
    goals = [(sign or "=", float(limit or exact)) for sign, limit, exact in _GOAL.findall(goal)]
    if not ours or len(goals) not in {1, len(ours)}:
        raise ReportError(f"{len(ours)} numbers have the goal {goal!r}")
    one_each = goals if len(goals) == len(ours) else goals * len(ours)
    verdicts = [_judge_one(n, *each) for n, each in zip(ours, one_each, strict=True)]
    return Verdict(
        " ".join(verdict.text for verdict in verdicts), max(verdict.away for verdict in verdicts)
    )


def _judge_one(number: Number, sign: str, limit: float) -> Verdict:
    if number.interval and number.interval[0] < limit < number.interval[1]:
        return Verdict("≈", 0.0)
    if sign == "=":
        is_met, away = abs(number.value - limit) < 0.005, number.value / (limit or 1)
    elif sign == "≤":
        is_met, away = number.value <= limit, number.value / limit
    else:
        is_met, away = number.value >= limit, limit / number.value
    return Verdict("✓", 0.0) if is_met else Verdict("✗", away)


# ── tables made here ─────────────────────────────────────────────────────────────────────────────


def _losses(found: Sequence[Loss]) -> str:
    rows = [
        f"| {loss.section} | {loss.name} | {loss.result} | {loss.goal} | {loss.away:.2f} × |"
        for loss in sorted(found, key=lambda loss: -loss.away)
    ]
    head = "| section | measured | result | goal | away by |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def _surface(read: Read) -> str:
    rows = read("surface")["rows"]
    grids = {
        "Time to first token with kvstore ÷ without:": lambda cell: _print_ratio(cell),
        "Milliseconds, median:": lambda cell: f"{cell['ttft_ms']['p50']:,.0f}",
        "Processor seconds and MiB loaded, of a request:": lambda cell: (
            f"{cell['processor_s_of_a_request']:.2f} s, {cell['loaded_mib_of_a_request']:.1f} MiB"
        ),
    }
    return "\n\n".join(f"{title}\n\n{_grid(rows, text)}" for title, text in grids.items())


def _grid(rows: Sequence[Any], text: Callable[[Any], str]) -> str:
    rates = [f"{cell['hit_rate']:.0%}" for cell in rows[0]["cells"]]
    lines = [
        f"| tier | requests at once | without kvstore | {' | '.join(rates)} stored |",
        "|---|---|---|" + "---|" * len(rates),
    ]
    for row in rows:
        alone = row["cells"][0]
        without = (
            f"{alone['without_ttft_ms']['p50']:,.0f} ms,"
            f" {alone['without_processor_s_of_a_request']:.2f} s"
        )
        cells = " | ".join(text(cell) for cell in row["cells"])
        lines.append(f"| {row['tier']} | {row['load']} | {without} | {cells} |")
    return "\n".join(lines)


def _print_ratio(cell: Any) -> str:
    low, high = cell["ttft_over_without_interval_95"]
    return f"{cell['ttft_over_without']:.2f} [{low:.2f}, {high:.2f}]"


def _surface_losses(read: Read) -> Iterator[Loss]:
    """Cells that are slower than without kvstore, with all of their interval."""
    for row in read("surface")["rows"]:
        for cell in row["cells"]:
            if cell["ttft_over_without_interval_95"][0] > 1:
                name = f"{row['tier']}, {row['load']} at once, {cell['hit_rate']:.0%} stored"
                over = cell["ttft_over_without"]
                yield Loss("Hit rate, load and tier", name, _print_ratio(cell), "≤ 1", over)


def _records(read: Read, names: Sequence[str]) -> str:
    lines = ["| record | date | commit | processor | seed | samples |", "|---|---|---|---|---|---|"]
    for name in names:
        its = read(name)
        environment = its.get("environment", {})
        count = sum(1 for _ in _samples(its))
        lines.append(
            f"| [{name}](results/{name}.json) | {environment.get('date', '')[:10] or '–'}"
            f" | {environment.get('commit', '')[:8] or '–'} | {environment.get('cpu', '–')}"
            f" | {its.get('seed', '–')} | {f'{count:,}' if count else 'summaries only'} |"
        )
    return "\n".join(lines)


def _samples(value: Any) -> Iterator[float]:
    """Numbers in lists: what was measured one by one. Intervals are lists, too, of two."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _samples(inner)
    elif isinstance(value, list):
        are_numbers = all(isinstance(one, (int, float)) for one in value)
        if not are_numbers:
            for inner in value:
                yield from _samples(list(inner.values()) if _is_row(inner) else inner)
        elif len(value) > 2:
            yield from value


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, (int, float)) for one in value.values())


# ── page ─────────────────────────────────────────────────────────────────────────────────────────


class Table:
    """The table of a section that is being filled; it notes what is lost."""

    def __init__(self, section: str, header: str, losses: list[Loss]) -> None:
        self.section = section
        self.columns = split_row(header)
        self.losses = losses

    def fill_row(self, line: str, read: Read) -> str:
        """The row with its numbers and verdicts. Raises ReportError."""
        cells: list[str] = []
        numbers: list[Number] = []
        for column, cell in zip(self.columns, split_row(line), strict=True):
            its = [_fill(place, read) for place in _PLACE.finditer(cell)]
            printed = [self._print(number, cells[0] if cells else "", column) for number in its]
            cell = "".join(
                p + n for p, n in zip(_PLACE_ALONE.split(cell), [*printed, ""], strict=True)
            )
            numbers += [n._replace(cell=(column, cell)) for n in its] if cells else []
            cells.append(cell)  # the first one says what is measured
        if "{{verdict}}" in cells:
            goal = cells[self.columns.index("goal")]
            try:
                verdict = judge(numbers, goal)
            except ReportError as error:
                raise ReportError(f"{self.section}, {cells[0]}: {error}") from error
            cells[cells.index("{{verdict}}")] = verdict.text
            chosen = [n for n in numbers if "!" in n.marks] or numbers
            results = dict.fromkeys(number.cell for number in chosen)
            self._note(verdict, cells[0], "; ".join(cell for _, cell in results), goal)
        return f"| {' | '.join(cells)} |"

    def _print(self, number: Number, name: str, column: str) -> str:
        if not number.goal:
            return number.printed
        verdict = judge([number], number.goal)
        self._note(verdict, name, f"{column}: {number.printed}", number.goal)
        return f"{number.printed} {verdict.text}"

    def _note(self, verdict: Verdict, name: str, result: str, goal: str) -> None:
        if verdict.away:
            self.losses.append(Loss(self.section, name, result, goal, verdict.away))


def make_report(template: str, read: Read, names: Sequence[str]) -> str:
    """The report. `names`: of all records. Raises ReportError."""
    lines: list[str] = []
    losses: list[Loss] = []
    section = ""
    table: Table | None = None
    for line in template.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("|"):
            table = None
            line = _PLACE.sub(lambda place: _fill(place, read).printed, line)
        elif table is None:
            table = Table(section, line, losses)
        elif set(line) - set("|-: "):
            line = table.fill_row(line, read)
        lines.append(line)
    text = "\n".join(lines) + "\n"
    losses += _surface_losses(read) if "{{surface}}" in text else []
    tables: dict[str, Callable[[], str]] = {
        "{{losses}}": lambda: _losses(losses),
        "{{surface}}": lambda: _surface(read),
        "{{records}}": lambda: _records(read, names),
    }
    for place, made in tables.items():
        if place in text:
            text = text.replace(place, made())
    if left := re.search(r"\{\{[^}]*\}\}", text):
        raise ReportError(f"{left[0]} is no place that this program fills")
    return text


def split_row(line: str) -> list[str]:
    """Cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def record_names() -> list[str]:
    """Of all committed records."""
    return sorted(path.stem for path in record.RESULTS.glob("*.json"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="bench/REPORT.md from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing, 1 if it differs")
    options = parser.parse_args(arguments)
    try:
        text = make_report(TEMPLATE.read_text("utf-8"), read_record, record_names())
    except ReportError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    if options.check:
        return int(REPORT.read_text("utf-8") != text)
    REPORT.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
