"""The prefix index: beside Dynamo's tree in one process, and over gRPC.

Runs `bench/micro/index_ops.py` in the environment that has Dynamo, and `bench/micro/index_grpc.py`
here, compiled, several times. Their own records are left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import record
from bench.cluster.figures import NotMeasured, at_least, at_most, plain, spread
from bench.micro import index_grpc
from kvstore.testing.process import Lab

PYTHON: Final = record.ROOT / ".venv-dynamo" / "bin" / "python"
OPS: Final = record.ROOT / "bench" / "micro" / "index_ops.py"
TIMEOUT_S: Final = 600
KEYS_PER_CHANGE: Final = 256
"""As a node with prompts tells: hundreds of blocks at a time."""


def measure(*, entries: int, matches: int) -> dict[str, Any]:
    """In process. Both are told in the form in which events arrive: ours as msgpack, Dynamo's as
    JSON, which is all that it takes."""
    ops = _ops(entries, matches)
    told, held, goals = ops["events"], ops["full"], ops["goals"]
    if "peer_blocks_per_s" not in told:
        raise NotMeasured(f"{PYTHON.parents[1].name} does not have Dynamo's index")
    figures = {
        "events_over_peer": at_least(
            goals["ratio"], told["ours_from_wire_blocks_per_s"] / told["peer_blocks_per_s"]
        ),
        "bytes_per_entry": at_most(
            goals["bytes_per_entry"], held["bytes_per_entry_at_most"], entries=held["entries"]
        ),
    }
    for length, both in ops["match"].items():
        ratio = both["peer_us"]["p50"] / both["ours_us"]["p50"]
        figures[f"match_{length}_over_peer"] = at_least(goals["ratio"], ratio)
    for shape, found in ops["many"].items():
        figures[f"long_prompt_{shape}_p99_us"] = at_most(goals["long_p99_us"], found["us"]["p99"])
    return {"figures": figures, "detail": ops}


def measure_served(*, rounds: int) -> dict[str, Any]:
    """Over gRPC with TLS, by processes of their own."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as made:
        lab = Lab(Path(made) / "pki")
        runs = [index_grpc.measure(lab, Path(made), ("--compiled",)) for _ in range(rounds)]
    goals, figures = index_grpc.GOALS, {}
    for name, values in (
        ("snapshot_1m_s", [run["snapshot_1m_s"] for run in runs]),
        ("match_512_p50_ms", [run["match_ms"]["512"]["p50"] for run in runs]),
    ):
        figures[name] = at_most(goals[name], float(np.median(values)), spread=spread(values))
    for count in index_grpc.KEYS_PER_CHANGE:
        values = [run["keys_per_s"][str(count)] for run in runs]
        middle = float(np.median(values))
        title = f"blocks_per_s_told_by_{count}"
        figures[title] = (
            at_least(goals["keys_per_s"], middle, spread=spread(values))
            if count == KEYS_PER_CHANGE
            else plain(middle, spread=spread(values))
        )
    empty = [run["empty_call_ms"]["p50"] for run in runs]
    figures["empty_call_p50_ms"] = plain(float(np.median(empty)), spread=spread(empty))
    return {"figures": figures, "detail": {"runs": runs}}


def _ops(entries: int, matches: int) -> dict[str, Any]:
    if not PYTHON.exists():
        raise NotMeasured(f"there is no {PYTHON.parents[1].name}, which has Dynamo's index")
    command = [str(PYTHON), str(OPS), "--print"]
    command += ["--entries", str(entries), "--rounds", str(matches)]
    child = subprocess.Popen(
        command,
        cwd=record.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = child.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # and what it started
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if not out:
        raise NotMeasured((said.strip().splitlines() or ["it printed nothing"])[-1])
    found: dict[str, Any] = json.loads(out)
    return found
