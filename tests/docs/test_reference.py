"""Pages that are made from the code are those that are there; the site holds every page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from scripts.reference import DOCS, pages
from scripts.site_links import on_page_markdown
from tests.style.tree import ROOT


@pytest.mark.parametrize("path", pages())
def test_a_page_is_what_the_code_makes(path: str) -> None:
    assert (DOCS / path).read_text() == pages()[path], "run: python scripts/reference.py"


def _linked(entry: object) -> set[str]:
    match entry:
        case str():
            return {entry}
        case dict():
            return {page for each in entry.values() for page in _linked(each)}
        case list():
            return {page for each in entry for page in _linked(each)}
    raise AssertionError(entry)


def test_the_site_shows_every_page() -> None:
    shown = _linked(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert shown == {page for page in there if not page.startswith("adr/0")}


def test_links_out_of_the_site_name_the_file() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/sizing.md"))
    text = "[a](upgrade.md) [SECURITY.md](../../../SECURITY.md) [who](../../../SECURITY.md#x)"
    assert on_page_markdown(text, page=page) == (
        "[a](upgrade.md) `SECURITY.md` who (`SECURITY.md`)"
    )
    with pytest.raises(FileNotFoundError, match=r"sizing\.md links to"):
        on_page_markdown("[a](../../../none.md)", page=page)


def test_a_change_of_the_code_shows() -> None:
    assert Path(DOCS / "reference/cli.md").read_text().count("## kvstore ") == 10
