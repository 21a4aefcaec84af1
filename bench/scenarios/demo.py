"""`make demo`: `kvstore demo` with a record of it, bench/results/demo.json and demo.png."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from kvstore.demo import play as demo
from kvstore.demo.models import BLOCK_TOKENS, SHAPES
from kvstore.demo.workload import ConversationPlan

COLOURS: Final = (plot.GREY, plot.BLUE, plot.GREEN, plot.VIOLET)


def draw(runs: Sequence[demo.ReplayRun], plan: ConversationPlan, path: Path) -> Path:
    title = "The history stays: time to first token with and without kvstore"
    subtitle = (
        f"{plan.users} users × {plan.rounds} rounds, one request at a time; the engine's own cache "
        f"holds {demo.ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens"
    )
    figure, (left, right) = plot.figure(title, subtitle, columns=2, widths=(1.35, 1))
    _draw_times(left, runs, plan)
    _draw_sources(right, runs)
    return plot.save(figure, path)


def _draw_times(left: Any, runs: Sequence[demo.ReplayRun], plan: ConversationPlan) -> None:
    width = 0.8 / len(runs)
    for index, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
        for number, times in enumerate(run.ttft_s):
            x = number + 1 + (index - (len(runs) - 1) / 2) * width
            middle = float(np.median(times)) * 1000
            label = run.name if number == 0 else None
            left.bar(x, middle, width * 0.9, color=colour, label=label, zorder=2)
            left.plot(
                [x] * len(times),
                np.asarray(times) * 1000,
                "o",
                ms=3,
                mfc="white",
                mec=plot.INK,
                mew=0.6,
                alpha=0.7,
                zorder=3,
            )
            left.annotate(
                f"{middle:.0f}",
                (x, max(times) * 1000),  # above the dots
                (0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=plot.INK,
                fontweight="bold",
                path_effects=plot.halo(),
                zorder=4,
            )
    left.set_title("Median TTFT by round (ms); dots are single requests")
    left.set_xticks(range(1, plan.rounds + 1), [f"round {n}" for n in range(1, plan.rounds + 1)])
    left.grid(axis="y")
    left.tick_params(length=0)
    left.legend(frameon=False, loc="upper left", ncols=3, bbox_to_anchor=(0, -0.08))


def _draw_sources(right: Any, runs: Sequence[demo.ReplayRun]) -> None:
    sources = (
        ("computed", [r.computed_tokens for r in runs], plot.AMBER),
        ("engine's own cache", [r.own_hit_tokens for r in runs], plot.GREY),
        ("kvstore", [r.kvstore_hit_tokens for r in runs], plot.BLUE),
    )
    start = np.zeros(len(runs))
    for name, counts, colour in sources:
        right.barh(range(len(runs)), counts, 0.55, left=start, color=colour, label=name)
        for row, count in enumerate(counts):
            if count > 0.08 * runs[0].prompt_tokens:
                right.annotate(
                    f"{count / runs[row].prompt_tokens:.0%}",
                    (start[row] + count / 2, row),
                    ha="center",
                    va="center",
                    color="white",
                    fontweight="bold",
                    fontsize=10,
                )
        start += counts
    right.set_title("Where prompt tokens came from")
    right.set_yticks(range(len(runs)), [r.name for r in runs], color=plot.INK)
    right.invert_yaxis()
    right.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f} k")
    right.tick_params(length=0)
    right.grid(axis="x")
    right.spines["left"].set_visible(False)
    right.legend(
        frameon=False,
        loc="upper left",
        ncols=3,
        bbox_to_anchor=(-0.25, -0.08),
        columnspacing=1.2,
        handlelength=1.2,
    )


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
    picture = draw(runs, plan, result.with_suffix(".png"))
    for path in (result, picture):
        print(f"wrote {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    sys.exit(demo.main(cache=record.ROOT / ".cache", finish=write))
