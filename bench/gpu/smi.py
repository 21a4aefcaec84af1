"""What NVIDIA's driver says of the first GPU, by its own program: no CUDA is started.

Imports the standard library only: `run.py` needs it before anything is unpacked.
"""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

SLACK_BYTES = 64 << 20
"""Other users of the machine may move the baseline by this much."""
BASELINE_S = 15.0
_QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.current"


def describe_gpu() -> dict[str, str]:
    """Name, driver and link of the first GPU; empty without one. Starts no CUDA."""
    row = _smi(_QUERY).split(", ")
    return dict(zip(_QUERY.split(","), row, strict=True)) if len(row) > 1 else {}


def _smi(query: str) -> str:
    """What the driver says of the first GPU; empty: nothing."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


def memory_in_use() -> dict[str, int]:
    """Bytes of the GPU's memory and of shared memory in use on this machine."""
    shared = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("Shmem:")
    )
    used = _smi("memory.used")
    return {"device": int(used) << 20 if used.isdecimal() else 0, "shared": shared}


def back_at(baseline: dict[str, int], kind: str) -> bool:
    """Wait until that memory is at its baseline, at most BASELINE_S."""
    deadline, pause = time.monotonic() + BASELINE_S, threading.Event()
    while memory_in_use()[kind] > baseline[kind] + SLACK_BYTES:
        if time.monotonic() > deadline:
            return False
        pause.wait(0.2)
    return True
