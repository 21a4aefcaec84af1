"""ADRs and the changelog keep their form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.style.tree import ROOT

ADRS = sorted((ROOT / "kvstore" / "docs" / "adr").glob("[0-9]*.md"))
SECTIONS = ["Context", "Decision", "What we gave up", "How we would notice that it is wrong"]
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_adrs_are_numbered_without_gap() -> None:
    numbers = [int(path.name[:4]) for path in ADRS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.stem)
def test_an_adr_has_its_number_status_and_sections(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {int(path.name[:4])}. ")
    assert re.search(r"^Status: (proposed|accepted|superseded by \d+)", text, re.MULTILINE)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS


def test_the_changelog_keeps_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    released = re.compile(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d")
    assert all(released.fullmatch(version) for version in versions[1:])
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= CHANGES
