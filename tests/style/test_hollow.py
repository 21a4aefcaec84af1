"""No folder, function or test without content."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.style.tree import ROOT, files, python_files

FOLDERS = ("kvstore", "connector", "kernels", "deploy", "tests", "bench")


def _statements(tree: ast.AST) -> int:
    """Statements that do something: no docstrings, no imports, no `pass`."""
    hollow = (ast.Import, ast.ImportFrom, ast.Pass)
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, hollow)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_is_hollow(folder: str) -> None:
    inside = [file for file in files() if file.parts[0] == folder]
    code = [file for file in inside if file.suffix == ".py"]
    if folder == "deploy":
        assert {file.parts[1] for file in inside} >= {"chart", "examples", "images"}
    else:
        assert sum(_statements(ast.parse((ROOT / file).read_text())) for file in code) > 50


def _unfinished(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and "NotImplementedError" in ast.dump(node.exc)
    ]


def test_no_function_is_left_for_later() -> None:
    found = [
        f"{file}:{line}"
        for file in python_files()
        for line in _unfinished(ast.parse((ROOT / file).read_text()))
    ]
    assert not found, found


def _asserts(function: ast.AST) -> bool:
    """True when a test can fail: it asserts, expects an exception, or calls something that does."""
    text = ast.dump(function)
    return any(word in text for word in ("Assert(", "'raises'", "check", "assert", "verify"))


def test_every_test_can_fail() -> None:
    found = []
    for file in python_files():
        if file.parts[0] != "tests":
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            match node:
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                    if name.startswith("test_") and not _asserts(node):
                        found.append(f"{file}:{node.lineno} {name}")
                case _:
                    continue
    assert not found, found


def test_hollow_code_is_seen(tmp_path: Path) -> None:
    source = '"""Doc."""\nimport os\ndef f() -> None:\n    """Doc."""\n    pass\n'
    assert _statements(ast.parse(source)) == 1  # the def itself
    assert _unfinished(ast.parse("def f():\n    raise NotImplementedError('later')")) == [2]
    assert not _asserts(ast.parse("def test_x():\n    run()").body[0])
