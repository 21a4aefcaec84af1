"""No folder, function or test without content."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import Nodes, asked, files, nodes

FOLDERS = ("kvstore", "connector", "kernels", "deploy", "tests", "bench")


def _statements(found: Nodes) -> int:
    """Statements that do something: no docstrings, no imports, no `pass`."""
    hollow = (ast.Import, ast.ImportFrom, ast.Pass)
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, hollow)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in found
    )


@asked
def _statements_of(file: Path, found: Nodes) -> Iterator[int]:
    yield _statements(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_is_hollow(folder: str) -> None:
    inside = [file for file in files() if file.parts[0] == folder]
    if folder == "deploy":
        assert {file.parts[1] for file in inside} >= {"chart", "examples", "images"}
    else:
        assert sum(sum(_statements_of().get(file, ())) for file in inside) > 50


def _unfinished(found: Nodes) -> list[int]:
    return [
        node.lineno
        for node in found
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and "NotImplementedError" in ast.dump(node.exc)
    ]


@asked
def _left_for_later(file: Path, found: Nodes) -> list[int]:
    return _unfinished(found)


def test_no_function_is_left_for_later() -> None:
    found = [f"{file}:{line}" for file, lines in _left_for_later().items() for line in lines]
    assert not found, found


def _asserts(function: ast.AST) -> bool:
    """True when a test can fail: it asserts, expects an exception, or calls something that does."""
    text = ast.dump(function)
    return any(word in text for word in ("Assert(", "'raises'", "check", "assert", "verify"))


@asked
def _cannot_fail(file: Path, found: Nodes) -> Iterator[str]:
    for node in found if file.parts[0] == "tests" else ():
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                if name.startswith("test_") and not _asserts(node):
                    yield f"{file}:{node.lineno} {name}"
            case _:
                continue


def test_every_test_can_fail() -> None:
    found = [text for its in _cannot_fail().values() for text in its]
    assert not found, found


def test_hollow_code_is_seen() -> None:
    source = '"""Doc."""\nimport os\ndef f() -> None:\n    """Doc."""\n    pass\n'
    assert _statements(nodes(source)) == 1  # the def itself
    assert _unfinished(nodes("def f():\n    raise NotImplementedError('later')")) == [2]
    assert not _asserts(ast.parse("def test_x():\n    run()").body[0])
