"""ADRs and the changelog keep their form; every test that the page of threats names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.style.tree import ROOT, files

ADRS = sorted((ROOT / "kvstore" / "docs" / "adr").glob("[0-9]*.md"))
SECTIONS = [
    "Decision",
    "Why",
    "Rejected",
    "What we gave up",
    "How we would notice that it is wrong",
]
WORDS_MAX, WORDS_OF_ONE_MAX = 18_000, 1_600
"""An ADR holds what is decided now: superseded parts go, the log of the repository has them."""
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_adrs_are_numbered_without_gap() -> None:
    numbers = [int(path.name[:4]) for path in ADRS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.stem)
def test_an_adr_has_its_number_status_and_sections(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {int(path.name[:4])}. ")
    assert re.search(r"^Status: (proposed|accepted|superseded by \d+)", text, re.MULTILINE)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS


def test_adrs_stay_short() -> None:
    words = {path.stem: len(re.findall(r"\S*\w\S*", path.read_text())) for path in ADRS}
    assert {stem: count for stem, count in words.items() if count > WORDS_OF_ONE_MAX} == {}
    assert sum(words.values()) <= WORDS_MAX


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.stem)
def test_files_and_metrics_that_an_adr_names_exist(path: Path) -> None:
    assert missing(path.read_text()) == []


def missing(text: str) -> list[str]:
    """Names in code spans that nothing has: files of the repository, records, metrics."""
    page = (ROOT / "kvstore" / "docs" / "reference" / "metrics.md").read_text()
    places = ("", "kvstore", "bench/results")
    found = []
    for name in re.findall(r"`([^`\s]+)`", text):
        if re.fullmatch(r"[\w/]+\.(py|json|toml|md|proto|txt|cu)", name) and "/" in name:
            is_there = any((ROOT / place / name).is_file() for place in places)
        elif name.endswith(".json"):
            is_there = (ROOT / "bench" / "results" / name).is_file()
        elif re.match(r"(vllm:)?kvstore_\w+", name):
            is_there = f"`{name.partition('{')[0]}`" in page
        else:
            continue
        found += [name] * (not is_there)
    return found


def test_every_adr_that_is_referred_to_exists() -> None:
    found = []
    for file in files():
        if file.suffix in {".py", ".md", ".proto", ".toml", ".yml", ".cu"}:
            numbers = re.findall(r"\bADRs? 0*(\d+)", (ROOT / file).read_text("utf-8"))
            found += [f"{file}: ADR {n}" for n in numbers if not 1 <= int(n) <= len(ADRS)]
    assert found == []


def test_a_name_that_nothing_has_is_seen() -> None:
    names = ["tests/gone.py", "gone.json", "engine/gone.py", "kvstore_gone_total", "vllm:kvstore_x"]
    assert missing(" ".join(f"`{name}`" for name in names)) == names
    assert (
        missing('`kvstore_slots{state="sealed"}` `wire/messages.py` `cluster.json` `README`') == []
    )


def test_the_changelog_keeps_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    released = re.compile(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d")
    assert all(released.fullmatch(version) for version in versions[1:])
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= CHANGES


# ── threats ───────────────────────────────────────────────────────────────────────────────────────


PAGE = (ROOT / "kvstore" / "docs" / "threats.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]*\.py)::(\w+)`", PAGE)))
THREATS = {f"T{number}" for number in (*range(1, 8), *range(10, 14))}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    assert name in names


def test_every_threat_has_a_row_and_every_row_a_test_or_a_word_why_not() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert {row.split("|")[1].strip() for row in rows} >= THREATS
    without = [row for row in rows if "`tests/" not in row]
    assert len(without) == 1
    assert "| none: " in without[0]
