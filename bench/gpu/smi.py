"""What NVIDIA's driver says of the first GPU, by its own program: no CUDA is started.

Imports the standard library only: `run.py` needs it before anything is unpacked.
"""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

from bench.gpu.findings import Findings

DRIVER = Path("/dev/nvidiactl")
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


def why_none() -> str:
    """Why `describe_gpu` names none."""
    if DRIVER.exists():
        return (
            f"there is an NVIDIA driver ({DRIVER}), but nvidia-smi is not on the path or fails:"
            " run it by hand"
        )
    return "nvidia-smi names no NVIDIA GPU on this machine"


def memory_in_use() -> dict[str, int]:
    """Bytes of the GPU's memory and of shared memory in use on this machine. The first is left out
    where nvidia-smi does not say, as of a part of a GPU (MIG)."""
    shared = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("Shmem:")
    )
    used = _smi("memory.used")
    device = {"device": int(used) << 20} if used.isdecimal() else {}
    return {**device, "shared": shared}


def back_at(baseline: dict[str, int], kind: str) -> bool:
    """Wait until that memory is at its baseline, at most BASELINE_S."""
    deadline, pause = time.monotonic() + BASELINE_S, threading.Event()
    while memory_in_use().get(kind, 0) > baseline[kind] + SLACK_BYTES:
        if time.monotonic() > deadline:
            return False
        pause.wait(0.2)
    return True


def device_memory_checks(baseline: dict[str, int], findings: Findings) -> dict[str, bool]:
    """Whether the GPU's memory is back; no check where nvidia-smi says nothing of it. `baseline`:
    empty in a rehearsal."""
    if not baseline:
        return {}
    if "device" not in baseline:
        findings.say(device_memory="not judged: nvidia-smi does not say how much is in use (MIG?)")
        return {}
    return {"device_memory_at_baseline": back_at(baseline, "device")}
