"""Folders that can be read: few modules in each, and a map of all of them where one comes in."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.style.tree import ROOT, python_files

PRODUCT = ("kvstore", "connector", "kernels")
MODULES_MAX = 18
MEDIAN_LINES_MAX = 8
LINES_MAX = {
    "cli": 2_594,
    "client": 3_314,
    "config": 1_558,
    "connector": 2_792,
    "demo": 1_775,
    "engine": 8_066,
    "index": 1_816,
    "indexer": 705,
    "kernels": 1_411,
    "kvstore": 801,
    "net": 517,
    "node": 2_542,
    "obs": 412,
    "peers": 2_914,
    "proto": 535,
    "router": 5_821,
    "routing": 4_028,
    "stores": 1_156,
    "supervisor": 1_060,
    "testing": 1_161,
    "tiers": 3_003,
    "transport": 1_757,
    "wire": 1_361,
}
"""Lines of code of each package, without blanks, comments and docstrings. Whoever needs more takes
it from another one, or says in the commit why the product is to be larger."""


def _folders() -> dict[str, list[str]]:
    """Modules of each folder with Python, `__init__` and `__main__` left out."""
    found: dict[str, list[str]] = {}
    for file in python_files():
        if file.parts[0] in PRODUCT:
            modules = found.setdefault(str(file.parent), [])
            modules += [file.stem] * (not file.stem.startswith("__"))
    return found


FOLDERS = _folders()
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_lines(text: str) -> int:
    """Lines that hold code."""
    quoted: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            quoted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - quoted)


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


def test_no_folder_has_too_many_modules() -> None:
    many = {name: len(found) for name, found in FOLDERS.items() if len(found) > MODULES_MAX}
    assert many == {}


def test_most_functions_are_a_few_lines() -> None:
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in python_files()
        if file.parts[0] in PRODUCT
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert statistics.median(lengths) <= MEDIAN_LINES_MAX


def test_lines_of_code_are_counted_without_text() -> None:
    assert code_lines('"""Map.\n\nMore.\n"""\n\nx = (  # why\n    1\n)\ny = """\n\n"""\n') == 6


def test_every_package_keeps_its_budget() -> None:
    lines = Counter[str]()
    for file in python_files():
        if file.parts[0] in PRODUCT:
            inner = file.parts[0] == "kvstore" and len(file.parts) > 2
            lines[file.parts[int(inner)]] += code_lines((ROOT / file).read_text())
    over = {name: n for name, n in lines.items() if n > LINES_MAX.get(name, 0)}
    assert over == {}
    assert lines.keys() == LINES_MAX.keys()


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = {}
    for file in python_files():
        if file.parts[0] in PRODUCT:
            for node in ast.walk(ast.parse((ROOT / file).read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(file))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}
