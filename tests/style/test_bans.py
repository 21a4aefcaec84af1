"""Calls and imports that never appear, each with what to use instead; places that no text names."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import ROOT, Nodes, asked, files, nodes

BANNED_IMPORTS = dict.fromkeys(
    ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"),
    "runs code that a peer or a file chose: use msgspec",
)
BANNED_CALLS = {
    "eval": "ast.literal_eval or a parser",
    "exec": "a function",
    "torch.load": "safetensors",
    "yaml.load": "yaml.safe_load",
    "yaml.unsafe_load": "yaml.safe_load",
    "yaml.full_load": "yaml.safe_load",
    "os.system": "subprocess.run with a list",
    "os.popen": "subprocess.run with a list",
    "time.sleep": "wait for the event itself, with a deadline",
}
BANNED_TRUE = {
    "shell": "a list of arguments",
    "allow_pickle": "plain arrays",
}
SLEEP_ALLOWED = {
    "tests/leaks.py": "polls for what a killed process left, until a deadline",
}


BACKEND_NAMES = ("nixl", "ucx", "tcp")
"""Of transports, whose capabilities are asked; the schemes of URLs are compared as `kind`."""


def _compared_back_ends(found: Nodes) -> Iterator[int]:
    """Lines that compare something with the name of a back end."""
    for node in found:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {
                each.value
                for side in sides
                for each in ast.walk(side)
                if isinstance(each, ast.Constant)
            }
            if names & set(BACKEND_NAMES) and "kind" not in map(_dotted, sides):
                yield node.lineno


@pytest.mark.parametrize(
    "line", ["transport.name != 'tcp'", "found.backend in ('nixl', 'ucx')", "'tcp' == name"]
)
def test_a_back_end_compared_by_its_name_is_seen(line: str) -> None:
    assert list(_compared_back_ends(nodes(line))) == [1]


@asked
def _compared(file: Path, found: Nodes) -> Iterator[int]:
    if file.parts[0] in ("kvstore", "connector"):
        yield from _compared_back_ends(found)


def test_back_ends_are_asked_for_capabilities() -> None:
    compared = [f"{file}:{line}" for file, lines in _compared().items() for line in lines]
    assert compared == []


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{_dotted(value)}.{name}"
        case _:
            return ""


def _findings(found: Nodes) -> Iterator[tuple[int, str]]:
    for node in found:
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module, names):
                modules = [module or ""]
                calls = [f"{module}.{alias.name}" for alias in names]
                yield from (
                    (node.lineno, f"{c}: use {BANNED_CALLS[c]}") for c in calls if c in BANNED_CALLS
                )
            case ast.Call(function, _, keywords):
                modules = []
                if (name := _dotted(function)) in BANNED_CALLS:
                    yield node.lineno, f"{name}(): use {BANNED_CALLS[name]}"
                for keyword in keywords:
                    is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value
                    if keyword.arg in BANNED_TRUE and is_true:
                        yield node.lineno, f"{keyword.arg}=True: use {BANNED_TRUE[keyword.arg]}"
            case _:
                continue
        for module in modules:
            if (top := module.split(".")[0]) in BANNED_IMPORTS:
                yield node.lineno, f"import {top}: {BANNED_IMPORTS[top]}"


@asked
def _banned(file: Path, found: Nodes) -> Iterator[tuple[int, str]]:
    return _findings(found)


def test_nothing_banned_is_used() -> None:
    found = []
    for file, its in _banned().items():
        for line, text in its:
            if not (text.startswith("time.sleep") and str(file) in SLEEP_ALLOWED):
                found.append(f"{file}:{line}: {text}")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        *(f"import {name}" for name in BANNED_IMPORTS),
        *(f"from {name} import loads" for name in BANNED_IMPORTS),
        *(f"{name}(x)" for name in BANNED_CALLS),
        "from time import sleep",
        "subprocess.run('ls', shell=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_each_ban_is_seen(source: str) -> None:
    assert list(_findings(nodes(source)))


def test_sources_are_parsed_without_a_garbage_collection() -> None:
    assert not gc.isenabled(), "see no_collection in tests/conftest.py"


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────


# Written in pieces, so that this file does not find itself.
PLACES = [
    "/" + "work/",
    "/" + "root/",
    "/" + "home/",
    "/" + "Users/",
    "/" + "opt/pypi",
    "py" + "pi.org",
    "python" + "hosted.org",
    "download.py" + "torch.org",
    "hugging" + "face.co",
    "crates" + ".io",
    "npm" + "js.org",
]
_PLACES = re.compile("|".join(map(re.escape, PLACES)))


def test_no_machine_and_no_registry_is_named() -> None:
    found = []
    for file in files():
        try:
            text = (ROOT / file).read_text()
        except UnicodeDecodeError:
            continue  # a picture
        found += [
            f"{file}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if _PLACES.search(line)
        ]
    assert not found, "\n" + "\n".join(found)


def test_each_place_is_seen() -> None:
    assert all(_PLACES.search(f"see {place}x") for place in PLACES)
