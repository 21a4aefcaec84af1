"""Every Triton kernel that vLLM's runner reaches in a run, compiled for sm_90 without a device.

    python3 bench/gpu/vllm/compile.py [--pack build/gpu-vllm]

Needs what the pack is built for: Python 3.12 with torch 2.11 for CUDA 13 and its Triton 3.6. Runs
`engine.py` on the GPU that is not there (`virtual.py`), with the heads and the lengths of the large
model, so that each kernel is compiled with the types, alignments and constants of the GPU machine's
run: greedy and with a temperature, prefill, decode, and behind a hit; vLLM's warm-up, which comes
before CUDA graphs, adds those of all other sampling parameters. Nothing is cached from an earlier
run. Prints each specialization.

Exit code 1: one did not compile or needs more shared memory than a block has, or the engine did not
end; 3: no kernel was reached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[3]))  # bench/ is not installed

from bench.gpu.vllm.pack import PACK, ROOT, PackError, unpack

TIMEOUT_S: Final = 300
LENGTH: Final = 8025
"""Longest request of the run on a GPU."""


def verdict(kernels: Sequence[Mapping[str, Any]]) -> int:
    """Exit code."""
    if not kernels:
        return 3
    return 0 if all(each["ok"] for each in kernels) else 1


def line(kernel: Mapping[str, Any]) -> str:
    """One row of the table."""
    state = "ok    " if kernel["ok"] else "FAILED"
    size = f"{kernel['shared_bytes']:6} B shared"
    return f"{state} {kernel['seconds']:5.2f} s {size}  {kernel['name']} {kernel['error']}".rstrip()


def reached(pack: Path, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Kernels of one run, and the end of its log if it failed. Raises PackError."""
    paths = [*unpack(pack, folder), ROOT]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    here, out = Path(__file__).parent, folder / "out.json"
    model = [sys.executable, str(here / "model.py"), str(folder / "model"), "--size", "narrow"]
    subprocess.run(model, env=environment, check=True, timeout=TIMEOUT_S)
    engine = [sys.executable, str(here / "engine.py"), str(folder / "model"), str(out)]
    engine += ["--device", "virtual", "--prompts", "2", "--prompt-tokens", "40"]
    engine += ["--new-tokens", "3", "--kv-mib", "128", "--length", str(LENGTH), "--graphs"]
    done = subprocess.run(
        engine, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    kernels = json.loads(out.read_text())["kernels"] if out.exists() else []
    return kernels, done.stderr[-2000:] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, default=PACK)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-vllm-") as folder:
        try:
            kernels, failed = reached(options.pack, Path(folder))
        except PackError as error:
            print(f"kvstore: {error}", file=sys.stderr)
            return 3
    for each in kernels:
        print(line(each))
    names = {each["name"] for each in kernels}
    good = sum(each["ok"] for each in kernels)
    print(f"{good} of {len(kernels)} specializations of {len(names)} kernels compiled for sm_90")
    if failed:
        print(f"the engine did not end:\n{failed}")
    return 1 if failed else verdict(kernels)


if __name__ == "__main__":
    sys.exit(main())
