"""The files that the style tests look at: those of the repository, ignored ones left out.

Walks the folder instead of asking git, so that it works in an unpacked archive too. Every source
is parsed and walked once for all rules: the trees of all of them take hundreds of MiB, so each rule
looks at a file while its tree is there.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kvstore", "connector", "kernels")
_IGNORED = [".git", *(pattern.rstrip("/") for pattern in (ROOT / ".gitignore").read_text().split())]

T = TypeVar("T")
Nodes = list[ast.AST]
"""All of a tree, its module first."""
_RULES: Final[list[Callable[[Path, Nodes], Iterable[Any]]]] = []


def _is_ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _IGNORED)


@cache
def files() -> tuple[Path, ...]:
    """Every file of the repository, relative to the root."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not _is_ignored(name)]
        found += [Path(folder, name).relative_to(ROOT) for name in names if not _is_ignored(name)]
    return tuple(sorted(found))


def python_files() -> tuple[Path, ...]:
    """Python sources written by hand."""
    return tuple(f for f in files() if f.suffix == ".py" and "_pb2" not in f.name)


def product_files() -> tuple[Path, ...]:
    """Those of the product."""
    return tuple(f for f in python_files() if f.parts[0] in PRODUCT)


def nodes(source: str) -> Nodes:
    """All nodes of a text's tree, its module first."""
    return list(ast.walk(ast.parse(source)))


def asked(rule: Callable[[Path, Nodes], Iterable[T]]) -> Callable[[], dict[Path, list[T]]]:
    """What a rule finds in the nodes of each file of `python_files`, asked of all rules at once."""
    at = len(_RULES)
    _RULES.append(rule)

    def found() -> dict[Path, list[T]]:
        return {file: its[at] for file, its in _survey(len(_RULES)).items()}

    return found


@cache
def _survey(rule_count: int) -> dict[Path, list[list[Any]]]:
    """File → what each of the first `rule_count` rules found."""
    found: dict[Path, list[list[Any]]] = {}
    for file in python_files():
        its = nodes((ROOT / file).read_text())
        found[file] = [list(rule(file, its)) for rule in _RULES[:rule_count]]
    return found
