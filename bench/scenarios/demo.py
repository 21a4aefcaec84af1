"""`make demo`: what a real vLLM gains from kvstore, on this machine, in a few minutes.

The same seeded conversations four times: by vLLM alone, with kvstore, with kvstore after the engine
was restarted, and after the node was killed and started again, so that its disk serves. All
histories together are more than the engine's own cache holds, as in service. Writes
bench/results/demo.json and demo.png. The exit status is 0 only when all tokens are identical and
the node served prompt tokens each time.

float32, because in bfloat16 vLLM's own cache already changes one greedy output in about a hundred
(another kernel shape rounds otherwise), which would hide whether kvstore changed any.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from bench.settle import settled
from kvstore.errors import KVStoreError
from kvstore.testing.engine import Completion, Engine, EngineConfig
from kvstore.testing.models import BLOCK_TOKENS, SHAPES, build_model, encoder
from kvstore.testing.process import NodeFailed, NodeProcess
from kvstore.testing.workload import ConversationPlan, Conversations
from kvstore.units import format_size

SIZE: Final = "medium"
MODEL: Final = record.ROOT / ".cache" / "models" / SIZE
MODEL_LEN_MAX: Final = 3584
ENGINE_BLOCKS: Final = 32
LOGS: Final = record.ROOT / ".cache" / "demo"
DRAM: Final = "2GiB"
PLAN: Final = ConversationPlan(
    seed=20261121,
    users=5,
    rounds=4,
    system_words=70,
    document_words=260,
    question_words=30,
    answer_tokens=16,
)
FILE: Final = "4GiB"
NAMES: Final = ("vLLM alone", "with kvstore", "engine restarted", "node restarted")
COLOURS: Final = (plot.GREY, plot.BLUE, plot.GREEN, plot.VIOLET)


class Run(msgspec.Struct, kw_only=True):
    """One replay of all conversations."""

    name: str
    ttft_s: list[list[float]]
    """By round, in the order of the replay."""
    tokens: dict[str, tuple[int, ...]]
    """Answers by ``user/round``."""
    prompt_tokens: int
    own_hit_tokens: int
    """Found in the engine's own cache."""
    kvstore_hit_tokens: int
    """Loaded from the node."""
    wall_s: float
    engine_start_s: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.own_hit_tokens - self.kvstore_hit_tokens

    def all_ttft_ms(self) -> list[float]:
        """Milliseconds of every request."""
        return [1000 * t for times in self.ttft_s for t in times]

    def later_ttft_ms(self) -> list[float]:
        """Milliseconds of every request that has a history."""
        return [1000 * t for times in self.ttft_s[1:] for t in times]


class DemoError(Exception):
    """One sentence about what the demo could not do."""


def replay(
    name: str, engine: Engine, plan: ConversationPlan, on_answer: Callable[[Completion], None]
) -> Run:
    """Have every turn answered, one at a time, as an idle engine would."""
    conversations = Conversations(plan, encoder(MODEL))
    ttft_s: list[list[float]] = [[] for _ in range(plan.rounds)]
    answers: dict[str, tuple[int, ...]] = {}
    prompt_tokens = 0
    before, begin = engine.hits(), time.perf_counter()
    for turn in conversations:
        answer = engine.complete(turn.prompt, max_tokens=plan.answer_tokens)
        conversations.answer(turn, answer.tokens)
        ttft_s[turn.round].append(answer.ttft_s)
        answers[f"{turn.user}/{turn.round}"] = answer.tokens
        prompt_tokens += len(turn.prompt)
        on_answer(answer)
    wall_s, after = time.perf_counter() - begin, engine.hits()
    return Run(
        name=name,
        ttft_s=ttft_s,
        tokens=answers,
        prompt_tokens=prompt_tokens,
        own_hit_tokens=round(after.local_hits - before.local_hits),
        kvstore_hit_tokens=round(after.external_hits - before.external_hits),
        wall_s=wall_s,
        engine_start_s=engine.start_seconds,
    )


