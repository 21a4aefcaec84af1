"""The prefix index: beside Dynamo's tree in one process, and over gRPC.

Runs `bench/micro/index_ops.py` in the environment that has Dynamo, and `bench/micro/index_grpc.py`
here, compiled, several times. Their own records are left alone.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import record
from bench.cluster.figures import NotMeasured, at_least, at_most, spread
from bench.micro import index_grpc
from kvstore.testing.index_process import Lab

PYTHON: Final = record.ROOT / ".venv-dynamo" / "bin" / "python"
OPS: Final = record.ROOT / "bench" / "micro" / "index_ops.py"
TIMEOUT_S: Final = 600
KEYS_PER_CHANGE: Final = "256"
"""As a node with prompts tells: hundreds of blocks at a time."""


def measure(*, entries: int, matches: int, rounds: int) -> dict[str, Any]:
    """Both kinds."""
    ops = _ops(entries, matches)
    told, held, goals = ops["events"], ops["full"], ops["goals"]
    figures = {
        "events_over_peer": at_least(
            goals["ratio"], told["ours_blocks_per_s"] / told["peer_blocks_per_s"]
        ),
        "bytes_per_entry": at_most(
            goals["bytes_per_entry"], held["bytes_per_entry_at_most"], entries=held["entries"]
        ),
    }
    for length, both in ops["match"].items():
        figures[f"match_{length}_over_peer"] = at_least(goals["ratio"], both["ratio"])
    for shape, found in ops["many"].items():
        figures[f"long_prompt_{shape}_p99_us"] = at_most(goals["long_p99_us"], found["us"]["p99"])
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as made:
        lab = Lab(Path(made) / "pki")
        runs = [index_grpc.measure(lab, Path(made), ("--compiled",)) for _ in range(rounds)]
    served = {
        "keys_per_s": [run["keys_per_s"][KEYS_PER_CHANGE] for run in runs],
        "snapshot_1m_s": [run["snapshot_1m_s"] for run in runs],
        "match_512_p50_ms": [run["match_ms"]["512"]["p50"] for run in runs],
    }
    for name, values in served.items():
        figure = at_least if name == "keys_per_s" else at_most
        goal = index_grpc.GOALS[name]
        figures[f"grpc_{name}"] = figure(goal, float(np.median(values)), spread=spread(values))
    return {"figures": figures, "detail": {"in_process": ops, "grpc": runs}}


def _ops(entries: int, matches: int) -> dict[str, Any]:
    if not PYTHON.exists():
        raise NotMeasured(f"there is no {PYTHON.parents[1].name}, which has Dynamo's index")
    command = [str(PYTHON), str(OPS), "--print"]
    command += ["--entries", str(entries), "--rounds", str(matches)]
    done = subprocess.run(
        command, cwd=record.ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if not done.stdout:
        raise NotMeasured((done.stderr.strip().splitlines() or ["it printed nothing"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found
