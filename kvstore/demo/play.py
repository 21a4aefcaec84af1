"""`kvstore demo`: the gain of a real vLLM from kvstore, on this machine, in a few minutes.

One act of four, from its introduction to its last line; an act has runs, and shows them.

    introduction ─▶ runs ─▶ table ─▶ claims ─▶ picture ─▶ gain

Claims are checked before they are shown: a demo that ends well has proven them, and the exit status
is 0 only when all of them hold.

Does not cover: what an act runs on (`stage`), records and plots of the first act (`make demo`), and
what stays up (`up`).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.ask import NodeClient
from kvstore.demo.engine import CompletionClient
from kvstore.demo.flags import default_cache, read_flags
from kvstore.demo.models import BLOCK_TOKENS, MEDIUM
from kvstore.demo.stage import ENGINE_BLOCKS, LATER, LATER_ROUNDS, Replay, Stage, settled
from kvstore.demo.workload import ConversationPlan, Conversations, Encode, fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.installation import lacking
from kvstore.router.receipt_log import read_receipts
from kvstore.testing.process import NodeFailed, NodeProcess, RouterProcess
from kvstore.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

KV_BYTES: Final = MEDIUM.kv_bytes_per_token(4)
COLOURS: Final = ("#8a94a0", "#0072b2")
"""Colours of both runs in a picture."""
STYLE: Final = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "lines.markeredgewidth": 0,
    "lines.markersize": 4,
}


class DemoError(KVStoreError):
    """A failure of the demo, in one sentence."""


Columns = Mapping[str, Callable[[Replay, Replay], str]]
"""Title of a column → text of its cell, from a run and the first run."""
COLUMNS: Final[Columns] = {
    "TTFT\np50 ms": lambda run, _: f"{run.median_ms:.0f}",
    "TTFT\np95 ms": lambda run, _: f"{np.percentile(run.ttft_ms(LATER_ROUNDS), 95):.0f}",
    "speed-up\n": lambda run, one: f"{one.median_ms / run.median_ms:.1f} ×",
    "prefix-\ncache hits": lambda run, _: f"{run.own_hit_tokens:,}",
    "hits in\nkvstore": lambda run, _: f"{run.kvstore_hit_tokens:,}",
    "tokens\ncomputed": lambda run, _: f"{run.computed_tokens:,}",
    "answers\nidentical": lambda run, one: f"{run.same_answers(one)}/{len(run.answers)}",
}


class Act(ABC):
    """One way to run the demo: its runs, and what is shown of them."""

    heading = "kvstore demo"
    names: tuple[str, ...]
    """Names of its runs, in order."""
    requests = LATER
    """Words for the requests that the table is about."""
    columns: ClassVar[Columns] = COLUMNS
    picture = ""
    """File name of its picture; empty: there is none."""

    @abstractmethod
    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do all runs, one after the other, and yield the result of each."""

    @abstractmethod
    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Yield what the runs have shown, besides equal answers. Raises DemoError: it is not what
        they should have shown.
        """

    def introduction(self, plan: ConversationPlan) -> str:
        """Text that is printed before the runs."""
        return (
            f"{plan.users} users × {plan.rounds} rounds, shared system prompt, growing history;"
            f" real vLLM on this machine's CPU, {format_size(KV_BYTES)} of KV per token; its own"
            f" cache holds {ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens."
        )

    def remark(self, runs: Sequence[Replay]) -> str:
        """Text under the table, with markup; empty: none. Raises DemoError: there is nothing to
        show.
        """
        return ""

    def draw(self, figure: Figure, runs: Sequence[Replay]) -> None:  # noqa: B027 -- most draw nothing
        """Draw the picture of the runs, where the act has one."""

    def gain(self, runs: Sequence[Replay]) -> str:
        """Text about the gain, for the last line."""
        factors = (f"{run.name} {runs[0].median_ms / run.median_ms:.1f} ×" for run in runs[1:])
        saved_s = sum(run.saved_s for run in runs)
        return (
            f"Speed-up of the first token {LATER}: {', '.join(factors)};"
            f" {saved_s:.0f} s of prefill saved"
        )

    # ── shown ────────────────────────────────────────────────────────────────────────────────────

    def show(self, console: Console, runs: Sequence[Replay]) -> None:
        """Print the table."""
        table = Table(
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title=f"Time to first token (TTFT) {self.requests}, and sources of prompt tokens",
        )
        table.add_column("", no_wrap=True)
        for title in self.columns:
            table.add_column(title, justify="right", no_wrap=True)
        for run in runs:
            table.add_row(run.name, *(cell(run, runs[0]) for cell in self.columns.values()))
        console.print(table)

    def conclude(self, console: Console, runs: Sequence[Replay], picture: Path) -> None:
        """Print remark and claims, and draw the picture. Raises DemoError: a claim fails."""
        if remark := self.remark(runs):
            console.print(remark, highlight=False)
        for run in runs:
            if differ := len(run.answers) - run.same_answers(runs[0]):
                those = f"{differ} answers of the run '{run.name}'"
                raise DemoError(f"{those} differ from {runs[0].name}.")
        for claim in [*self.claims(runs), "All answers are identical, token by token (float32)."]:
            console.print(f"[green]✓[/] {claim}")
        if self.picture:
            self._draw(console, runs, picture)

    def _draw(self, console: Console, runs: Sequence[Replay], picture: Path) -> None:
        """Draw and save the picture, if matplotlib is installed."""
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError:
            console.print(lacking("a plot", "matplotlib", "demo"), markup=False)
            return
        with rc_context(STYLE):
            figure = Figure()
            self.draw(figure, runs)
            figure.tight_layout()
            picture.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(picture, dpi=150)
        console.print(f"plot: {picture}", highlight=False)


def dots(axes: Axes, x: ArrayLike, y: ArrayLike, colour: str) -> None:
    """Draw single requests as dots."""
    axes.plot(x, y, "o", color=colour, alpha=0.5)


# ── no flag: one node, which outlives its engine, and whose disk outlives the node ────────────────
# The same seeded conversations four times: by vLLM alone, with kvstore, with kvstore after the
# engine was restarted, and after the node was killed and started again, so that its disk serves.
# All histories together exceed the engine's own cache, as in service. The exit status is 0 only
# when all tokens are identical and the node served prompt tokens each time.

FILE: Final = "4GiB"


class RestartsAct(Act):
    """Act without a flag: the node stays up when its engine is restarted after the second run, and
    the engine when its node is restarted after the third.
    """

    names = ("vLLM alone", "with kvstore", "engine restarted", "node restarted")

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do the runs alone, with a node, after a restart of the engine, and after a restart of the
        node.
        """
        with stage.engine(0) as engine:
            yield stage.replay(0, engine)
        node = self._start_node(stage)
        with stage.engine(1, node) as engine:
            yield stage.replay(1, engine)
        engine = stage.enter_context(stage.engine(2, node))
        yield stage.replay(2, engine)
        stage.note(3, "the node is killed and started again")
        held = settled(engine, node, lambda dram, disk: dram > 0 and disk >= dram)
        node.kill()
        again = self._start_node(stage)
        settled(engine, again, lambda _, disk: disk >= held)
        engine.forget()
        yield stage.replay(3, engine)

    def _start_node(self, stage: Stage) -> NodeProcess:
        return stage.node("--file", f"{stage.work / 'files'}:{FILE}")

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Claims that the node served prompt tokens in each run but the first."""
        alone, shared, restarted, from_disk = runs
        for run in runs[1:]:
            if not run.kvstore_hit_tokens:
                raise DemoError(f"The node served no prompt token in the run '{run.name}'.")
        fewer = 1 - shared.computed_tokens / alone.computed_tokens
        first = np.median(restarted.ttft_ms(range(1))) / np.median(alone.ttft_ms(range(1)))
        kept, disk = (run.kvstore_hit_tokens / run.prompt_tokens for run in (restarted, from_disk))
        yield f"kvstore spared the engine {fewer:.0%} of the prompt tokens it computed alone."
        yield f"After a restart of the engine dram served {kept:.0%} of all prompt tokens."
        yield f"First questions then took {first:.2f} × as long as with vLLM alone."
        yield f"After the node was killed its disk served {disk:.0%} of all prompt tokens."


# ── --cluster: two nodes and two engines are one cache ────────────────────────────────────────────
# The same seeded conversations three times: by vLLM alone, by an engine on node a, and by another
# engine on node b, which has seen none of them and fetches blocks from node a, by the locations in
# the index of node a. The exit status is 0 only when all tokens are identical and prompt tokens
# came from the other node.

PEER_TOKENS: Final = 'vllm:kvstore_hit_tokens_total{tier="peer"}'


class ClusterAct(Act):
    """Act of `--cluster`: node a and its engine stay up while the engine on node b works."""

    names = ("vLLM alone", "engine on node a", "engine on node b")

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do the runs of vLLM alone, of the engine on node a, and of the one on node b."""
        with stage.engine(0) as alone:
            yield stage.replay(0, alone)
        a = stage.peer("a")
        engine = stage.enter_context(stage.engine(1, a))
        yield stage.replay(1, engine)
        settled(engine, a, lambda dram, _: dram > 0)
        b = stage.peer("b")
        other = stage.enter_context(stage.engine(2, b))
        settled(other, b, lambda *_: True)
        run = stage.replay(2, other)
        run.moved = round(other.metrics().get(PEER_TOKENS, 0))
        yield run

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """The claim that node b got blocks from node a."""
        *_, other = runs
        if not other.moved:
            raise DemoError("No prompt token came from the other node.")
        yield (
            f"{other.moved:,} of {other.prompt_tokens:,} prompt tokens came to node b from node a."
            " Its engine computes first, to measure which waits pay."
        )


