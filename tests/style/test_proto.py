"""The generated gRPC code is what `make proto` makes of the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
