"""Folders that can be read: few modules in each, and a map of all of them where one comes in."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

from tests.style.tree import ROOT, python_files

PRODUCT = ("kvstore", "connector", "kernels")
MODULES_MAX = 18
MORE = {"kvstore/tiers/file": 19}
"""Folders that are larger, until they are divided."""
MEDIAN_LINES_MAX = 8


def _folders() -> dict[str, list[str]]:
    """Modules of each folder with Python, `__init__` and `__main__` left out."""
    found: dict[str, list[str]] = {}
    for file in python_files():
        if file.parts[0] in PRODUCT:
            modules = found.setdefault(str(file.parent), [])
            modules += [file.stem] * (not file.stem.startswith("__"))
    return found


FOLDERS = _folders()


def unnamed(folder: str, modules: list[str]) -> list[str]:
    """Those that the map does not name, and rooms of their own that it does not."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    if folder == "kvstore":  # rooms are in the map beside it
        text += (ROOT / folder / "README.md").read_text()
    rooms = [Path(other).name for other in FOLDERS if Path(other).parent == Path(folder)]
    return [name for name in [*modules, *rooms] if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_map_names_every_module(folder: str) -> None:
    assert unnamed(folder, FOLDERS[folder]) == []


def test_a_module_that_no_map_names_is_seen() -> None:
    assert unnamed("kvstore/net", ["aio", "stowaway"]) == ["stowaway"]


def test_no_folder_has_too_many_modules() -> None:
    many = {name: len(found) for name, found in FOLDERS.items() if len(found) > MODULES_MAX}
    assert many == MORE


def test_most_functions_are_a_few_lines() -> None:
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in python_files()
        if file.parts[0] in PRODUCT
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert statistics.median(lengths) <= MEDIAN_LINES_MAX