# ── --pd: prefill on one engine and node, decode on another, behind a router ──────────────────────
#     client ─▶ router ─▶ engine p ── node p (with the index)
#                 └─────▶ engine d ── node d
#
# The same seeded conversations twice: by vLLM alone, and by a prefill engine and a decode engine on
# two nodes, which pushes the blocks of each prompt over TCP with TLS. After each run an answer is
# streamed while long prompts arrive: an engine that does both makes the answer wait for the
# prompts. The exit status is 0 only when all tokens are identical and blocks were pushed.

LANDING: Final = "64MiB"
"""Size of the landing slab of each node, for pushed blocks."""
ANSWER_TOKENS: Final = 160
"""Length of the answer that is streamed while other prompts arrive."""
LONG_PROMPTS: Final = 3
LONG_TOKENS: Final = 2000
PAUSE_S: Final = 0.3
"""Time from the request of the answer to the first long prompt."""
PUSHED: Final = "kvstore_push_blocks_landed_total"


class PdAct(Act):
    """Act of `--pd`: one engine, then a prefill and a decode engine."""

    names = ("one engine", "prefill → decode")
    picture = "pd.png"

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do the run with one engine, then the run with both."""
        with stage.engine(0) as alone:
            run = stage.replay(0, alone)
            run.token_s = answer_beside_prompts(alone, stage.encode, seed=stage.plan.seed)
            yield run
        stage.note(1, "two nodes and two engines are starting")
        nodes = [stage.peer(name, "--landing", LANDING) for name in "pd"]
        p, d = stage.engines_on(nodes)
        workers = [p.as_worker("p", "p,role=prefill"), d.as_worker("d", "d,role=decode")]
        with RouterProcess.start(stage.work, workers) as router:
            router.await_worker()
            client = CompletionClient(router.port)
            run = stage.replay(1, d, through=client)
            run.moved = round(metric(nodes[1], PUSHED))
            run.token_s = answer_beside_prompts(client, stage.encode, seed=stage.plan.seed)
            yield run

    def remark(self, runs: Sequence[Replay]) -> str:
        """Explanation of the second row of the table."""
        return (
            "Sources and computed tokens of the second row are of the decode engine: the prefill"
            " engine computed what was pushed, and node d keeps it for the next turn."
        )

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Claims that blocks were pushed, and how long an answer pauses."""
        alone, split = runs
        if not split.moved:
            raise DemoError("No block was pushed from the prefill node to the decode node.")
        yield (
            f"{split.moved:,} blocks were pushed from node p to node d. Time to first token"
            f" {LATER}: {split.median_ms / alone.median_ms:.2f} × that of one engine (median)."
        )
        yield (
            f"Longest gap between two tokens of an answer while {LONG_PROMPTS} prompts of"
            f" {LONG_TOKENS:,} tokens are computed: {longest_gap_ms(split):.0f} ms, on one"
            f" engine {longest_gap_ms(alone):.0f} ms. (Both engines share the cores of this"
            " machine.)"
        )

    def gain(self, runs: Sequence[Replay]) -> str:
        """Ratio of the longest gaps."""
        alone, split = map(longest_gap_ms, runs)
        over = f"{split / alone:.2f} × that of one engine"
        return f"Longest gap in an answer beside long prompts: {over}"

    def draw(self, figure: Figure, runs: Sequence[Replay]) -> None:
        """Left: time to first token; right: tokens of the answer beside long prompts."""
        figure.set_size_inches(9, 3.2)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        for row, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
            times = np.array(run.ttft_ms()) / 1000
            dots(left, times, row + np.linspace(-0.12, 0.12, len(times)), colour)
            middle = float(np.median(times))
            left.plot([middle, middle], [row - 0.25, row + 0.25], color=colour, linewidth=2)
            place = (middle, row - 0.3)
            left.annotate(f"{middle:.2f} s", place, color=colour, ha="center", va="bottom")
            right.plot(run.token_s, range(1, 1 + len(run.token_s)), color=colour, label=run.name)
        left.set_yticks((0, 1), self.names)
        left.set(ylim=(1.5, -0.7), xlim=(0, None), xlabel="seconds; bar: median")
        left.set_title("Time to first token")
        right.set(xlabel="seconds since its first token", ylabel="tokens", xlim=(0, None))
        right.set_title(f"An answer while {LONG_PROMPTS} long prompts arrive")
        right.legend(loc="lower right")


