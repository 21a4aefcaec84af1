"""Files and functions that fit in a reader's head, and none without content."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.test_prices import counted
from tests.style.tree import ROOT, Nodes, asked, files, nodes, python_files

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
SMALL_LINES_MIN = 60
"""Lines of code from which a module of the product needs no reason to be one."""
SMALL_FILES = {
    "kvstore/__main__.py": "a program",
    "kvstore/client/tls.py": "loads no cryptography; settings and engines need it",
    "kvstore/config/defaults.py": "imports nothing, so that `--help` comes at once",
    "kvstore/descriptors.py": "engines, node, supervisor and transfer worker share it",
    "kvstore/engine/agenda.py": "timers of all parts of the engine",
    "kvstore/engine/config.py": "each part of the engine takes it",
    "kvstore/errors.py": "vocabulary of all packages",
    "kvstore/index/chain.py": "router and commands make keys without the index",
    "kvstore/installation.py": "what is missing, asked before anything of it is imported",
    "kvstore/node/process.py": "a program",
    "kvstore/obs/logs.py": "the supervisor and engines load nothing else of obs",
    "kvstore/peers/transfer_worker_process.py": "a program of few imports",
    "kvstore/router/front/paths.py": "what clients may reach of engines, in one place",
    "kvstore/router/traces.py": "a router without --trace loads nothing of OpenTelemetry",
    "kvstore/routing/split.py": "rules of remote prefills, for requests, their queues and placing",
    "kvstore/transport/backends.py": "the only module that knows all back ends",
    "kvstore/transport/guests.py": "pure, beside sockets",
    "kvstore/units.py": "vocabulary of all packages",
    "kvstore/wire/bounds.py": "kinds of fields of all forms",
    "kvstore/wire/identity.py": "certificates and servers share it, and neither loads the other",
}
"""Path → why it is a module of its own."""
LONG_FILES: dict[str, str] = {}
"""Path → why it is one piece all the same."""
LONG_FUNCTIONS: dict[str, str] = {}
"""`path name` → why it is one piece all the same."""


def _long_files() -> dict[str, int]:
    lengths = {str(f): len((ROOT / f).read_text().splitlines()) for f in python_files()}
    return {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}


@asked
def _long_functions_of(file: Path, found: Nodes) -> Iterator[tuple[str, int]]:
    for node in found:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{file} {node.name}", lines


def _small_files() -> list[str]:
    return [
        path
        for path, lines in counted().items()
        if lines < SMALL_LINES_MIN and not path.endswith("__init__.py")
    ]


def test_a_small_module_has_a_reason() -> None:
    assert sorted(_small_files()) == sorted(SMALL_FILES)


def test_files_are_short() -> None:
    assert _long_files().keys() == LONG_FILES.keys(), _long_files()


def test_functions_are_short() -> None:
    long = dict(each for its in _long_functions_of().values() for each in its)
    assert long.keys() == LONG_FUNCTIONS.keys(), long


# ── nothing without content ───────────────────────────────────────────────────────────────────────


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
