"""Reasons of misses: the core names codes, one table has their sentences, a test produces each.

Sentences for people that the core may hold are refusals of what an engine or rank sent (bad input
gets one clear sentence), and what the client logs of its attachment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.why.reasons import Reason, reason_of
from kvstore.obs.reasons import word
from tests.style.tree import ROOT, Nodes, asked, nodes

CORE = ("kvstore/engine", "kvstore/index", "kvstore/wire", "kvstore/client/core")
REFUSALS = {
    "kvstore/client/core/attachment.py": "the log of the attachment",
    "kvstore/client/core/lookups.py": "an answer of a node that does not fit",
    "kvstore/client/core/rank.py": "a plan that does not fit; loads that failed, for the log and"
    " `Story.detail`",
    "kvstore/engine/engine.py": "Hangup",
    "kvstore/engine/moves/grants.py": "PushEnd",
    "kvstore/engine/sessions/awaited.py": "Hangup, PushEnd",
    "kvstore/engine/moves/pushes.py": "the last word about a grant",
    "kvstore/engine/sessions/lookups.py": "Hangup; preparations refused, for routers",
    "kvstore/engine/sessions/owners.py": "refused Hellos; engines without a session",
    "kvstore/engine/sessions/sessions.py": "refused Hellos",
    "kvstore/engine/why/reasons.py": "the table of reasons",
}
"""File → what its sentences are."""
WORDS_MIN = 4
ENGINE_TESTS = Path("tests", "unit", "engine")
REASONS = [reason for reason in Reason if reason is not Reason.NONE]


def sentences(found: Nodes) -> Iterator[str]:
    """Texts of WORDS_MIN words and more; docstrings, assertions and exceptions left out."""
    left_out: set[ast.AST] = set()
    for node in found:
        match node:
            case ast.Expr(ast.Constant() as text):
                left_out.add(text)
            case ast.Assert(msg=ast.expr() as text) | ast.Raise(exc=ast.expr() as text):
                left_out |= set(ast.walk(text))
    for node in found:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            words = re.findall(r"(?<!\S)[a-z'-]+[,;:.]?(?!\S)", node.value)
            yield from [node.value] * (len(words) >= WORDS_MIN)


@asked
def _sentences_of_the_core(file: Path, found: Nodes) -> Iterator[str]:
    if any(Path(package) in file.parents for package in CORE):
        yield from sentences(found)


def test_the_core_has_no_sentences_for_people() -> None:
    found = {str(file) for file, its in _sentences_of_the_core().items() if its}
    assert found == REFUSALS.keys(), "a sentence, or an exception without use"


@asked
def _imported_by_moves(file: Path, found: Nodes) -> Iterator[str]:
    for node in found if Path("kvstore/engine/moves") in file.parents else ():
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_move_knows_of_explain() -> None:
    imported = {module for its in _imported_by_moves().values() for module in its}
    assert len(imported) > 10
    about_misses = {module for module in imported if module.startswith("kvstore.engine.why")}
    assert about_misses <= {"kvstore.engine.why.reasons"}


@pytest.mark.parametrize(
    "wrong",
    ['_LEFT = {1: "evicted to make room"}', 'x = f"{n} holds it, and is late"', 'say("a b c d")'],
)
def test_a_sentence_is_seen(wrong: str) -> None:
    assert list(sentences(nodes(wrong)))


@pytest.mark.parametrize(
    "right",
    ['"""What it is about."""', 'assert x, "a b c d"', 'raise ValueError("a b c d")', '"a b"'],
)
def test_a_docstring_is_none(right: str) -> None:
    assert not list(sentences(nodes(right)))


def test_each_reason_has_one_sentence() -> None:
    assert all(map(word, REASONS))
    assert all(reason.text for reason in REASONS)
    assert not [reason for reason in Reason if reason.text.endswith(".")]


@asked
def _expected(file: Path, found: Nodes) -> Iterator[str]:
    # test_tombstones.py writes them by itself
    if file.parent == ENGINE_TESTS and file.match("test_*.py") and file.stem != "test_tombstones":
        for node in found:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Reason":
                yield node.attr


def test_each_reason_is_expected_by_a_test_of_the_engine() -> None:
    expected = {name for its in _expected().values() for name in its}
    assert not {reason.name for reason in REASONS} - expected


def test_what_an_engine_says_is_a_reason() -> None:
    """The words of the client and the connector, where they are written."""
    said = {"not asked"}
    places = (
        "kvstore/client/core/lookups.py",
        "connector/prompts.py",
        "connector/scheduler_side.py",
    )
    for place in places:
        text = (ROOT / place).read_text()
        said |= set(re.findall(r'_miss\(\w+, "([a-z ]+)"', text))
        said |= set(re.findall(r'^SHADOW_CHECK = "([a-z ]+)"', text, re.MULTILINE))
        said |= set(re.findall(r'(?:failed|miss_reason) = "([a-z ]+)"', text))
        said |= set(re.findall(r'_leave_out\(request, "([a-z ]+)"', text))
        said |= set(re.findall(r'^ +return "([a-z ]+)"$', text, re.MULTILINE))
    assert len(said) >= 10
    assert {word(reason_of(outcome)) for outcome in said} == said