def measure(console: Console, work: Path, plan: ConversationPlan) -> list[Run]:
    """All four runs: the node outlives the engine after the second, and the engine the node after
    the third."""
    requests = plan.users * plan.rounds
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.completed:>2.0f}/{task.total:.0f} requests"),
        TextColumn("[dim]{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [
            progress.add_task(f"{name:<17}", total=requests, start=False, note="waiting")
            for name in NAMES
        ]

        def start(index: int, socket: Path | None) -> Engine:
            progress.start_task(tasks[index])
            progress.update(tasks[index], note="vLLM is starting")
            config = EngineConfig(
                model=MODEL, max_model_len=MODEL_LEN_MAX, kv_blocks=ENGINE_BLOCKS, socket=socket
            )
            return Engine.start(config, log=LOGS / f"engine-{index}.log")

        def one(index: int, engine: Engine) -> Run:
            task = tasks[index]

            def on_answer(answer: Completion) -> None:
                reused = 100 * answer.cached_tokens // answer.prompt_tokens
                note = f"first token {1000 * answer.ttft_s:5.0f} ms, {reused:3d} % of prompt reused"
                progress.update(task, advance=1, note=note)

            run = replay(NAMES[index], engine, plan, on_answer)
            progress.update(
                task, note=f"median {np.median(run.all_ttft_ms()):.0f} ms to first token"
            )
            progress.stop_task(task)
            return run

        with start(0, None) as engine:
            runs = [one(0, engine)]
        with start_node(work) as node:
            with start(1, node.socket) as engine:
                runs.append(one(1, engine))
            with start(2, node.socket) as engine:
                runs.append(one(2, engine))
                progress.start_task(tasks[3])
                progress.update(tasks[3], note="the node is killed and started again")
                held = settled(engine, node, lambda dram, disk: dram > 0 and disk >= dram)
                node.kill()
                with start_node(work) as again:
                    settled(engine, again, lambda _, disk: disk >= held)
                    engine.forget()
                    runs.append(one(3, engine))
        return runs


def start_node(work: Path) -> NodeProcess:
    return NodeProcess.start(work, dram=DRAM, flags=["--file", f"{work / 'files'}:{FILE}"])


def same_answers(runs: Sequence[Run]) -> list[int]:
    """Per run, how many answers equal those of the first."""
    truth = runs[0].tokens
    return [sum(run.tokens[turn] == truth[turn] for turn in truth) for run in runs]


