"""The site of `make docs` shows every page, and its links lead on or name a file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from scripts.site_links import DOCS, on_page_markdown
from tests.style.tree import ROOT


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
