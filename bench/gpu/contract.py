"""Part `contract`: the contract of copy engines (tests/contract), on a real device.

Its parties on a GPU go staged and by pieces, and the bytes that they are compared with are written,
read and summed up by cupy (`tests.kit.gpu_party`). A rehearsal runs those of the simulated CUDA.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from bench.gpu.findings import Findings, NotHere, Options, echoed

SUITE = "tests/contract/test_copy_engine.py"
TEST_S_MAX, FAILED_MAX = 20, 3
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def run(findings: Findings, options: Options) -> None:
    chosen = ["-k", "StagedCudaParty"] if options.is_rehearsal else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", SUITE, *chosen, "-v", f"--timeout={TEST_S_MAX}"]
    command += [f"--maxfail={FAILED_MAX}", f"--randomly-seed={options.seed}"]
    _, text = echoed(command)
    if "No module named pytest" in text:
        raise NotHere("pytest is not installed")
    findings.say(**counted(text))
    if not findings.values["passed"]:
        raise RuntimeError("no test passed")


def counted(text: str) -> dict[str, Any]:
    """Tests by their outcome, and the names of those that failed, as pytest's last lines say."""
    lines = text.strip().splitlines()
    counts = {name: int(count) for count, name in _COUNT.findall(lines[-1] if lines else "")}
    failed = re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", text, re.MULTILINE)
    broken = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return {
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        # A run that broke off has no names.
        "failed": failed or ["?"] * (broken or "passed" not in counts),
    }
