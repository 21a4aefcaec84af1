"""Part `memcheck`: the part `kernels`, in a short form, under NVIDIA's compute-sanitizer.

memcheck sees accesses out of bounds. The program under it is judged by what it found itself, and
its bytes by the goals of the part `kernels`: the tool's exit code does not say how it ended.
`tests/unit/kernels` has what the sanitizers of a host find in the same sources.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.findings import NOT_HERE, Findings, NotHere, Options, echoed, read_findings
from bench.gpu.goals import missed

FOUND = 9
"""Exit code of the tool for a finding."""
LINES_MAX = 20


def sanitizer() -> str | None:
    """The program, on the path or where the toolkit puts it."""
    homes = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{h}/bin" for h in homes if h)])
    return shutil.which("compute-sanitizer", path=path)


def run(findings: Findings, options: Options) -> None:
    tool = sanitizer()
    if tool is None:
        raise NotHere("compute-sanitizer, a part of NVIDIA's CUDA toolkit, is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "kernels.json"
        command += ["-m", "bench.gpu.part", "kernels", "--short", "--seed", str(options.seed)]
        code, text = echoed([*command, "--into", str(into)])
        inner = read_findings(into)
    if code == NOT_HERE:
        raise NotHere(str(inner.get("not_here")))
    findings.say(**reported(text, code), program=ended(inner))
    if code not in (0, FOUND):
        raise RuntimeError(f"the program under it ended with {code}")


def ended(inner: Mapping[str, Any]) -> list[str]:
    """What is wrong with the program under the tool, by its findings."""
    error = inner.get("error")
    return [*([f"it failed: {error}"] if error else []), *missed("kernels", inner)]


def reported(text: str, code: int) -> dict[str, list[str]]:
    """Findings of the tool, and that the program failed under it. Calls of CUDA that failed stand
    apart: libraries try some of them on purpose."""
    lines = [line.lstrip("= ") for line in text.splitlines() if line.startswith("=====")]
    errors = [line for line in lines if line.startswith(("Invalid", "Leaked", "Error:"))]
    calls = [line for line in lines if line.startswith("Program hit")]
    if code and not errors and not (code == FOUND and calls):
        errors.append(f"exit code {code}")
    if not lines:
        errors.append("the tool said nothing")
    return {"findings": errors[:LINES_MAX], "failed_calls": calls[:LINES_MAX]}
