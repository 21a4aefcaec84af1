"""Every test that the page of threats names exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.style.tree import ROOT

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
