"""The package as installed: every folder is in it, and the names that others rely on resolve.
Its generated gRPC code is what `make proto` makes of the .proto files, and asks for little."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import kvstore
from tests.style.tree import ROOT, python_files

SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _package_of(init: Path) -> str:
    """As it is imported: folders of the root are linked into kvstore/."""
    linked = (ROOT / "kvstore" / init.parts[0]).is_symlink()
    parts = ("kvstore", *init.parts) if linked else init.parts
    return ".".join(parts[:-1]) if parts[0] == "kvstore" else ""


def test_every_package_is_listed() -> None:
    inits = [file for file in python_files() if file.name == "__init__.py"]
    assert sorted(filter(None, map(_package_of, inits))) == sorted(SETUP["packages"])


def test_python_started_in_the_clone_finds_all_of_it() -> None:
    """Without an installation; its own path comes first."""
    code = "import kvstore.connector, kvstore.kernels as k; print(k.__file__)"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout == f"{ROOT}/kvstore/kernels/__init__.py\n", result.stderr


@pytest.mark.parametrize("where", [ROOT, Path("/")])
@pytest.mark.parametrize(
    "arguments", [("-c", "import kvstore.connector"), ("-m", "kvstore", "--help")]
)
def test_it_imports_from_everywhere(where: Path, arguments: tuple[str, ...]) -> None:
    # From the clone's root, ./kvstore is found before the installed package.
    result = subprocess.run(
        [sys.executable, *arguments], cwd=where, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_console_script_runs() -> None:
    script = Path(sys.executable).with_name("kvstore")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "node" in result.stdout


def test_there_is_one_version() -> None:
    assert importlib.metadata.version("kvstore-llm") == kvstore.__version__
    told = subprocess.run(
        [sys.executable, "-m", "kvstore", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"kvstore {kvstore.__version__}\n"


def test_the_engine_finds_the_plugin() -> None:
    installed = importlib.metadata.distribution("kvstore-llm").entry_points
    (entry,) = installed.select(group="vllm.general_plugins", name="kvstore")
    assert callable(entry.load())


# ── generated gRPC code ───────────────────────────────────────────────────────────────────────────


PROTO = ROOT / "kvstore" / "proto"


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    sources = [str(path.relative_to(ROOT)) for path in sorted(PROTO.glob("*.proto"))]
    assert sources
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "kvstore" / "proto").iterdir()}
    assert made == {path.name: path.read_text() for path in PROTO.glob("*_pb2*")}


def test_the_generated_code_asks_for_no_more_than_the_project_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["optional-dependencies"]["node"]]
    ranges = {each.name: each.specifier for each in wanted}
    for path in PROTO.glob("*_pb2*.py"):
        text = path.read_text()
        if made := re.search(r"^GRPC_GENERATED_VERSION = '(.+)'", text, re.MULTILINE):
            name, oldest = "grpcio", made[1]
        else:
            made = re.search(r"^# Protobuf Python Version: (.+)", text, re.MULTILINE)
            assert made
            name, oldest = "protobuf", made[1]
        (floor,) = [each.version for each in ranges[name] if each.operator == ">="]
        assert Version(oldest) <= Version(floor), f"{path.name} needs {name} {oldest}"
