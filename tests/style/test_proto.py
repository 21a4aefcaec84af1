"""The generated gRPC code is what `make proto` makes of the .proto files, and asks for little."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.style.tree import ROOT

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
