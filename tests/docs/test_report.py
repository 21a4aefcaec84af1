"""bench/REPORT.md is what its template and the records make, and README prints nothing that it does
not say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench import report
from bench.report import ReportError, make_report, read_record, record_names, split_row
from tests.style.tree import ROOT

README = (ROOT / "README.md").read_text("utf-8")
ROWS = {
    "TTFT of a dram hit": "dram hit, time to first token",
    "TTFT of a disk hit": "disk hit, cold page cache",
    "wrong answers in 40": "wrong answers in 40, one bit flipped",
    "tokens/s when prompts exceed": "multi-round questions",
    "throughput of cold prompts": "throughput of cold prompts",
    "index updates per second": "block updates per second",
    "TTFT of a hit fetched": "hit fetched from another node ÷ prefix-cache hit",
}
"""Rows of the README that print measurements, and those of the report that they stand for."""
VERDICTS = {"✓": ("met", "won"), "≈": ("within interval",), "✗": ("missed",), "won": ("won",)}
"""Of the report, and the words that the README has for them."""


def made() -> str:
    return make_report(report.TEMPLATE.read_text("utf-8"), read_record, record_names())


def test_the_report_is_what_the_records_say() -> None:
    assert report.REPORT.read_text("utf-8") == made(), "make report"


def test_every_loss_is_named_without_the_rows_above_it() -> None:
    text = report.REPORT.read_text("utf-8").split("## Where kvstore loses")[1].split("\n## ")[0]
    rows = [split_row(line) for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 5
    assert [name for _, name, *_ in rows if name.startswith("the same")] == []


def test_every_record_is_in_the_report() -> None:
    text = report.REPORT.read_text("utf-8")
    assert [name for name in record_names() if f"](results/{name}.json)" not in text] == []


# ── README ───────────────────────────────────────────────────────────────────────────────────────

_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")


def report_rows() -> list[list[str]]:
    lines = report.REPORT.read_text("utf-8").splitlines()
    return [split_row(line) for line in lines if line.startswith("|")]


def wrong_row(cells: list[str]) -> str:
    """What is wrong with a row of the README; empty: nothing."""
    part = next((ROWS[name] for name in ROWS if cells[0].startswith(name)), None)
    if part is None:
        return f"{cells[0]}: no row of the report is named for it"
    wanted = _NUMBER.findall(re.sub(r"\([^)]*\)|`[^`]*`", "", cells[1]))
    for row in report_rows():
        if part in row[0] and wanted and is_among(wanted, _NUMBER.findall(" ".join(row[1:]))):
            said = next(mark for mark in (*VERDICTS, "lost") if mark in row)
            if cells[2].endswith(VERDICTS.get(said, (said,))):
                return ""
            return f"{cells[0]}: {cells[2]}, and the report says {said}"
    return f"{cells[0]}: the report does not say {wanted}"


def is_among(wanted: list[str], found: list[str]) -> bool:
    """In any order: a row of the report has columns that the README writes as one."""
    return not {n for n in wanted if n not in found}


def measured_rows() -> list[list[str]]:
    start = README.index("| | ratio | verdict |")
    lines = README[start:].split("\n\n")[0].splitlines()[2:]
    return [split_row(line) for line in lines]


def test_the_rows_of_the_readme_are_those_of_the_report() -> None:
    rows = measured_rows()
    assert len(rows) >= 6
    assert [told for told in map(wrong_row, rows) if told] == []


def test_a_row_that_is_wrong_is_seen() -> None:
    (row,) = (row for row in measured_rows() if row[0].startswith("index updates"))
    assert wrong_row(row) == ""
    assert "does not say ['1.99']" in wrong_row([row[0], "1.99", row[2]])
    assert "and the report says" in wrong_row([row[0], row[1], "missed"])
    assert "no row of the report" in wrong_row(["of something else", row[1], row[2]])


def missing_numbers(text: str) -> list[str]:
    """Numbers with a decimal point in sentences that the report does not print."""
    sentences = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    sentences = re.sub(r"```.*?```|`[^`]*`|\([^)]*\.json\)", "", sentences, flags=re.DOTALL)
    printed = set(_NUMBER.findall(report.REPORT.read_text("utf-8")))
    versions = re.compile(r"(?:Python|vLLM|LMCache|Apache-) ?\d+[\d.]*(?: or \d+\.\d+)?")
    numbers = _NUMBER.findall(versions.sub("", sentences))
    return [n for n in numbers if "." in n and n not in printed]


def test_the_sentences_of_the_readme_print_numbers_of_the_report() -> None:
    assert missing_numbers(README.replace("3.4 GB", "")) == []  # what vLLM's build takes
    assert missing_numbers("It comes 15.9 × sooner.") == ["15.9"]


# ── places ───────────────────────────────────────────────────────────────────────────────────────

RECORD: dict[str, Any] = {
    "hit": {"over": 0.8123, "over_interval_95": [0.7, 0.9], "ms": 12.5},
    "peer": {"value": 2.0, "interval_95": [1.5, 2.5]},
    "rows": [{"part": 1.0}, {"part": 3.0}],
}


def fill(text: str) -> str:
    return make_report(text, {"a": RECORD}.__getitem__, [])


@pytest.mark.parametrize(
    ("place", "printed"),
    [
        ("{{a/hit/over @ .2f}}", "0.81"),
        ("{{a/hit/over @ .2f±}}", "0.81 [0.70, 0.90]"),
        ("{{a/peer/value @ .1f±}}", "2.0 [1.5, 2.5]"),
        ("{{a/hit/ms × 0.001 @ .3f}}", "0.013"),
        ("{{a/hit/ms ÷ a/peer/value @ .2f}}", "6.25"),
        ("{{a/rows/1/part @ .0f}}", "3"),
        ("{{min a/rows/*/part @ .0f}} {{max a/rows/*/part @ .0f}}", "1 3"),
        ("{{sum a/rows/*/part × -1 @ .0f}}", "−4"),
    ],
)
def test_a_place_prints_what_stands_in_the_record(place: str, printed: str) -> None:
    assert fill(place) == f"{printed}\n"


@pytest.mark.parametrize(
    ("cells", "goal", "verdict", "away"),
    [
        ("{{a/hit/over @ .2f}}", "≤ 0.9", "✓", None),
        ("{{a/hit/over @ .2f}}", "≥ 0.9 s", "✗", "1.11 ×"),
        ("{{a/hit/over @ .2f±}}", "≤ 0.75", "≈", None),
        ("{{a/hit/over @ .2f±}}", "≤ 0.65", "✗", "1.25 ×"),
        ("{{a/hit/over @ .2f}}; {{a/peer/value @ .1f}}", "≤ 1; ≤ 1", "✓ ✗", "2.00 ×"),
        ("{{a/hit/over @ .2f}}; {{a/peer/value @ .1f!}}", "≤ 2", "✓", None),
        ("{{a/hit/over @ .2f}}; {{a/peer/value @ .1f!}}", "lowest", "lost", "2.46 ×"),
        ("{{a/hit/over @ .2f}}; {{a/peer/value @ .1f!}}", "highest", "won", None),
        ("{{a/hit/over @ .2f}}; {{a/hit/over @ .2f!}}", "highest", "equal", None),
        ("{{a/hit/over @ .2f}}; {{a/peer/value @ .1f!}}", "≤ 3, lowest", "✓ lost", "2.46 ×"),
        ("{{a/hit/ms @ .1f-}}; {{a/peer/value @ .1f}}", "2", "✓", None),
    ],
)
def test_a_verdict_is_that_of_the_goal(cells: str, goal: str, verdict: str, away: str) -> None:
    head = "| measured | result | goal | |\n|---|---|---|---|\n"
    text = fill(f"{{{{losses}}}}\n\n## S\n{head}| x | {cells} | {goal} | {{{{verdict}}}} |\n")
    rows = [split_row(line) for line in text.splitlines() if line.startswith("|")]
    assert rows[-1][-1] == verdict
    losses = [[goal, away] for name, *_, goal, away in rows[:-1] if name == "S"]
    assert losses == ([[goal, away]] if away else [])


def test_a_number_may_have_a_goal_of_its_own() -> None:
    head = "| trace | gain |\n|---|---|\n"
    text = fill(
        head + "| x | {{a/peer/value @ .1f ≥ 3}} |\n| y | {{a/hit/ms @ .1f ≥ 3}} |\n\n{{losses}}"
    )
    assert "| x | 2.0 ✗ |" in text
    assert "| y | 12.5 ✓ |" in text
    assert "| x | gain: 2.0 | ≥ 3 | 1.50 × |" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{a/hit/gone @ .2f}}", "nothing stands at a/hit/gone"),
        ("{{a/hit/ms @ .2f±}}", "no interval stands beside a/hit/ms"),
        ("{{b/hit @ .2f}}", "is not filled"),
        ("{{a/hit @ .2f}}", "is not filled"),
        ("{{a/hit/ms}}", "is no place that this program fills"),
        (
            "| a | b | goal | |\n|-|-|-|-|\n| x | {{a/hit/ms @ .1f}} | soon | {{verdict}} |",
            "1 numbers have the goal 'soon'",
        ),
    ],
)
def test_a_place_that_nothing_fills_is_refused(text: str, said: str) -> None:
    with pytest.raises(ReportError, match=re.escape(said)):
        fill(text)


def test_the_template_has_no_measured_number_that_no_record_gives() -> None:
    """Beside goals, first cells, and what is said of other runs, a result comes from a record."""
    found = []
    header: list[str] = []
    for line in report.TEMPLATE.read_text("utf-8").splitlines():
        is_first = not header
        header = (header or split_row(line)) if line.startswith("|") else []
        if is_first or not header:
            continue
        for column, cell in list(zip(header, split_row(line), strict=True))[1:]:
            if column in {"goal", "by", "run", "only read"}:
                continue
            plain = re.sub(
                r"\{\{[^}]*\}\}|\((?:other runs|another run|[^)]*another run)[^)]*\)|`[^`]*`",
                "",
                cell,
            )
            if re.search(r"(?<![\w→])\d+\.\d+", plain):
                found.append(cell)
    assert found == []


def surface_cell(rate: float, ratio: float, low: float) -> dict[str, Any]:
    return {
        "hit_rate": rate,
        "ttft_over_without": ratio,
        "ttft_over_without_interval_95": [low, ratio + 0.5],
        "ttft_ms": {"p50": 1234.5},
        "without_ttft_ms": {"p50": 1000.0},
        "processor_s_of_a_request": 0.75,
        "without_processor_s_of_a_request": 0.5,
        "loaded_mib_of_a_request": 8.0,
    }


def test_a_cell_that_is_surely_slower_than_without_kvstore_is_a_loss() -> None:
    cells = [surface_cell(0.0, 1.2, 1.1), surface_cell(0.5, 1.2, 0.9), surface_cell(1.0, 0.1, 0.1)]
    surface = {"rows": [{"tier": "file", "load": 4, "cells": cells}]}
    text = make_report("{{losses}}\n\n{{surface}}", {"surface": surface}.__getitem__, [])
    assert text.count("4 at once") == 1
    assert "| file, 4 at once, 0% stored | 1.20 [1.10, 1.70] | ≤ 1 | 1.20 × |" in text
    row = "| file | 4 | 1,000 ms, 0.50 s | "
    assert f"{row}1.20 [1.10, 1.70] | 1.20 [0.90, 1.70] | 0.10 [0.10, 0.60] |" in text
    assert f"{row}1,234 | 1,234 | 1,234 |" in text
    assert f"{row}0.75 s, 8.0 MiB | " in text


def test_samples_of_a_record_are_counted() -> None:
    its = {"samples": [1.0, 2.0, 3.0], "interval_95": [1, 2], "rows": [{"ms": 1.0}, {"ms": 2.0}]}
    text = make_report("{{records}}", json.loads(json.dumps({"a": its})).__getitem__, ["a"])
    assert text.splitlines()[-1].endswith("| 3 |")
