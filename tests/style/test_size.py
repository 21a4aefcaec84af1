"""Files and functions that fit in a reader's head."""

from __future__ import annotations

import ast

from tests.style.tree import ROOT, python_files

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
LONG_FILES: dict[str, str] = {}
"""Path → why it is one piece all the same."""
LONG_FUNCTIONS: dict[str, str] = {}
"""`path name` → why it is one piece all the same."""


def _long_files() -> dict[str, int]:
    lengths = {str(f): len((ROOT / f).read_text().splitlines()) for f in python_files()}
    return {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}


def _long_functions() -> dict[str, int]:
    long = {}
    for file in python_files():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long[f"{file} {node.name}"] = lines
    return long


def test_files_are_short() -> None:
    assert _long_files().keys() == LONG_FILES.keys(), _long_files()


def test_functions_are_short() -> None:
    assert _long_functions().keys() == LONG_FUNCTIONS.keys(), _long_functions()
