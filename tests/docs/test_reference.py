"""The reference pages are what `scripts/reference.py` makes from the code; nothing is missing."""

from __future__ import annotations

import re

import pytest

from kvstore.cli.main import cli
from kvstore.config.settings import IndexSettings, NodeSettings, RouterSettings, table
from kvstore.obs.metrics import BY_NAME
from scripts import reference

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_script_makes(name: str) -> None:
    assert (reference.DOCS / name).read_text() == PAGES[name], "run: python scripts/reference.py"


def test_every_metric_is_on_its_page() -> None:
    named = re.findall(r"^\| `(kvstore_\w+)` \|", PAGES["reference/metrics.md"], re.MULTILINE)
    assert sorted(named) == sorted(BY_NAME)


def test_every_setting_is_on_its_page() -> None:
    keys = re.findall(
        r"^\| `--.*?` \| `([a-z-]+)` \|", PAGES["reference/settings.md"], re.MULTILINE
    )
    rows = [*table(NodeSettings), *table(IndexSettings), *table(RouterSettings)]
    assert sorted(keys) == sorted(row.key for row in rows)


def test_every_command_and_decision_is_on_its_page() -> None:
    named = re.findall(r"^## kvstore ([\w-]+)$", PAGES["reference/cli.md"], re.MULTILINE)
    assert sorted(named) == sorted(cli.commands)
    files = {path.name for path in (reference.DOCS / "adr").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", PAGES["adr/index.md"])) >= files


@pytest.mark.parametrize("row", re.findall(r"^\| `-.+$", "\n".join(PAGES.values()), re.MULTILINE))
def test_every_flag_has_a_meaning(row: str) -> None:
    assert len(re.split(r"(?<!\\)\|", row)[-2].strip()) > 8
