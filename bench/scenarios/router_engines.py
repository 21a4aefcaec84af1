"""`make bench-router-engines`: `kvstore demo --router` with several seeds, and a record of it.

Two real engines and nodes behind the router, the same conversations by turns and by cost. Ratios
are within a run; the figure is their median. Writes bench/results/router_engines.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.demo.play import RouterAct, show, stays
from kvstore.demo.stage import ALL_ROUNDS, LATER_ROUNDS, Replay, Stage
from kvstore.demo.workload import ConversationPlan

SEEDS: Final = (20_261_121, 7, 8)
GOAL: Final = 0.333
"""Mean TTFT over round robin's."""


def as_result(runs: Sequence[Replay]) -> dict[str, Any]:
    """Figures of one seed: by turns, then by cost."""
    turns, routed = runs
    same, later = stays(routed)
    different = sum(a.tokens != turns.answers[key].tokens for key, a in routed.answers.items())
    return {
        "mean_ttft_over_round_robin": round(_mean_ms(routed) / _mean_ms(turns), 4),
        "mean_ttft_over_round_robin_rounds_2_on": round(
            _mean_ms(routed, LATER_ROUNDS) / _mean_ms(turns, LATER_ROUNDS), 4
        ),
        "turns_at_one_engine": same / later,
        "answers": len(routed.answers),
        "answers_different": different,
        "ttft_ms": {run.name: record.summary(run.ttft_ms()) for run in runs},
        "ttft_ms_rounds_2_on": {
            run.name: record.summary(run.ttft_ms(LATER_ROUNDS)) for run in runs
        },
        "cached_tokens": {
            run.name: sum(answer.cached_tokens for answer in run.answers.values()) for run in runs
        },
    }


def _mean_ms(run: Replay, rounds: range = ALL_ROUNDS) -> float:
    return float(np.mean(run.ttft_ms(rounds)))


def one(console: Console, plan: ConversationPlan) -> dict[str, Any]:
    """One seed."""
    act = RouterAct()
    with Stage(console, plan, cache=record.ROOT / ".cache") as stage:
        runs = list(act.runs(stage))
    show(console, runs)
    return as_result(runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="default: three of them")
    seeds = parser.parse_args(arguments).seed or SEEDS
    console = Console()
    console.width = max(console.width, 96)  # the table must not fold when this is no terminal
    plan = RouterAct.plan
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
