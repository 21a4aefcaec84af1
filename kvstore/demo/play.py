"""`kvstore demo`: the gain of a real vLLM from kvstore, on this machine, in a few minutes.

The same seeded conversations four times: by vLLM alone, with kvstore, with kvstore after the engine
was restarted, and after the node was killed and started again, so that its disk serves. All
histories together exceed the engine's own cache, as in service. The exit status is 0 only when all
tokens are identical and the node served prompt tokens each time. With --keep the last engine and
node go on until Ctrl-C, with commands to try.

float32, because in bfloat16 vLLM's prefix cache already changes one greedy output in about a
hundred (another kernel shape rounds otherwise), which would hide a change by kvstore.

Covers: the runs and their report. Does not cover: records and plots (`make demo`).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kvstore.demo.engine import Completion, VllmServer
from kvstore.demo.engine_config import SERVED_NAME, ServerConfig
from kvstore.demo.flags import read_flags
from kvstore.demo.models import BLOCK_TOKENS, SHAPES, build_model, encoder
from kvstore.demo.pair import PairClient
from kvstore.demo.settle import settled
from kvstore.demo.workload import ConversationPlan, Conversations
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess
from kvstore.units import format_size

SIZE: Final = "medium"
MODEL_LEN_MAX: Final = 3584
ENGINE_BLOCKS: Final = 32
DRAM: Final = "2GiB"
FILE: Final = "4GiB"
NAMES: Final = ("vLLM alone", "with kvstore", "engine restarted", "node restarted")


class KeptRunning(NamedTuple):
    """Engine and node that run at the end."""

    engine: VllmServer
    node: NodeProcess
    prompt: tuple[int, ...]
    """Prompt of the last turn."""


Finish = Callable[[list["ReplayRun"], KeptRunning], None]
"""Called with all runs while their last engine and node still run."""


class ReplayRun(msgspec.Struct, kw_only=True):
    """One replay of all conversations."""

    name: str
    plan: ConversationPlan
    ttft_s: list[list[float]]
    """By round, in the order of the replay."""
    tokens: dict[str, tuple[int, ...]]
    """Answers by ``user/round``."""
    prompt_tokens: int
    own_hit_tokens: int
    """Prefix-cache hits of the engine."""
    kvstore_hit_tokens: int
    """Loaded from the node."""
    wall_s: float
    engine_start_s: float
    last_prompt: tuple[int, ...] = ()

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.own_hit_tokens - self.kvstore_hit_tokens

    def all_ttft_ms(self) -> list[float]:
        """Milliseconds of every request."""
        return [1000 * t for times in self.ttft_s for t in times]

    def later_ttft_ms(self) -> list[float]:
        """Milliseconds of every request that has a history."""
        return [1000 * t for times in self.ttft_s[1:] for t in times]


class DemoError(KVStoreError):
    """One sentence about a failure of the demo."""


def replay(
    name: str,
    engine: VllmServer | PairClient,
    conversations: Conversations,
    on_answer: Callable[[Completion], None],
) -> ReplayRun:
    """Send every turn to the engine, one at a time."""
    plan = conversations.plan
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
    return ReplayRun(
        name=name,
        plan=plan,
        ttft_s=ttft_s,
        tokens=answers,
        prompt_tokens=prompt_tokens,
        own_hit_tokens=round(after.local_hits - before.local_hits),
        kvstore_hit_tokens=round(after.external_hits - before.external_hits),
        wall_s=wall_s,
        engine_start_s=engine.start_seconds,
        last_prompt=turn.prompt,
    )


class DemoStage:
    """Common parts of a demo's runs: the model, engines on it, display of progress."""

    def __init__(
        self, console: Console, plan: ConversationPlan, names: Sequence[str], *, cache: Path
    ) -> None:
        """Args:
        console: display of progress.
        plan: the conversations.
        names: of the runs.
        cache: folder for the model, built once, and for the engines' logs.
        """
        self._plan = plan
        self._names = names
        self._model = cache / "models" / SIZE
        self._logs = cache / "demo"
        self._console = console
        self._say("building the model (once)")
        with console.status("building the model (once)"):
            build_model(self._model, size=SIZE)
        self._logs.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:>2.0f}/{task.total:.0f} requests"),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        total = plan.users * plan.rounds
        self._tasks: list[TaskID] = [
            self.progress.add_task(f"{name:<17}", total=total, start=False, note="waiting")
            for name in names
        ]

    def note(self, index: int, note: str) -> None:
        """Show an activity of a run other than its requests."""
        self.progress.start_task(self._tasks[index])
        self.progress.update(self._tasks[index], note=note)
        self._say(f"{self._names[index]}: {note}")

    def _say(self, text: str) -> None:
        """Print a line where no progress can be drawn, as in a log of CI."""
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False)

    def config(self, socket: Path | None = None) -> ServerConfig:
        """Settings of each engine."""
        return ServerConfig(
            model=self._model,
            max_model_len=MODEL_LEN_MAX,
            kv_blocks=ENGINE_BLOCKS,
            socket=socket,
        )

    def start_engine(self, index: int, socket: Path | None) -> VllmServer:
        """The engine of a run."""
        self.note(index, "vLLM is starting")
        return VllmServer.start(self.config(socket), log=self._logs / f"engine-{index}.log")

    def replay(self, index: int, engine: VllmServer | PairClient) -> ReplayRun:
        """A run of all conversations."""
        conversations = Conversations(self._plan, encoder(self._model))
        run = replay(
            self._names[index], engine, conversations, lambda each: self.answered(index, each)
        )
        self.done(index, run.all_ttft_ms())
        return run

    def answered(self, index: int, answer: Completion) -> None:
        """Show progress of a run by one request."""
        reused = 100 * answer.cached_tokens // answer.prompt_tokens
        note = f"first token {1000 * answer.ttft_s:5.0f} ms, {reused:3d} % of prompt reused"
        self.progress.update(self._tasks[index], advance=1, note=note)

    def done(self, index: int, ttft_ms: Sequence[float]) -> None:
        """Show the end of a run."""
        self.note(index, f"median {np.median(ttft_ms):.0f} ms to first token")
        self.progress.stop_task(self._tasks[index])


