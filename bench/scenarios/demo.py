"""`make demo`: `kvstore demo` with a record of it, bench/results/demo.json and demo.png."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from kvstore.demo import play as demo
from kvstore.demo.models import BLOCK_TOKENS, SHAPES
from kvstore.demo.workload import ConversationPlan


def as_result(runs: Sequence[demo.ReplayRun], plan: ConversationPlan) -> dict[str, Any]:
    base = float(np.median(runs[0].later_ttft_ms()))
    rows = [
        {
            "name": run.name,
            "ttft_ms": record.summary(run.all_ttft_ms()),
            "ttft_ms_rounds_2_on": record.summary(run.later_ttft_ms()),
            "speed_up_rounds_2_on": base / float(np.median(run.later_ttft_ms())),
            "ttft_ms_by_round": [[round(1000 * t, 2) for t in times] for times in run.ttft_s],
            "prompt_tokens": run.prompt_tokens,
            "own_cache_hit_tokens": run.own_hit_tokens,
            "kvstore_hit_tokens": run.kvstore_hit_tokens,
            "computed_tokens": run.computed_tokens,
            "answers": len(run.tokens),
            "answers_identical": same,
            "wall_s": run.wall_s,
            "engine_start_s": run.engine_start_s,
        }
        for run, same in zip(runs, demo.same_answers(runs), strict=True)
    ]
    return {
        "what": "the same conversations: vLLM alone, with kvstore, and after a restart of each",
        "plan": msgspec.to_builtins(plan),
        "model": {"size": demo.SIZE, "dtype": "float32", **msgspec.to_builtins(SHAPES[demo.SIZE])},
        "engine_cache_tokens": demo.ENGINE_BLOCKS * BLOCK_TOKENS,
        "dram": demo.DRAM,
        "file": demo.FILE,
        "runs": rows,
    }


def write(runs: list[demo.ReplayRun], kept: demo.KeptRunning) -> None:
    """The record and the picture."""
    del kept
    plan = runs[0].plan
    result = record.write("demo", as_result(runs, plan), seed=plan.seed)
    picture = plot.draw(result)
    for path in (result, picture):
        print(f"wrote {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    sys.exit(demo.main(cache=record.ROOT / ".cache", finish=write))
