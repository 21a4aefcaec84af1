"""`make demo`: `kvstore demo` with a record of it, build/demo/demo.json and demo.png.

`make bench-demo` (`--record`) writes those of bench/results, which git keeps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from kvstore.demo import play
from kvstore.demo.models import BLOCK_TOKENS, MEDIUM
from kvstore.demo.play import FILE
from kvstore.demo.stage import DRAM, ENGINE_BLOCKS, LATER_ROUNDS, Replay
from kvstore.demo.workload import ConversationPlan


def as_result(runs: Sequence[Replay], plan: ConversationPlan) -> dict[str, Any]:
    rows = [
        {
            "name": run.name,
            "ttft_ms": record.summary(run.ttft_ms()),
            "ttft_ms_rounds_2_on": record.summary(run.ttft_ms(LATER_ROUNDS)),
            "speed_up_rounds_2_on": runs[0].median_ms / run.median_ms,
            "ttft_ms_by_round": [
                [round(ms, 2) for ms in run.ttft_ms(range(number, number + 1))]
                for number in range(plan.rounds)
            ],
            "prompt_tokens": run.prompt_tokens,
            "own_cache_hit_tokens": round(run.hits.local_hits),
            "kvstore_hit_tokens": round(run.hits.external_hits),
            "computed_tokens": run.computed_tokens,
            "answers": len(run.answers),
            "answers_identical": run.same_answers(runs[0]),
            "wall_s": sum(answer.duration_s for answer in run.answers.values()),
        }
        for run in runs
    ]
    return {
        "what": "the same conversations: vLLM alone, with kvstore, and after a restart of each",
        "plan": msgspec.to_builtins(plan),
        "model": msgspec.to_builtins(MEDIUM),
        "engine_cache_tokens": ENGINE_BLOCKS * BLOCK_TOKENS,
        "dram": DRAM,
        "file": FILE,
        "runs": rows,
    }


def write(runs: Sequence[Replay], plan: ConversationPlan, folder: Path) -> None:
    """The record and the picture."""
    path = folder / "demo.json"
    result = record.write("demo", as_result(runs, plan), seed=plan.seed, path=path)
    picture = plot.draw(result)
    for path in (result, picture):
        print(f"wrote {path.relative_to(record.ROOT)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    for name in ("seed", "users", "rounds"):
        parser.add_argument(f"--{name}", type=int, help="as of `kvstore demo`")
    chosen = vars(parser.parse_args(arguments))
    folder = record.RESULTS if chosen.pop("record") else record.ROOT / "build" / "demo"
    cache = record.ROOT / ".cache"
    return play.main(cache=cache, finish=lambda runs, plan: write(runs, plan, folder), **chosen)


if __name__ == "__main__":
    sys.exit(main())
