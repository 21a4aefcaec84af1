"""One word for each thing (docs/glossary.md): retired ones do not come back to pages for users.

Not held to it yet: ADRs, docs/threats.md, docstrings and log messages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.style.tree import ROOT, files

RETIRED = {
    r"file tier": "disk tier",
    r"own (?:cache )?hits?": "prefix-cache hit",
    r"(?:lend|lends|lent|lending|borrow|borrows|borrowed|borrowing)": "serve, fetch",
    r"movers?": "transfer worker",
    r"vouch\w*": "issue, guarantee",
    r"believe[ds]?": "accept",
    r"quar\.": "quarantined",
}
DOCS = Path("kvstore/docs")
LATER = {DOCS / name for name in ("threats.md", "glossary.md")}
PAGES = [
    *(Path(name) for name in ("README.md", "SECURITY.md", "deploy/README.md")),
    *(
        file
        for file in files()
        if file.suffix == ".md" and DOCS in file.parents and file.parent != DOCS / "adr"
    ),
]


def retired(text: str) -> list[str]:
    """Retired words of a page; names of metrics, flags and files are no words."""
    words = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    pattern = rf"\b(?:{'|'.join(RETIRED)})(?!\w)"
    return re.findall(pattern, words, re.IGNORECASE)


@pytest.mark.parametrize("page", sorted(set(PAGES) - LATER), ids=str)
def test_a_page_has_the_words_of_the_glossary(page: Path) -> None:
    assert retired((ROOT / page).read_text()) == []


def test_a_retired_word_is_seen() -> None:
    assert retired("Blocks lent by the\nMover, `kvstore_mover_restarts`.") == ["lent", "Mover"]


def test_the_glossary_names_what_takes_their_place() -> None:
    glossary = (ROOT / DOCS / "glossary.md").read_text()
    terms = {term for terms in RETIRED.values() for term in terms.split(", ")}
    assert {term for term in terms if term not in glossary} == set()
