"""`make bench-router-engines`: `kvstore demo --router` with several seeds, and a record of it.

Two real engines and nodes behind the router, the same conversations by turns and by cost. Ratios
are within a run; the figure is their median. Writes bench/results/router_engines.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.demo.flags import read_flags
from kvstore.demo.router import RoutedRun, RouterDemo, show, stays
from kvstore.demo.workload import ConversationPlan

SEEDS: Final = (20_261_121, 7, 8)
GOAL: Final = 0.333
"""Mean TTFT over round robin's."""


def as_result(runs: Sequence[RoutedRun]) -> dict[str, Any]:
    """Figures of one seed: by turns, then by cost."""
    turns, routed = runs
    same, later = stays(routed)
    different = sum(a.tokens != turns.answers[key].tokens for key, a in routed.answers.items())
    return {
        "mean_ttft_over_round_robin": round(_mean_ms(routed) / _mean_ms(turns), 4),
        "mean_ttft_over_round_robin_rounds_2_on": round(
            _mean_ms(routed, later=True) / _mean_ms(turns, later=True), 4
        ),
        "turns_at_one_engine": same / later,
        "answers": len(routed.answers),
        "answers_different": different,
        "ttft_ms": {run.name: record.summary(run.ttft_ms()) for run in runs},
        "cached_tokens": {
            run.name: sum(answer.cached_tokens for answer in run.answers.values()) for run in runs
        },
    }


def _mean_ms(run: RoutedRun, *, later: bool = False) -> float:
    times = [a.ttft_s for (_, at), a in run.answers.items() if at or not later]
    return 1000 * float(np.mean(times))


def one(console: Console, plan: ConversationPlan) -> dict[str, Any]:
    """One seed."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as work:
        cache = record.ROOT / ".cache"
        runs, _ = RouterDemo(console, plan, cache=cache, work=Path(work)).run()
    show(console, runs)
    return as_result(runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="default: three of them")
    seeds = parser.parse_args(arguments).seed or SEEDS
    console = Console()
    console.width = max(console.width, 96)  # the table must not fold when this is no terminal
    _, plan = read_flags(["--router"])
    by_seed = {}
    for seed in seeds:
        console.print(f"seed {seed}", highlight=False)
        by_seed[str(seed)] = one(console, msgspec.structs.replace(plan, seed=seed))
    median = float(np.median([each["mean_ttft_over_round_robin"] for each in by_seed.values()]))
    result = {
        "what": "two real engines and nodes behind the router: policy cost beside round-robin",
        "plan": msgspec.to_builtins(plan),
        "median_mean_ttft_over_round_robin": median,
        "goal": GOAL,
        "seeds": by_seed,
    }
    path = record.write("router_engines", result, seed=seeds[0])
    print(f"wrote {path.relative_to(record.ROOT)}: {median:.2f} × round robin (goal <= {GOAL:.2f})")


if __name__ == "__main__":
    main()
