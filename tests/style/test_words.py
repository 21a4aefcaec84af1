"""The documents keep to the words of the glossary, and the subject of a sentence is a noun.

Code spans, fenced blocks, comments, link targets and metric names are names of the code: they stay
out. Covers: README.md, SECURITY.md, deploy/README.md, kvstore/README.md, kvstore/docs, and what the
product's code says to people: every text of two words and more that is no docstring (/healthz,
logs, errors), and its docstrings of modules, classes, functions and attributes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvstore.engine.why.report import NodeReport
from tests.style.tree import PRODUCT, ROOT, Nodes, asked, files, nodes, product_files

DOCS = Path("kvstore", "docs")
PAGES = [
    *map(Path, ("README.md", "SECURITY.md", "deploy/README.md", "kvstore/README.md")),
    *(file for file in files() if file.suffix == ".md" and DOCS in file.parents),
]
RETIRED = {
    "own hit": r"own(?: cache)? hits?",
    "file tier": r"file tiers?",
    "lend": r"lend(?:s|ing|er)?|lent",
    "loan": r"loan(?:s|ed)?",
    "borrow": r"borrow(?:s|ed|ing|er)?",
    "tell": r"tells?|told|telling",
    "words": r"words",
    "away": r"away",
    "mover": r"movers?",
    "holder": r"holders?",
    "exact": r"exact",
    "quar.": r"quar\.",
    "promise": r"promis(?:e|es|ed|ing)",
    "believe": r"believ(?:e|es|ed|ing)",
    "vouch": r"vouch(?:es|ed)?",
}
"""Word → pattern; `kvstore/docs/glossary.md` has the word that is used instead."""
NAMES = {"words", "holder", "exact"}
"""Allowed in docstrings: classes, fields and JSON have these names, and memory has words."""


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])(?:{'|'.join(patterns)})(?!\w)", re.IGNORECASE)


_RETIRED = _any_of(RETIRED.values())
_RETIRED_IN_DOCSTRINGS = _any_of(RETIRED[word] for word in RETIRED.keys() - NAMES)
NAMES_OF_SCRIPTS = {"exact: no node but those listed holds the first block"}
"""Shown with a value of JSON that stays."""
_SUBJECT = re.compile(
    r"(?:^|[.!?:;] )\W*((?:Who|Whoever|What(?! we gave up)|Whatever|Of|It|That)\b[^.]{0,40})"
)
_NAMES = re.compile(
    r"^```.*?^```$|<!--.*?-->|`[^`]+`|'[\w-]+'|\]\([^)]*\)", re.DOTALL | re.MULTILINE
)


def prose(text: str) -> list[str]:
    """Paragraphs and cells of a page, names of the code left out."""
    plain = _NAMES.sub("…", text)
    plain = re.sub(r"^#.*$", r"\g<0>\n", plain, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=[|#*-])|\|", plain)
    return [" ".join(part.split()) for part in parts]


def _retired(parts: list[str], words: re.Pattern[str]) -> list[str]:
    return [f"{words.findall(part)} {part}" for part in parts if words.search(part)]


def _subjects(parts: list[str]) -> list[str]:
    return [hit for part in parts for hit in _SUBJECT.findall(part)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_keeps_to_both_rules(page: Path) -> None:
    parts = prose((ROOT / page).read_text())
    assert _retired(parts, _RETIRED) + _subjects(parts) == []


def texts(found: Nodes) -> Iterator[str]:
    """Of code, for people: docstrings, single words and messages of our own bugs left out."""
    left_out: set[ast.AST] = set()
    for node in found:
        match node:
            case ast.Expr(ast.Constant() as text):
                left_out.add(text)
            case ast.Assert(msg=ast.expr() as text):
                left_out |= set(ast.walk(text))
    for node in found:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield from [node.value] * (" " in node.value.strip())


@asked
def _retired_and_shown(file: Path, found: Nodes) -> Iterator[str]:
    for text in texts(found) if file.parts[0] in PRODUCT else ():
        if text not in NAMES_OF_SCRIPTS and any(map(_RETIRED.search, prose(text))):
            yield f"{file}: {text}"


def test_no_retired_word_is_shown() -> None:
    found = [text for its in _retired_and_shown().values() for text in its]
    assert not found, "\n" + "\n".join(found)


def docstrings(found: Nodes) -> list[str]:
    """Paragraphs of texts that stand by themselves: of modules, classes, functions, fields."""
    return [
        part
        for node in found
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for part in prose(node.value.value)
    ]


@asked
def _docstrings_of(file: Path, found: Nodes) -> list[str]:
    return docstrings(found) if file.parts[0] in PRODUCT else []


def test_docstrings_keep_to_both_rules() -> None:
    parts = {str(file): _docstrings_of()[file] for file in product_files()}
    assert all(parts.values())
    wrong = {
        file: hits
        for file, its in parts.items()
        if (hits := _retired(its, _RETIRED_IN_DOCSTRINGS) + _subjects(its))
    }
    assert wrong == {}


def test_the_glossary_names_the_retired_words() -> None:
    page = (ROOT / DOCS / "glossary.md").read_text()
    rows = re.findall(r"^\| .+ \| .+ \| (.*) \|$", page, re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"`([^`]+)`", row)}
    assert named == RETIRED.keys()


def test_the_glossary_has_what_the_table_of_a_node_counts() -> None:
    page = (ROOT / DOCS / "glossary.md").read_text()
    terms = set(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))
    columns = {name.removesuffix("s") for name in NodeReport.__struct_fields__}
    assert columns - terms == {"restart", "blocks_kept"}, "which say what they are"


@pytest.mark.parametrize(
    "wrong",
    [
        *("The node lends blocks.", "An own hit is fast.", "A file tier.", "| mover | x |"),
        *("the node is away", "nodes tell it", "Holders of a block", "a promised share"),
    ],
)
def test_a_retired_word_is_seen(wrong: str) -> None:
    assert any(map(_RETIRED.search, prose(wrong)))


@pytest.mark.parametrize(
    "wrong",
    ['log("the file tier in %s")', 'raise X(f"node {n} is away: {e}")', 'x = "it was lent"'],
)
def test_a_retired_word_of_the_code_is_seen(wrong: str) -> None:
    assert any(_RETIRED.search(text) for text in texts(nodes(wrong)))


def test_the_docstring_of_a_field_is_seen() -> None:
    source = '"""A module."""\nclass Lease:\n    end_ns: int\n    """When it ends."""\n'
    found = docstrings(nodes(source))
    assert found == ["A module.", "When it ends."]


@pytest.mark.parametrize(
    "right",
    [
        *("`kvstore_mover_restarts_total`", "```text\nthe mover ended\n```", "exactly one"),
        *("[the page](0023-movers.md)", "a single word", "foretell nothing"),
    ],
)
def test_a_name_of_the_code_is_not(right: str) -> None:
    assert not any(map(_RETIRED.search, prose(right)))


@pytest.mark.parametrize(
    "wrong", ["Who writes wins.", "Fine. It waits.", "- What is there", "a: Of"]
)
def test_a_pronoun_as_subject_is_seen(wrong: str) -> None:
    assert any(map(_SUBJECT.search, prose(wrong)))
