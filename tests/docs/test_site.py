"""Links of the site that leave the documentation; `make docs` itself refuses broken ones."""

from __future__ import annotations

from pathlib import Path

import yaml

from scripts.site_links import ELSEWHERE, ROOT, rewrite, unbroken
from tests.style.tree import files

PAGE = Path("guides", "cluster.md")


def test_a_link_out_of_the_documentation_is_the_path_of_the_file() -> None:
    text, pictures = rewrite("[a](../../../SECURITY.md#trust)", PAGE)
    assert text == "a (`SECURITY.md`)"
    same, _ = rewrite("[SECURITY.md](../../../SECURITY.md)", PAGE)
    assert same == "SECURITY.md", "once"
    assert pictures == set()


def test_the_page_about_kubernetes_is_a_page_of_the_site() -> None:
    there = rewrite("[a](../../../deploy/README.md#a-cluster)", PAGE)
    assert there == ("[a](../deploy.md#a-cluster)", set())
    back = rewrite("[a](../kvstore/docs/guides/cluster.md#x)", Path("deploy.md"))
    assert back == ("[a](guides/cluster.md#x)", set())
    out = rewrite("[a](../SECURITY.md)", Path("deploy.md"))
    assert out == ("a (`SECURITY.md`)", set())


def test_a_file_beside_a_page_that_lies_elsewhere_is_outside_too() -> None:
    text, pictures = rewrite("[a](results/demo.json), ![b](results/demo.png)", Path("report.md"))
    assert text == "a (`bench/results/demo.json`), ![b](pictures/demo.png)"
    assert pictures == {ROOT / "bench/results/demo.png"}


def test_names_in_table_cells_break_between_words_only() -> None:
    cell = "<td><code>--file PATH:SIZE[,shared]</code> x</td><p><code>a b</code></p>"
    whole = "<td><code>--file <wbr>PATH:SIZE<wbr>[,shared]</code> x</td><p><code>a b</code></p>"
    assert unbroken(cell) == whole


def test_the_site_names_no_repository_that_nobody_has_published() -> None:
    text, _ = rewrite("[a](../../../deploy/)", PAGE)
    assert text == "a (`deploy`)"
    assert "://" not in (ROOT / "mkdocs.yml").read_text()


def test_a_picture_is_copied() -> None:
    text, pictures = rewrite("![a](../../../bench/results/demo.png)", PAGE)
    assert text == "![a](../pictures/demo.png)"
    assert pictures == {ROOT / "bench" / "results" / "demo.png"}


def test_other_links_stay() -> None:
    for link in (
        "[a](sizing.md)",
        "[a](../install.md)",
        "[a](../../../missing.md)",
        "[a](../../../../x)",
        "[a](https://example.org/x)",
        "[a](#x)",
    ):
        assert rewrite(link, PAGE) == (link, set())


def test_a_bar_in_a_code_span_is_bare() -> None:
    assert rewrite("| `a\\|b` | c\\|d |", PAGE)[0] == "| `a|b` | c\\|d |"


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    docs = Path(config["docs_dir"])
    pages = {str(file.relative_to(docs)) for file in files() if docs in file.parents}
    pages = {page for page in pages if page.endswith(".md") and not page.startswith("adr/0")}
    assert set(_leaves(config["nav"])) == pages | ELSEWHERE.keys()


def test_nothing_is_loaded_from_other_hosts() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert not config.keys() & {"repo_url", "extra_javascript"}
    styles = [(ROOT / config["docs_dir"] / path).read_text() for path in config["extra_css"]]
    assert not any("url(" in style or "@import" in style for style in styles)


def _leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(parts, str)
    return [leaf for part in parts for leaf in _leaves(part)]  # type: ignore[attr-defined]