def show(console: Console, runs: Sequence[Run]) -> None:
    """The table. Times are of requests that have a history: rounds 2 and on."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title="Time to first token (TTFT) from round 2 on, and where prompt tokens came from",
    )
    table.add_column("", no_wrap=True)
    for column in (
        "TTFT\np50 ms",
        "TTFT\np95 ms",
        "speed-up\n",
        "hits in\nown cache",
        "hits in\nkvstore",
        "tokens\ncomputed",
        "answers\nidentical",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    base = np.median(runs[0].later_ttft_ms())
    for run, same in zip(runs, same_answers(runs), strict=True):
        p50, p95 = np.percentile(run.later_ttft_ms(), [50, 95])
        table.add_row(
            run.name,
            f"{p50:.0f}",
            f"{p95:.0f}",
            f"{base / p50:.1f} ×",
            f"{run.own_hit_tokens:,}",
            f"{run.kvstore_hit_tokens:,}",
            f"{run.computed_tokens:,}",
            f"{same}/{len(run.tokens)}",
        )
    console.print(table)


def conclude(console: Console, runs: Sequence[Run]) -> None:
    """One line each; raises DemoError when what the demo claims is not so."""
    alone, shared, restarted, from_disk = runs
    for run, same in zip(runs, same_answers(runs), strict=True):
        if same != len(run.tokens):
            differ = len(run.tokens) - same
            raise DemoError(f"{differ} answers of the run '{run.name}' differ from vLLM alone.")
    for run in runs[1:]:
        if run.kvstore_hit_tokens == 0:
            raise DemoError(f"The node served no prompt token in the run '{run.name}'.")
    fewer = 1 - shared.computed_tokens / alone.computed_tokens
    first = np.median(alone.ttft_s[0]) / np.median(restarted.ttft_s[0])
    kept = restarted.kvstore_hit_tokens / restarted.prompt_tokens
    disk = from_disk.kvstore_hit_tokens / from_disk.prompt_tokens
    console.print(
        f"[green]✓[/] kvstore spared the engine {fewer:.0%} of the prompt tokens it computed alone."
    )
    console.print(
        f"[green]✓[/] After a restart of the engine dram served {kept:.0%} of all prompt tokens; "
        f"even first questions came {first:.1f} × sooner."
    )
    console.print(
        f"[green]✓[/] After the node was killed its disk served {disk:.0%} of all prompt tokens."
    )
    console.print(
        "[green]✓[/] All answers are identical, token by token (float32: in bfloat16 vLLM's own "
        "cache hit already rounds differently from a full computation)."
    )


def draw(runs: Sequence[Run], plan: ConversationPlan, path: Path) -> Path:
    title = "The history stays: time to first token with and without kvstore"
    subtitle = (
        f"{plan.users} users × {plan.rounds} rounds, one request at a time; the engine's own cache "
        f"holds {ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens"
    )
    figure, (left, right) = plot.figure(title, subtitle, columns=2, widths=(1.35, 1))
    _draw_times(left, runs, plan)
    _draw_sources(right, runs)
    return plot.save(figure, path)


def _draw_times(left: Any, runs: Sequence[Run], plan: ConversationPlan) -> None:
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


def _draw_sources(right: Any, runs: Sequence[Run]) -> None:
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


def as_result(runs: Sequence[Run], plan: ConversationPlan) -> dict[str, Any]:
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
        for run, same in zip(runs, same_answers(runs), strict=True)
    ]
    return {
        "what": "the same conversations: vLLM alone, with kvstore, and after a restart of each",
        "plan": msgspec.to_builtins(plan),
        "model": {"size": SIZE, "dtype": "float32", **msgspec.to_builtins(SHAPES[SIZE])},
        "engine_cache_tokens": ENGINE_BLOCKS * BLOCK_TOKENS,
        "dram": DRAM,
        "file": FILE,
        "runs": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="vLLM without and with kvstore.")
    parser.add_argument("--seed", type=int, default=PLAN.seed)
    parser.add_argument("--users", type=int, default=PLAN.users)
    parser.add_argument("--rounds", type=int, default=PLAN.rounds)
    chosen = parser.parse_args(arguments)
    # A terminated demo unwinds like an interrupted one, and so takes node and engine along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The demo was terminated."))
    console = Console()
    console.width = max(console.width, 96)  # the table must not fold when this is no terminal
    try:
        plan = msgspec.structs.replace(
            PLAN, seed=chosen.seed, users=chosen.users, rounds=chosen.rounds
        )
        run_demo(console, plan)
    except KeyboardInterrupt:
        console.print("[red]✗[/] The demo was interrupted; nothing of it runs any more.")
        return 130
    except (DemoError, KVStoreError, NodeFailed, OSError, ImportError, ValueError) as error:
        console.print(f"[red]✗[/] {error}", markup=True, highlight=False)
        return 1
    return 0


def run_demo(console: Console, plan: ConversationPlan) -> None:
    begin = time.monotonic()
    kv_bytes = SHAPES[SIZE].kv_bytes_per_token(4)
    console.rule("[bold]kvstore demo")
    console.print(
        f"seed {plan.seed}: {plan.users} users × {plan.rounds} rounds, shared system prompt, "
        f"growing history; real vLLM on this machine's CPU, {format_size(kv_bytes)} of KV per "
        f"token; its own cache holds {ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens, less than the "
        "histories.",
        highlight=False,
    )
    with console.status("building the model (once)"):
        build_model(MODEL, size=SIZE)
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as work:
        runs = measure(console, Path(work), plan)
    show(console, runs)
    result = record.write("demo", as_result(runs, plan), seed=plan.seed)
    picture = draw(runs, plan, result.with_suffix(".png"))
    conclude(console, runs)
    for path in (result, picture):
        console.print(f"wrote {path.relative_to(record.ROOT)}", highlight=False)
    console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