class Demo:
    """The four runs, one after the other.

    Args:
        console, plan, cache: see `DemoStage`.
        work: empty folder for socket, node log and disk tier.
    """

    def __init__(
        self, console: Console, plan: ConversationPlan, *, cache: Path, work: Path
    ) -> None:
        self._stage = DemoStage(console, plan, NAMES, cache=cache)
        self._work = work

    def run(self, finish: Finish) -> None:
        """All four runs: the node outlives the engine after the second, and the engine the node
        after the third."""
        stage = self._stage
        with stage.progress:
            with stage.start_engine(0, None) as engine:
                runs = [stage.replay(0, engine)]
            with self._start_node() as node:
                with stage.start_engine(1, node.socket) as engine:
                    runs.append(stage.replay(1, engine))
                with stage.start_engine(2, node.socket) as engine:
                    runs.append(stage.replay(2, engine))
                    stage.note(3, "the node is killed and started again")
                    held = settled(engine, node, lambda dram, disk: dram > 0 and disk >= dram)
                    node.kill()
                    with self._start_node() as again:
                        settled(engine, again, lambda _, disk: disk >= held)
                        engine.forget()
                        runs.append(stage.replay(3, engine))
                        stage.progress.stop()
                        finish(runs, KeptRunning(engine, again, runs[-1].last_prompt))

    def _start_node(self) -> NodeProcess:
        place = f"{self._work / 'files'}:{FILE}"
        return NodeProcess.start(self._work, dram=DRAM, flags=["--file", place])


def same_answers(runs: Sequence[ReplayRun]) -> list[int]:
    """Per run, the number of answers equal to those of the first."""
    truth = runs[0].tokens
    return [sum(run.tokens[turn] == truth[turn] for turn in truth) for run in runs]


def check_answers(runs: Sequence[ReplayRun]) -> None:
    """Raises DemoError: a run has other answers than the first."""
    for run, same in zip(runs, same_answers(runs), strict=True):
        if differ := len(run.tokens) - same:
            raise DemoError(f"{differ} answers of the run '{run.name}' differ from vLLM alone.")


