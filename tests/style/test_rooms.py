"""Folders that can be read: a map of all modules where one comes in, short functions."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import PRODUCT, ROOT, Nodes, asked, product_files

MEDIAN_LINES_MAX = 8


def _folders() -> dict[str, list[str]]:
    """Modules of each folder with Python, `__init__` and `__main__` left out."""
    found: dict[str, list[str]] = {}
    for file in product_files():
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


def missing(page: str) -> list[str]:
    """Files, folders, modules and their members that a map names and the tree does not have."""
    return [
        span
        for span in re.findall(r"`((?:[a-z_]+/)+[\w*.]*|(?:[a-z_]+\.)+\w+)`", page)
        if not any(
            [*(ROOT / base).glob(span)] if "/" in span else _is_module(ROOT / base, span)
            for base in ("", "kvstore")
        )
    ]


def _is_module(base: Path, name: str) -> bool:
    """Whether it is a module, a folder, or a name that a module defines."""
    *inside, last = name.split(".")
    path = base.joinpath(*inside)
    if path.joinpath(last).is_dir() or path.joinpath(f"{last}.py").is_file():
        return True
    module = path.with_suffix(".py")
    defines = rf"^(?:class |def ){last}\b"
    return module.is_file() and bool(re.search(defines, module.read_text(), re.MULTILINE))


def test_the_map_names_what_exists() -> None:
    assert missing((ROOT / "kvstore" / "README.md").read_text()) == []


@pytest.mark.parametrize("wrong", ["`ports.Tier`", "`kvstore.serve`", "`index/words.py`"])
def test_a_name_that_nothing_has_is_seen(wrong: str) -> None:
    assert missing(wrong)


@asked
def _function_lengths(file: Path, found: Nodes) -> Iterator[int]:
    for node in found if file.parts[0] in PRODUCT else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def test_most_functions_are_a_few_lines() -> None:
    lengths = [lines for its in _function_lengths().values() for lines in its]
    assert statistics.median(lengths) <= MEDIAN_LINES_MAX


@asked
def _classes(file: Path, found: Nodes) -> Iterator[str]:
    for node in found if file.parts[0] in PRODUCT else ():
        if isinstance(node, ast.ClassDef):
            yield node.name


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = {}
    for file, names in _classes().items():
        for name in names:
            places.setdefault(name, []).append(str(file))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}