def longest_gap_ms(run: Replay) -> float:
    """Longest time between two tokens of the answer beside long prompts."""
    return 1000 * float(np.diff(run.token_s).max())


def answer_beside_prompts(
    engine: CompletionClient, encode: Encode, *, seed: int
) -> tuple[float, ...]:
    """Seconds from the first token of a long answer to each of its tokens, while long prompts
    arrive one after the other.
    """
    first, *others = fresh_prompts(seed, count=1 + LONG_PROMPTS, tokens=LONG_TOKENS, encode=encode)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.complete, first[:300], max_tokens=ANSWER_TOKENS)
        threading.Event().wait(PAUSE_S)
        for prompt in others:
            if not answer.done():
                engine.complete(prompt, max_tokens=1)
        token_s = answer.result().token_s
    return tuple(at - token_s[0] for at in token_s)


def metric(node: NodeProcess, name: str) -> float:
    """A number of the node's /metrics; 0 where it has none."""
    with urllib.request.urlopen(node.metrics_url, timeout=10) as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


# ── --router: two engines behind the router, by cost and by turns ─────────────────────────────────
# The same seeded conversations twice, through the same router, engines and nodes, all users of a
# round at once: with the policy `round-robin`, then, after both engines and nodes have forgotten
# everything, with `cost`. Each engine and node has room for the histories of half the users and a
# little more, and nodes fetch nothing from each other. By turns each engine sees every history.
# This is the case that routing by prefix is for: with room for everything, or with prompts that
# share nothing, both are about alike. The exit status is 0 only when all tokens are identical and
# `cost` is faster.

