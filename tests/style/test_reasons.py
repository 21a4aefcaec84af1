"""Reasons of misses: the core has codes, one table has the words, a test produces each.

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
from kvstore.obs.reasons import TEXTS, word
from tests.style.tree import ROOT, python_files

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
    "kvstore/engine/moves/stores.py": "Hangup",
    "kvstore/engine/sessions/lookups.py": "Hangup; preparations refused, for routers",
    "kvstore/engine/sessions/owners.py": "refused Hellos; engines without a session",
    "kvstore/engine/sessions/sessions.py": "refused Hellos",
}
"""File → what its sentences are."""
WORDS_MIN = 4
ENGINE_TESTS = ROOT / "tests" / "unit" / "engine"
REASONS = [reason for reason in Reason if reason is not Reason.NONE]


def sentences(source: str) -> Iterator[str]:
    """Texts of WORDS_MIN words and more; docstrings, assertions and exceptions left out."""
    tree = ast.parse(source)
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant() as text):
                left_out.add(text)
            case ast.Assert(msg=ast.expr() as text) | ast.Raise(exc=ast.expr() as text):
                left_out |= set(ast.walk(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            words = re.findall(r"(?<!\S)[a-z'-]+[,;:.]?(?!\S)", node.value)
            yield from [node.value] * (len(words) >= WORDS_MIN)


@pytest.mark.parametrize("package", CORE)
def test_the_core_has_no_sentences_for_people(package: str) -> None:
    files = [file for file in python_files() if Path(package) in file.parents]
    found = {str(file): [*sentences((ROOT / file).read_text())] for file in files}
    assert not [(file, its) for file, its in found.items() if its and file not in REFUSALS]
    assert all(found[file] for file in REFUSALS if file in found), "an exception has no use"


def test_no_move_knows_of_explain() -> None:
    files = [file for file in python_files() if Path("kvstore/engine/moves") in file.parents]
    allowed = {"kvstore.engine.why.reasons"}
    found = {
        f"{file}: {node.module}"
        for file in files
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvstore.engine.why")
        if node.module not in allowed
    }
    assert not found


@pytest.mark.parametrize(
    "wrong",
    ['_LEFT = {1: "evicted to make room"}', 'x = f"{n} holds it, and is late"', 'say("a b c d")'],
)
def test_a_sentence_is_seen(wrong: str) -> None:
    assert list(sentences(wrong))


@pytest.mark.parametrize(
    "right",
    ['"""What it is about."""', 'assert x, "a b c d"', 'raise ValueError("a b c d")', '"a b"'],
)
def test_a_docstring_is_none(right: str) -> None:
    assert not list(sentences(right))


def test_each_reason_has_one_sentence() -> None:
    assert TEXTS.keys() == set(REASONS)
    assert all(map(word, REASONS))
    assert not [text for text in TEXTS.values() if text.endswith(".")]


def test_each_reason_is_expected_by_a_test_of_the_engine() -> None:
    expected = {
        node.attr
        for path in ENGINE_TESTS.glob("test_*.py")
        if path.name != "test_tombstones.py"  # writes them by itself
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Reason"
    }
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