def show(console: Console, runs: Sequence[ReplayRun]) -> None:
    """The table. Times are of requests that have a history: rounds 2 and on."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title="Time to first token (TTFT) from round 2 on, and sources of prompt tokens",
    )
    table.add_column("", no_wrap=True)
    for column in (
        "TTFT\np50 ms",
        "TTFT\np95 ms",
        "speed-up\n",
        "prefix-\ncache hits",
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


def conclude(console: Console, runs: Sequence[ReplayRun]) -> None:
    """One line each; raises DemoError when a claim of the demo fails."""
    alone, shared, restarted, from_disk = runs
    check_answers(runs)
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
        "[green]✓[/] All answers are identical, token by token (float32: in bfloat16 vLLM's "
        "prefix cache already rounds differently from a full computation)."
    )


# ── --keep ───────────────────────────────────────────────────────────────────────────────────────


def commands_to_try(kept: KeptRunning, request: Path) -> list[tuple[str, str]]:
    """(purpose, command) for another terminal."""
    program = shlex.quote(str(Path(sys.executable).with_name("kvstore")))
    socket = f"--socket {shlex.quote(str(kept.node.socket))}"
    url = f"http://127.0.0.1:{kept.engine.port}"
    post = f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d @{request}"
    return [
        ("ask the last question again; usage shows how much of it was cached", post),
        (
            "the engine forgets its own cache: ask again, kvstore serves",
            f"curl -s -X POST {url}/reset_prefix_cache",
        ),
        (
            "why the latest requests hit or missed; with an id of the list, block by block",
            f"{program} explain {socket} --last 5",
        ),
        ("what the node holds", f"{program} inspect {socket}"),
        ("its blocks", f"{program} inspect {socket} blocks --limit 20"),
        ("its metrics", f"curl -s {kept.node.metrics_url}"),
        ("the engine's side of it", f"curl -s {url}/metrics | grep kvstore"),
        (
            "forget all blocks: the next answer is computed, and the same",
            f"{program} clear {socket}",
        ),
        ("kill the node's process: another goes on with its memory", f"kill -9 {kept.node.pid}"),
        ("kill the node: the engine goes on without", f"kill -9 {kept.node.supervisor_pid}"),
    ]


def hold(console: Console, kept: KeptRunning) -> None:
    """Print commands to try and wait for Ctrl-C."""
    request = kept.node.directory / "request.json"
    body = {"model": SERVED_NAME, "prompt": kept.prompt, "max_tokens": 16, "temperature": 0}
    request.write_bytes(msgspec.json.encode(body))
    console.rule("[bold]everything goes on until Ctrl-C; in another terminal")
    for what, command in commands_to_try(kept, request):
        console.print(f"[dim]# {what}[/]")
        console.print(command, soft_wrap=True, highlight=False, markup=False)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopping engine and node")


def introduce(console: Console, plan: ConversationPlan) -> None:
    """Announce the runs."""
    kv_bytes = SHAPES[SIZE].kv_bytes_per_token(4)
    console.rule("[bold]kvstore demo")
    console.print(
        f"seed {plan.seed}: {plan.users} users × {plan.rounds} rounds, shared system prompt, "
        f"growing history; real vLLM on this machine's CPU, {format_size(kv_bytes)} of KV per "
        f"token; its own cache holds {ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens, less than the "
        "histories.",
        highlight=False,
    )


def default_cache() -> Path:
    """Directory of the demo's model between runs."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvstore"


def main(
    arguments: Sequence[str] | None = None,
    *,
    cache: Path | None = None,
    finish: Finish | None = None,
) -> int:
    """Command line; returns the exit status. `finish` gets the runs after they are shown."""
    chosen, plan = read_flags(arguments)
    # A terminated demo unwinds like an interrupted one, and so takes node and engine along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The demo was terminated."))
    console = Console()
    console.width = max(console.width, 96)  # the table must not fold when this is no terminal
    begin = time.monotonic()

    def done(runs: list[ReplayRun], kept: KeptRunning) -> None:
        show(console, runs)
        if finish is not None:
            finish(runs, kept)
        conclude(console, runs)
        console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)
        if chosen.keep:
            hold(console, kept)

    try:
        if not chosen.router:
            introduce(console, plan)
        with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as work:
            places = {"cache": cache or default_cache(), "work": Path(work)}
            if chosen.cluster:
                # Not above: it is made of what is here.
                from kvstore.demo import cluster as demo_cluster

                def concluded(runs: list[ReplayRun], fetched_tokens: float) -> None:
                    show(console, runs)
                    demo_cluster.conclude(console, runs, fetched_tokens)
                    console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)

                demo_cluster.ClusterDemo(console, plan, **places).run(concluded)
            elif chosen.pd:
                from kvstore.demo import pd as demo_pd

                runs = demo_pd.PdDemo(console, plan, **places).run()
                show(console, [each.replayed for each in runs])
                picture = chosen.plot or places["cache"] / "demo" / "pd.png"
                demo_pd.conclude(console, runs, picture)
                console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)
            elif chosen.router:
                from kvstore.demo import router as demo_router

                demo_router.perform(console, plan, picture=chosen.plot, **places)
            else:
                Demo(console, plan, **places).run(done)
    except KeyboardInterrupt:
        console.print("[red]✗[/] The demo was interrupted; nothing of it runs any more.")
        return 130
    except (KVStoreError, NodeFailed, OSError, ImportError, ValueError) as error:
        console.print(f"[red]✗[/] {error}", markup=True, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
