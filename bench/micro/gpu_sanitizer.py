"""NVIDIA's compute-sanitizer over the programs that launch kernels and copies.

    python bench/micro/gpu_sanitizer.py

memcheck (accesses out of bounds, leaks of errors), initcheck (device memory that nobody wrote) and
racecheck over `gpu_kernels.py --check`, which compares bytes and measures nothing. Without a GPU or
without the tool it says so and checks nothing: `tests/unit/kernels` then has what sanitizers of a
host find in the same sources. Exit code 0: clean, or skipped; 1: the tool or the program objects.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.micro.gpu_arena import gpu_name

TOOLS = ("memcheck", "initcheck", "racecheck")
FOUND = 9
"""Exit code of the tool for a finding."""


def sanitizer() -> str | None:
    """The program, on the path or where the toolkit puts it."""
    homes = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{h}/bin" for h in homes if h)])
    return shutil.which("compute-sanitizer", path=path)


def reason_to_skip(gpu: str, tool: str | None) -> str:
    """Why nothing can be checked; empty: it can."""
    if not gpu:
        return "there is no NVIDIA GPU on this machine"
    if tool is None:
        return "compute-sanitizer is not installed; it is a part of NVIDIA's CUDA toolkit"
    return ""


def main() -> int:
    tool = sanitizer()
    reason = reason_to_skip(gpu_name(), tool)
    if reason or tool is None:
        print(f"sanitizer: skipped, because {reason}")
        return 0
    program = [sys.executable, str(Path(__file__).with_name("gpu_kernels.py"))]
    found = []
    for each in TOOLS:
        command = [tool, "--tool", each, "--error-exitcode", str(FOUND), *program]
        done = subprocess.run([*command, "--check", "--cycles", "30", "--mib", "4"], check=False)
        print(f"sanitizer: {each}: {'clean' if done.returncode == 0 else 'not clean, see above'}")
        found += [each] * (done.returncode != 0)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
