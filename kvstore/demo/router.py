"""`kvstore demo --router`: two engines behind the router, by cost and by turns.

The same seeded conversations twice, through the same router, engines and nodes, all users of a
round at once: with the policy `round-robin`, then, after both engines and nodes have forgotten
everything, with `cost`. Each engine and node has room for the histories of half the users and a
little more, and nodes fetch nothing from each other. By turns each engine sees every history. This
is the case that routing by prefix is for: with room for everything, or with prompts that share
nothing, both are about alike. The exit status is 0 only when all tokens are identical and `cost` is
faster.

Covers: the runs, table, receipt, plot. Does not cover: engines (`play`), conversations
(`workload`).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.cli.ask import NodeClient
from kvstore.demo.completions import Completion, CompletionClient
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, SHAPES, encoder
from kvstore.demo.play import SIZE, DemoError, DemoStage
from kvstore.demo.settle import settled
from kvstore.demo.workload import ConversationPlan, Conversations, Encode
from kvstore.router.receipt_log import read_receipts
from kvstore.routing.receipts import Receipt
from kvstore.testing.process import NodeProcess
from kvstore.testing.router_process import RouterProcess

POLICIES: Final = ("round-robin", "cost")
NAMES: Final = ("round robin", "kvstore router")
CACHE_SHARE: Final = 0.56
"""Dram of a node, and the cache of its engine, as shares of the KV of all histories."""
_KV_BYTES: Final = SHAPES[SIZE].kv_bytes_per_token(4)
PARITY_S: Final = 60.0
RECEIPTS_S: Final = 5.0


class RoutedRun(msgspec.Struct, kw_only=True):
    """One run: answers by (user, round), receipts."""

    name: str
    answers: dict[tuple[int, int], Completion]
    receipts: list[Receipt]

    def ttft_ms(self, round: int | None = None) -> list[float]:
        """Milliseconds of requests: all, or those of a round."""
        return [
            1000 * answer.ttft_s
            for (_, at), answer in self.answers.items()
            if round is None or at == round
        ]


class RouterDemo:
    """Both runs, one after the other."""

    def __init__(
        self, console: Console, plan: ConversationPlan, *, cache: Path, work: Path
    ) -> None:
        self._stage = DemoStage(console, plan, NAMES, cache=cache)
        self._plan, self._work, self._blocks = plan, work, 0

    def run(self) -> tuple[list[RoutedRun], Path]:
        """The runs, and the log of receipts of the last one. Raises TimeoutError, EngineError,
        NodeFailed."""
        stage = self._stage
        encode = encoder(stage.config().model)
        tokens = round(CACHE_SHARE * history_tokens(self._plan, encode))
        self._blocks = tokens // BLOCK_TOKENS
        dram = f"{tokens * _KV_BYTES >> 20}MiB"
        with stage.progress, ExitStack() as stack:
            stage.note(0, f"two nodes of {dram} and two engines are starting")
            nodes, engines = dict[str, NodeProcess](), dict[str, VllmServer]()
            for name in ("a", "b"):
                folder = self._work / name
                folder.mkdir()
                flags = (
                    ["--index", nodes["a"].index] if nodes else ["--index-listen", "127.0.0.1:0"]
                )
                flags += ["--insecure", "--node-name", name]
                node = stack.enter_context(NodeProcess.start(folder, dram=dram, flags=flags))
                nodes[name], engines[name] = node, stack.enter_context(self._engine(node))
            for name, engine in engines.items():
                settled(engine, nodes[name], lambda *_: True)
            runs = [
                self._run(number, policy, nodes, engines, encode)
                for number, policy in enumerate(POLICIES)
            ]
        return runs, self._work / f"receipts-{POLICIES[-1]}"

    def _engine(self, node: NodeProcess) -> VllmServer:
        config = replace(self._stage.config(node.socket), kv_blocks=self._blocks)
        return VllmServer.start(config, log=node.directory / "engine.log")

    def _run(
        self,
        number: int,
        policy: str,
        nodes: dict[str, NodeProcess],
        engines: dict[str, VllmServer],
        encode: Encode,
    ) -> RoutedRun:
        log = self._work / f"receipts-{policy}"
        flags = ["--insecure", "--index", nodes["a"].index, "--index-timeout", "500"]
        flags += ["--receipts", str(log)]
        for name, engine in engines.items():
            flags += ["--worker", f"{name}=http://127.0.0.1:{engine.port},node={name}"]
        rules = f"policy: {policy}"  # all else is as it is by default
        with RouterProcess.start(self._work, flags, name=policy, policy=rules) as router:
            self._stage.note(number, "the router compares its keys with the engines'")
            _await_parity(router)
            for name, engine in engines.items():
                engine.forget()
                with closing(NodeClient(nodes[name].socket)) as client:
                    client.clear(space="")
            client_ = CompletionClient(int(router.address.rpartition(":")[2]))
            answers = self._converse(number, client_, encode)
            _await_receipts(log, len(answers))
        return RoutedRun(name=NAMES[number], answers=answers, receipts=list(read_receipts(log)))

    def _converse(
        self, number: int, client: CompletionClient, encode: Encode
    ) -> dict[tuple[int, int], Completion]:
        answers: dict[tuple[int, int], Completion] = {}
        talks = Conversations(self._plan, encode)
        with ThreadPoolExecutor(self._plan.users) as pool:
            for turns in talks.rounds():
                asked = [
                    pool.submit(client.complete, turn.prompt, max_tokens=self._plan.answer_tokens)
                    for turn in turns
                ]
                for turn, each in zip(turns, asked, strict=True):
                    answer = each.result()
                    talks.answer(turn, answer.tokens)
                    answers[turn.user, turn.round] = answer
                    self._stage.answered(number, answer)
        self._stage.done(number, [1000 * answer.ttft_s for answer in answers.values()])
        return answers


def perform(
    console: Console, plan: ConversationPlan, *, cache: Path, work: Path, picture: Path | None
) -> None:
    """The whole demo; `picture`: None, in the cache. Raises as `RouterDemo.run` and `conclude`."""
    console.rule("[bold]kvstore demo --router")
    console.print(
        f"seed {plan.seed}: {plan.users} users at once × {plan.rounds} rounds; two real engines and"
        f" nodes on this machine's CPU, each with room for {CACHE_SHARE:.0%} of all histories."
        " Nodes fetch nothing from each other here.",
        highlight=False,
    )
    runs, log = RouterDemo(console, plan, cache=cache, work=work).run()
    show(console, runs)
    conclude(console, runs, log, picture or cache / "demo" / "router.png")


def history_tokens(plan: ConversationPlan, encode: Encode) -> int:
    """Tokens of all histories at their end; the shared system prompt counts for each user."""
    talks = Conversations(plan, encode)
    tokens = 0
    for turns in talks.rounds():
        tokens = sum(len(turn.prompt) + plan.answer_tokens for turn in turns)
        for turn in turns:
            talks.answer(turn, (0,) * plan.answer_tokens)
    return tokens


def _await_parity(router: RouterProcess) -> None:
    """Raises TimeoutError: a worker stays load-only or down."""
    deadline_s, page = time.monotonic() + PARITY_S, ""
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(router.metrics_url.replace("metrics", "healthz")) as answer:
                page = answer.read().decode()
            if "worker" not in page:
                return
        except urllib.error.HTTPError as error:
            page = error.read().decode()
        threading.Event().wait(0.1)
    raise TimeoutError(f"The router does not route by prefixes: {page.strip()}")


def _await_receipts(log: Path, count: int) -> None:
    """They are written behind the answers."""
    deadline_s = time.monotonic() + RECEIPTS_S
    while not (log.exists() and sum(1 for _ in read_receipts(log)) >= count):
        if time.monotonic() > deadline_s:
            raise DemoError(f"The router wrote fewer than {count} receipts.")
        threading.Event().wait(0.05)


def show(console: Console, runs: list[RoutedRun]) -> None:
    """The table."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title="Time to first token (TTFT) of all requests, and sources of prompt tokens",
    )
    table.add_column("", no_wrap=True)
    for column in (
        "TTFT\nmean ms",
        "TTFT\np95 ms",
        "round 2 on\nmean ms",
        "tokens\nreused",
        "tokens\ncomputed",
        "requests\nat a, b",
        "turns at\none engine",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        times = run.ttft_ms()
        later = [1000 * a.ttft_s for (_, round), a in run.answers.items() if round]
        reused = sum(answer.cached_tokens for answer in run.answers.values())
        counts = Counter(receipt.chosen for receipt in run.receipts)
        same, turns = stays(run)
        table.add_row(
            run.name,
            f"{np.mean(times):.0f}",
            f"{np.percentile(times, 95):.0f}",
            f"{np.mean(later):.0f}",
            f"{reused:,}",
            f"{sum(a.prompt_tokens for a in run.answers.values()) - reused:,}",
            f"{counts['a']}, {counts['b']}",
            f"{same}/{turns}",
        )
    console.print(table)


def stays(run: RoutedRun) -> tuple[int, int]:
    """(turns at the engine of the turn before, turns that have one before)."""
    at = {receipt.request_id: receipt.chosen for receipt in run.receipts}
    places = {key: at.get(_request_of(answer), "") for key, answer in run.answers.items()}
    later = [key for key in places if key[1]]
    return sum(places[u, r] == places[u, r - 1] for u, r in later), len(later)


def _request_of(answer: Completion) -> str:
    """The router's id in that of the engine: ``cmpl-ID`` or ``cmpl-ID-0``."""
    return answer.id.removeprefix("cmpl-")


def conclude(console: Console, runs: list[RoutedRun], log: Path, picture: Path) -> None:
    """A receipt, then one line each; raises DemoError when a claim of the demo fails."""
    turns, routed = runs
    last = routed.receipts[-1].request_id
    command = ["route", "explain", last, "--receipts", str(log)]
    console.print(f"[dim]$ kvstore route explain {last} --receipts {log.name}[/]", highlight=False)
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    console.print(done.stdout, highlight=False, markup=False)
    if done.returncode or last not in done.stdout:
        raise DemoError(f"The receipt of {last} cannot be shown: {done.stderr.strip()}")
    if differ := [k for k, a in routed.answers.items() if a.tokens != turns.answers[k].tokens]:
        raise DemoError(f"{len(differ)} answers of the two runs differ.")
    ratio = np.mean(routed.ttft_ms()) / np.mean(turns.ttft_ms())
    if ratio >= 1:
        raise DemoError(f"The router's mean time to first token is {ratio:.2f} × round robin's.")
    console.print(
        f"[green]✓[/] Mean time to first token: {ratio:.2f} × that of round robin. Policy `cost`"
        " weighs the history that an engine's node holds against the queue in front of it."
    )
    console.print("[green]✓[/] All answers are identical, token by token (float32).")
    try:
        draw(runs, picture)
    except ImportError:
        console.print("No plot without matplotlib: pip install 'kvstore-llm[demo]'")
    else:
        console.print(f"plot: {picture}", highlight=False)


def draw(runs: list[RoutedRun], picture: Path) -> None:
    """Each request by round, and the mean of each round. Raises ImportError."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.4))
    for run, colour, shift in zip(runs, ("#8a94a0", "#0072b2"), (-0.08, 0.08), strict=True):
        rounds = range(1 + max(round for _, round in run.answers))
        means = [np.mean(run.ttft_ms(round)) / 1000 for round in rounds]
        axes.plot([1 + round for round in rounds], means, color=colour, linewidth=2, label=run.name)
        for round in rounds:
            times = np.array(run.ttft_ms(round)) / 1000
            place = np.full(len(times), 1 + round + shift)
            axes.plot(place, times, "o", color=colour, alpha=0.5, markersize=4, mew=0)
    axes.set(xlabel="round", ylabel="seconds", ylim=(0, None))
    axes.set_xticks([1 + round for round in rounds])
    axes.set_title("Time to first token; line: mean of a round", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)
    plt.close(figure)
