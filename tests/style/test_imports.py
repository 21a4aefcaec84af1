"""Imports point one way: the contracts of pyproject.toml, and no circles."""

from __future__ import annotations

import ast
import graphlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.style.tree import ROOT, python_files

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


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A copy of the product's code."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvstore", tmp_path / "kvstore", ignore=ignored)
    return tmp_path


def test_imports_point_inward() -> None:
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("place", BREAKS)
def test_a_broken_rule_is_seen(stage: Path, place: str) -> None:
    target = stage / "kvstore" / place
    if target.is_dir():
        target /= "__init__.py"
    with target.open("a") as module:
        module.write(f"\n{BREAKS[place]}\n")
    result = _lint(stage)
    assert "BROKEN" in result.stdout, result.stdout + result.stderr


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


@pytest.mark.parametrize(("inside", "parts"), [("tests.sim.world", 4), ("kvstore", 2)])
def test_imports_have_no_circle(inside: str, parts: int) -> None:
    """Among names of so many parts; imports for types alone count too."""
    graph: dict[str, set[str]] = {}
    for path in python_files():
        module = ".".join(path.with_suffix("").parts)
        if path.parts[0] in ("connector", "kernels"):  # linked into kvstore
            module = f"kvstore.{module}"
        names = [".".join(name.split(".")[:parts]) for name in (module, *_imports(path))]
        name, *imported = (n for n in names if n.startswith(f"{inside}.") or n == names[0])
        if name.startswith(f"{inside}."):
            graph.setdefault(name, set()).update(set(imported) - {name})
    assert len(graph) > 10
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def _imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found
