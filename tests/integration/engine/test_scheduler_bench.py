"""What `make bench-single` plays vLLM's scheduler with: it must do all that the connector reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(600)  # it imports vLLM
def test_the_bench_of_the_scheduler_thread_stores_and_hits(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "bench" / "micro" / "scheduler_step.py")),
            *("--steps", "1000", "--out", str(tmp_path / "out.json")),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["steps"] >= 1000
    assert 0 < found["lookup_hits"] < found["lookups"]
    assert "the cache is off" not in done.stderr
