"""Links of the site that leave the documentation; `make docs` itself refuses broken ones."""

from __future__ import annotations

from pathlib import Path

import yaml

from scripts.site_links import ROOT, rewrite
from tests.style.tree import files

PAGE = Path("guides", "cluster.md")
REPOSITORY = "https://example.org/kvstore"


def test_a_link_out_of_the_documentation_leads_to_the_repository() -> None:
    text, pictures = rewrite("[a](../../../deploy/README.md#a-cluster)", PAGE, REPOSITORY)
    assert text == f"[a]({REPOSITORY}/blob/main/deploy/README.md#a-cluster)"
    assert pictures == set()


def test_a_folder_is_a_tree() -> None:
    text, _ = rewrite("[a](../../../deploy/)", PAGE, REPOSITORY)
    assert text == f"[a]({REPOSITORY}/tree/main/deploy)"


def test_a_picture_is_copied() -> None:
    text, pictures = rewrite("![a](../../../bench/results/demo.png)", PAGE, REPOSITORY)
    assert text == "![a](../pictures/demo.png)"
    assert pictures == {ROOT / "bench" / "results" / "demo.png"}


def test_other_links_stay() -> None:
    for link in (
        "[a](sizing.md)",
        "[a](../install.md)",
        "[a](../../../missing.md)",
        "[a](../../../../x)",
    ):
        assert rewrite(link, PAGE, REPOSITORY) == (link, set())


def test_a_bar_in_a_code_span_is_bare() -> None:
    assert rewrite("| `a\\|b` | c\\|d |", PAGE, REPOSITORY)[0] == "| `a|b` | c\\|d |"


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    docs = Path(config["docs_dir"])
    pages = {str(file.relative_to(docs)) for file in files() if docs in file.parents}
    pages = {page for page in pages if page.endswith(".md") and not page.startswith("adr/0")}
    assert set(_leaves(config["nav"])) == pages


def test_nothing_is_loaded_from_other_hosts() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert not config.keys() & {"repo_url", "extra_css", "extra_javascript"}


def _leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(parts, str)
    return [leaf for part in parts for leaf in _leaves(part)]  # type: ignore[attr-defined]