POLICIES: Final = ("round-robin", "cost")
CACHE_SHARE: Final = 0.56
"""Dram of a node, and cache of its engine, as a share of the KV of all histories."""


class RouterAct(Act):
    """Act of `--router`: the policies of `POLICIES`, one after the other."""

    heading = "kvstore demo --router"
    names = ("round robin", "kvstore router")
    requests = "of all requests"
    columns: ClassVar[Columns] = {
        "TTFT\nmean ms": lambda run, _: f"{np.mean(run.ttft_ms()):.0f}",
        "TTFT\np95 ms": lambda run, _: f"{np.percentile(run.ttft_ms(), 95):.0f}",
        "round 2 on\nmean ms": lambda run, _: f"{np.mean(run.ttft_ms(LATER_ROUNDS)):.0f}",
        "tokens\nreused": lambda run, _: f"{run.prompt_tokens - run.computed_tokens:,}",
        "tokens\ncomputed": lambda run, _: f"{run.computed_tokens:,}",
        "requests\nat a, b": lambda run, _: ", ".join(str(requests_at(run, at)) for at in "ab"),
        "turns at\none engine": lambda run, _: "{}/{}".format(*stays(run)),
    }
    picture = "router.png"

    def introduction(self, plan: ConversationPlan) -> str:
        """Text before the runs, with the scarce room of the engines."""
        return (
            f"{plan.users} users at once × {plan.rounds} rounds; two real engines and nodes on this"
            f" machine's CPU, each with room for {CACHE_SHARE:.0%} of all histories. Nodes fetch"
            " nothing from each other here."
        )

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do a run with each policy, on the same nodes and engines."""
        tokens = round(CACHE_SHARE * history_tokens(stage.plan, stage.encode))
        dram = f"{tokens * KV_BYTES >> 20}MiB"
        stage.note(0, f"two nodes of {dram} and two engines are starting")
        for name in "ab":
            stage.node("--insecure", "--node-name", name, name=name, dram=dram)
        stage.engines_on(stage.nodes, blocks=tokens // BLOCK_TOKENS)
        for index, policy in enumerate(POLICIES):
            yield self._run(stage, index, policy)

    def _run(self, stage: Stage, index: int, policy: str) -> Replay:
        log = stage.work / f"receipts-{policy}"
        flags = ["--insecure", "--index", stage.nodes[0].index, "--index-timeout", "500"]
        flags += ["--receipts", str(log)]
        flags += [its.as_worker(name, name) for name, its in zip("ab", stage.engines, strict=True)]
        rules = f"policy: {policy}"  # all else is as it is by default
        with RouterProcess.start(stage.work, flags, name=policy, policy=rules) as router:
            stage.note(index, "the router compares its keys with the engines'")
            router.await_parity()
            for engine, node in zip(stage.engines, stage.nodes, strict=True):
                engine.forget()
                with closing(NodeClient(node.socket)) as client:
                    client.clear(space="")
            run = stage.replay(
                index,
                *stage.engines,
                through=CompletionClient(router.port),
                abreast=stage.plan.users,
                shows_mean=True,
            )
            router.stop()  # receipts are written behind the answers
        run.receipts, run.receipt_log = list(read_receipts(log)), log
        if len(run.receipts) < len(run.answers):
            raise DemoError(f"The router wrote fewer than {len(run.answers)} receipts.")
        return run

    def remark(self, runs: Sequence[Replay]) -> str:
        """The last receipt, as `kvstore route explain` shows it. Raises DemoError: it cannot be
        shown.
        """
        *_, routed = runs
        last = routed.receipts[-1].request_id
        explain = ["route", "explain", last, "--receipts"]
        command = [sys.executable, "-m", "kvstore.cli.main", *explain, str(routed.receipt_log)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or last not in done.stdout:
            raise DemoError(f"The receipt of {last} cannot be shown: {done.stderr.strip()}")
        typed = " ".join(["kvstore", *explain, routed.receipt_log.name])
        return f"[dim]$ {typed}[/]\n{escape(done.stdout)}"

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """The claim that `cost` is faster than `round-robin`."""
        turns, routed = runs
        ratio = np.mean(routed.ttft_ms()) / np.mean(turns.ttft_ms())
        if not ratio < 1:
            times = f"{ratio:.2f} × round robin's"
            raise DemoError(f"The router's mean time to first token is {times}.")
        yield (
            f"Mean time to first token: {ratio:.2f} × that of round robin. Policy `cost` weighs"
            " the history that an engine's node holds against the queue in front of it."
        )

    def gain(self, runs: Sequence[Replay]) -> str:
        """Text with the ratio of the mean times to the first token."""
        turns, routed = (np.mean(run.ttft_ms()) for run in runs)
        return f"Speed-up of the mean first token over round robin: {turns / routed:.1f} ×"

    def draw(self, figure: Figure, runs: Sequence[Replay]) -> None:
        """Draw each request by round, and the mean of each round."""
        figure.set_size_inches(7, 3.4)
        axes = figure.subplots()
        rounds = range(1 + max(round for _, round in runs[0].answers))
        for run, colour, shift in zip(runs, COLOURS, (-0.08, 0.08), strict=True):
            times = [np.array(run.ttft_ms(rounds[at : at + 1])) / 1000 for at in rounds]
            means = [each.mean() for each in times]
            axes.plot([1 + at for at in rounds], means, color=colour, linewidth=2, label=run.name)
            for at in rounds:
                dots(axes, np.full(len(times[at]), 1 + at + shift), times[at], colour)
        axes.set(xlabel="round", ylabel="seconds", ylim=(0, None))
        axes.set_xticks([1 + at for at in rounds])
        axes.set_title("Time to first token; line: mean of a round")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)


def history_tokens(plan: ConversationPlan, encode: Encode) -> int:
    """Tokens of all histories at their end; the shared system prompt counts for each user."""
    talks = Conversations(plan, encode)
    for turns in talks.rounds():
        for turn in turns:
            talks.answer(turn, (0,) * plan.answer_tokens)
    return sum(len(turn.prompt) + plan.answer_tokens for turn in turns)


def requests_at(run: Replay, worker: str) -> int:
    """Number of requests in a run that the router sent to a worker."""
    return sum(receipt.chosen == worker for receipt in run.receipts)


def stays(run: Replay) -> tuple[int, int]:
    """(turns that went to the engine of the user's previous turn, turns with a previous one)."""
    at = {receipt.request_id: receipt.chosen for receipt in run.receipts}
    # The id that the engine answers has the router's in it: ``cmpl-ID``.
    places = {
        key: at.get(answer.id.removeprefix("cmpl-"), "") for key, answer in run.answers.items()
    }
    later = [key for key in places if key[1]]
    return sum(places[u, r] == places[u, r - 1] for u, r in later), len(later)


# ── the command ───────────────────────────────────────────────────────────────────────────────────

ACTS: Final[dict[str, Act]] = {"cluster": ClusterAct(), "pd": PdAct(), "router": RouterAct()}
"""Act of each flag; without one of them: `RestartsAct`."""
NEXT: Final = tuple(f"--{flag}" for flag in ACTS)
"""Flags to try after a demo; its own is left out."""
Finish = Callable[[Sequence[Replay], ConversationPlan], None]
"""Called with the runs of `RestartsAct` after they are shown."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    cache: Path | None = None,
    finish: Finish = lambda *_: None,
) -> int:
    """Run the command line; returns the exit status. The last line of output has the gain and what
    to try next.
    """
    chosen, plan = read_flags(arguments)
    act = next((ACTS[flag] for flag in ACTS if getattr(chosen, flag)), RestartsAct())
    cache = cache or default_cache()
    # A terminated demo unwinds like an interrupted one, and so takes node and engine along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The demo was terminated."))
    console = Console()
    console.width = max(console.width, 96)  # the table must not fold when this is no terminal
    begin = time.monotonic()
    try:
        console.rule(f"[bold]{act.heading}")
        console.print(f"seed {plan.seed}: {act.introduction(plan)}", highlight=False)
        with Stage(console, plan, act.names, cache=cache) as stage:
            with stage.progress:
                runs = list(act.runs(stage))
            act.show(console, runs)
            if isinstance(act, RestartsAct):
                finish(runs, plan)
            act.conclude(console, runs, chosen.plot or cache / "demo" / act.picture)
            console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)
            program = Path(sys.executable).with_name("kvstore")
            others = ", ".join(each for each in NEXT if not getattr(chosen, each[2:]))
            advice = f"Next: {program} up (to ask it yourself), demo {others}"
            console.print(f"[bold]{act.gain(runs)}.[/] {advice}", highlight=False)
    except KeyboardInterrupt:
        console.print("[red]✗[/] The demo was interrupted; nothing of it runs any more.")
        return 130
    except (KVStoreError, NodeFailed, OSError, ImportError, ValueError) as error:
        console.print(f"[red]✗[/] {error}", markup=True, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
