"""The engine's front door: what others may import is there, and is what its own module has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvstore import engine

FRONT = Path(engine.__file__)


def test_every_name_that_types_know_is_there() -> None:
    known = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(FRONT.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvstore.")
        for alias in node.names
    }
    there = {
        (f"kvstore.engine.{place}", name)
        for place, names in engine._PLACES.items()
        for name in names.split()
    }
    assert known == there
    assert all(getattr(engine, name) is not None for _, name in known)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stores'"):
        engine.Stores  # noqa: B018
