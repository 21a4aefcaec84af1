"""Imports point one way: the contracts of pyproject.toml, and no circles."""

from __future__ import annotations

import ast
import graphlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import ROOT, Nodes, asked

BREAKS = {
    "units.py": "import kvstore.errors",
    "engine": "import time",
    "kernels": "import kvstore.tiers.dram",
    "connector": "import kvstore.node",
    "node": "import kvstore.kernels",
    "peers": "import kvstore.engine.state",
}


def _lint(stage: Path) -> subprocess.CompletedProcess[str]:
    command = ["lint-imports", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    script = Path(sys.executable).with_name(command[0])
    return subprocess.run(
        [sys.executable, "-P", script, *command[1:]],
        cwd=stage,
        env={**os.environ, "PYTHONPATH": str(stage)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_point_inward() -> None:
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_broken_rule_is_seen(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvstore", tmp_path / "kvstore", ignore=ignored)
    for place, line in BREAKS.items():
        target = tmp_path / "kvstore" / place
        if target.is_dir():
            target /= "__init__.py"
        with target.open("a") as module:
            module.write(f"\n{line}\n")
    result = _lint(tmp_path)
    unseen = [
        line
        for place, line in BREAKS.items()
        if f"kvstore.{place.removesuffix('.py')} -> {line.removeprefix('import ')} (l."
        not in result.stdout
    ]
    assert unseen == [], result.stdout + result.stderr


def test_every_module_has_a_layer() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " ".join(config["contracts"][0]["layers"]).replace("|", " ").split()
    present = {
        f"kvstore.{entry.stem}"
        for entry in (ROOT / "kvstore").iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    # The kernels stand beside the layers, held by two contracts of their own.
    assert present - {"kvstore.__init__", "kvstore.kernels"} == set(layers)


@asked
def _imports(file: Path, found: Nodes) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("inside", "parts"), [("tests.sim.world", 4), ("kvstore", 2)])
def test_imports_have_no_circle(inside: str, parts: int) -> None:
    """Among names of so many parts; imports for types alone count too."""
    graph: dict[str, set[str]] = {}
    for path, imported_names in _imports().items():
        module = ".".join(path.with_suffix("").parts)
        if path.parts[0] in ("connector", "kernels"):  # linked into kvstore
            module = f"kvstore.{module}"
        names = [".".join(name.split(".")[:parts]) for name in (module, *imported_names)]
        name, *imported = (n for n in names if n.startswith(f"{inside}.") or n == names[0])
        if name.startswith(f"{inside}."):
            graph.setdefault(name, set()).update(set(imported) - {name})
    assert len(graph) > 10
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
