"""`kvstore demo`: the gain of a real vLLM from kvstore, on this machine, in a few minutes.

One act of four, from its introduction to its last line; an act has runs, and claims about them.

    introduction ─▶ runs ─▶ table ─▶ claims ─▶ picture ─▶ gain

Claims are checked before they are shown: a demo that ends well has proven them, and the exit status
is 0 only when all of them hold.

Does not cover: what an act runs on (`stage`), records and plots of the first act (`make demo`), and
what stays up (`up`).
"""

from __future__ import annotations

import io
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.cli.ask import node_client
from kvstore.cli.route import show_receipt
from kvstore.demo.engine import CompletionClient, samples
from kvstore.demo.models import BLOCK_TOKENS, MEDIUM, default_cache
from kvstore.demo.stage import ENGINE_BLOCKS, LATER, LATER_ROUNDS, Replay, Stage, settled
from kvstore.demo.workload import ConversationPlan, Conversations, Encode, fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.installation import lacking
from kvstore.router.receipt_log import read_receipts
from kvstore.testing.process import NodeFailed, RouterProcess
from kvstore.units import format_size

KV_BYTES: Final = MEDIUM.kv_bytes_per_token(4)


class DemoError(KVStoreError):
    """A failure of the demo, in one sentence."""


def prove(holds: object, otherwise: str) -> None:
    """Raises DemoError with the sentence `otherwise` unless a claim holds."""
    if not holds:
        raise DemoError(otherwise)


class Act(ABC):
    """One way to run the demo: its runs, and what they show."""

    plan = ConversationPlan()
    """Its conversations, unless the command line says otherwise."""
    room = f"its own cache holds {ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens"
    """Room for histories, which is less than they need; for the introduction."""

    @abstractmethod
    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do all runs, one after the other, and yield the result of each."""

    @abstractmethod
    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Yield what the runs have shown, besides equal answers. Raises DemoError: it is not what
        they should have shown.
        """

    def gain(self, runs: Sequence[Replay]) -> str:
        """Text about the gain, for the last line."""
        factors = (f"{run.name} {runs[0].median_ms / run.median_ms:.1f} ×" for run in runs[1:])
        saved_s = sum(run.hits.saved_s for run in runs)
        return (
            f"Speed-up of the first token {LATER}: {', '.join(factors)};"
            f" {saved_s:.0f} s of prefill saved"
        )


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

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do the runs alone, with a node, after a restart of the engine, and after a restart of the
        node.
        """
        disk = ("--file", f"{stage.work / 'files'}:{FILE}")
        with stage.engine("vLLM alone") as engine:
            yield stage.replay("vLLM alone", engine)
        node = stage.node(*disk)
        with stage.engine("with kvstore", node) as engine:
            yield stage.replay("with kvstore", engine)
        engine = stage.engine("engine restarted", node)
        yield stage.replay("engine restarted", engine)
        stage.note("node restarted: the node is killed and started again")
        held = settled(engine, node, lambda dram, disk: dram > 0 and disk >= dram)
        node.kill()
        settled(engine, stage.node(*disk), lambda _, disk: disk >= held)
        engine.forget()
        yield stage.replay("node restarted", engine)

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Claims that the node served prompt tokens in each run but the first."""
        alone, shared, restarted, from_disk = runs
        for run in runs[1:]:
            none = f"The node served no prompt token in the run '{run.name}'."
            prove(run.hits.external_hits, none)
        fewer = 1 - shared.computed_tokens / alone.computed_tokens
        first = np.median(restarted.ttft_ms(range(1))) / np.median(alone.ttft_ms(range(1)))
        kept, disk = (run.hits.external_hits / run.prompt_tokens for run in (restarted, from_disk))
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

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do the runs of vLLM alone, of the engine on node a, and of the one on node b."""
        with stage.engine("vLLM alone") as engine:
            yield stage.replay("vLLM alone", engine)
        for name in "ab":
            node = stage.peer(name)
            engine = stage.engine(f"engine on node {name}", node)
            run = stage.replay(f"engine on node {name}", engine)
            run.moved = round(engine.metrics().get(PEER_TOKENS, 0))
            settled(engine, node, lambda dram, _: dram > 0)
            yield run

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """The claim that node b got blocks from node a."""
        *_, other = runs
        prove(other.moved, "No prompt token came from the other node.")
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

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do the run with one engine, then the run with both."""
        with stage.engine("one engine") as alone:
            run = stage.replay("one engine", alone)
            run.token_s = answer_beside_prompts(alone, stage.encode, seed=stage.plan.seed)
            yield run
        nodes = [stage.peer(name, "--landing", LANDING) for name in "pd"]
        p, d = (stage.engine(f"engine {x}", node) for x, node in zip("pd", nodes, strict=True))
        workers = [p.as_worker("p", "p,role=prefill"), d.as_worker("d", "d,role=decode")]
        with RouterProcess.start(stage.work, workers) as router:
            router.await_worker()
            client = CompletionClient(router.port)
            run = stage.replay("prefill → decode", d, through=client)
            run.moved = round(samples(nodes[1].metrics_url).get(PUSHED, 0))
            run.token_s = answer_beside_prompts(client, stage.encode, seed=stage.plan.seed)
            yield run

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Claims that blocks were pushed, and how long an answer pauses."""
        alone, split = runs
        prove(split.moved, "No block was pushed from the prefill node to the decode node.")
        yield (
            f"{split.moved:,} blocks were pushed from node p to node d. Time to first token"
            f" {LATER}: {split.median_ms / alone.median_ms:.2f} × that of one engine (median)."
            " Sources and computed tokens in the table are of the decode engine: the prefill"
            " engine computed what was pushed, and node d keeps it for the next turn."
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


# ── --router: two engines behind the router, by cost and by turns ─────────────────────────────────
# The same seeded conversations twice, through the same router, engines and nodes, all users of a
# round at once: with the policy `round-robin`, then, after both engines and nodes have forgotten
# everything, with `cost`. Each engine and node has room for the histories of half the users and a
# little more, and nodes fetch nothing from each other. By turns each engine sees every history.
# This is the case that routing by prefix is for: with room for everything, or with prompts that
# share nothing, both are about alike. The exit status is 0 only when all tokens are identical and
# `cost` is faster.

POLICIES: Final = {"round robin": "round-robin", "kvstore router": "cost"}
"""Name of a run → policy of its router."""
CACHE_SHARE: Final = 0.56
"""Dram of a node, and cache of its engine, as a share of the KV of all histories."""


class RouterAct(Act):
    """Act of `--router`: the policies of `POLICIES`, one after the other."""

    plan = ConversationPlan(users=6, rounds=16, document_words=320, question_words=6)
    room = (
        f"two engines and nodes that fetch nothing from each other, each with room for"
        f" {CACHE_SHARE:.0%} of all histories"
    )

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do a run with each policy, on the same nodes and engines."""
        tokens = round(CACHE_SHARE * history_tokens(stage.plan, stage.encode))
        dram = f"{tokens * KV_BYTES >> 20}MiB"
        for name in "ab":
            node = stage.node("--insecure", "--node-name", name, name=name, dram=dram)
            stage.engine(f"engine {name}, {dram}", node, blocks=tokens // BLOCK_TOKENS)
        for name in POLICIES:
            yield self._run(stage, name)

    def _run(self, stage: Stage, name: str) -> Replay:
        policy = POLICIES[name]
        log = stage.work / f"receipts-{policy}"
        flags = ["--insecure", "--index", stage.nodes[0].index, "--index-timeout", "500"]
        flags += ["--receipts", str(log)]
        flags += [its.as_worker(at, at) for at, its in zip("ab", stage.engines, strict=True)]
        rules = f"policy: {policy}"  # all else is as it is by default
        with RouterProcess.start(stage.work, flags, name=policy, policy=rules) as router:
            stage.note(f"{name}: the router compares its keys with the engines'")
            router.await_parity()
            for engine, node in zip(stage.engines, stage.nodes, strict=True):
                engine.forget()
                with node_client(node.socket) as door:
                    door.clear(space="")
            client, users = CompletionClient(router.port), stage.plan.users
            run = stage.replay(name, *stage.engines, through=client, abreast=users)
            router.stop()  # receipts are written behind the answers
        run.receipts = list(read_receipts(log))
        return run

    def claims(self, runs: Sequence[Replay]) -> Iterator[str]:
        """Claims that each decision is explained, that histories stay where they are cached, and
        that `cost` is faster than `round-robin`.
        """
        turns, routed = runs
        for run in runs:
            few = f"The router wrote fewer than {len(run.answers)} receipts."
            prove(len(run.receipts) >= len(run.answers), few)
        with redirect_stdout(io.StringIO()) as shown:
            show_receipt(routed.receipts[-1])
        yield f"Each decision has a receipt; `kvstore route explain` shows it:\n{shown.getvalue()}"
        (by_turns, _), (by_cost, later) = stays(turns), stays(routed)
        few = f"The router kept {by_cost} of {later} turns at their engine, round robin {by_turns}."
        prove(by_cost >= by_turns, few)  # with one round there are none
        yield (
            f"Of {later} turns with a history {by_cost} went to the engine of the turn before, by"
            f" round robin {by_turns}."
        )
        ratio = np.mean(routed.ttft_ms()) / np.mean(turns.ttft_ms())
        prove(ratio < 1, f"The router's mean time to first token is {ratio:.2f} × round robin's.")
        yield (
            f"Mean time to first token: {ratio:.2f} × that of round robin. Policy `cost` weighs"
            " the history that an engine's node holds against the queue in front of it."
        )

    def gain(self, runs: Sequence[Replay]) -> str:
        """Ratio of the mean times to the first token."""
        turns, routed = (np.mean(run.ttft_ms()) for run in runs)
        return f"Speed-up of the mean first token over round robin: {turns / routed:.1f} ×"


def history_tokens(plan: ConversationPlan, encode: Encode) -> int:
    """Tokens of all histories at their end; the shared system prompt counts for each user."""
    talks = Conversations(plan, encode)
    for turns in talks.rounds():
        for turn in turns:
            talks.answer(turn, (0,) * plan.answer_tokens)
    return sum(len(turn.prompt) + plan.answer_tokens for turn in turns)


def stays(run: Replay) -> tuple[int, int]:
    """(turns that went to the engine of the user's previous turn, turns with a previous one)."""
    at = {receipt.request_id: receipt.chosen for receipt in run.receipts}
    # The id that the engine answers has the router's in it: ``cmpl-ID``.
    places = {
        key: at.get(answer.id.removeprefix("cmpl-"), "") for key, answer in run.answers.items()
    }
    later = [key for key in places if key[1]]
    return sum(places[u, r] == places[u, r - 1] for u, r in later), len(later)


# ── what all acts show ────────────────────────────────────────────────────────────────────────────

COLUMNS: Final[Mapping[str, Callable[[Replay, Replay], str]]] = {
    "TTFT\np50 ms": lambda run, _: f"{run.median_ms:.0f}",
    "TTFT\np95 ms": lambda run, _: f"{np.percentile(run.ttft_ms(LATER_ROUNDS), 95):.0f}",
    "speed-up\n": lambda run, one: f"{one.median_ms / run.median_ms:.1f} ×",
    "prefix-\ncache hits": lambda run, _: f"{run.hits.local_hits:,.0f}",
    "hits in\nkvstore": lambda run, _: f"{run.hits.external_hits:,.0f}",
    "tokens\ncomputed": lambda run, _: f"{run.computed_tokens:,}",
    "answers\nidentical": lambda run, one: f"{run.same_answers(one)}/{len(run.answers)}",
}
"""Title of a column → text of its cell, from a run and the first run."""


def show(console: Console, runs: Sequence[Replay]) -> None:
    """Print the table."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title=f"Time to first token (TTFT) {LATER}, and sources of prompt tokens",
    )
    table.add_column("", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(run.name, *(cell(run, runs[0]) for cell in COLUMNS.values()))
    console.print(table)


def conclude(console: Console, act: Act, runs: Sequence[Replay], picture: Path) -> None:
    """Print the claims, and draw the picture. Raises DemoError: a claim fails."""
    for run in runs:
        differ = len(run.answers) - run.same_answers(runs[0])
        prove(not differ, f"{differ} answers of the run '{run.name}' differ from {runs[0].name}.")
    for claim in [*act.claims(runs), "All answers are identical, token by token (float32)."]:
        console.print(f"[green]✓[/] {escape(claim)}")
    try:
        draw(runs, picture)
    except ImportError:
        console.print(lacking("a plot", "matplotlib", "demo"), markup=False)
        return
    console.print(f"plot: {picture}", highlight=False)


def draw(runs: Sequence[Replay], picture: Path) -> None:
    """Draw each request by its round, and beside it answers that long prompts came across."""
    from matplotlib.figure import Figure

    is_beside = all(run.token_s for run in runs)
    figure = Figure(figsize=(10 if is_beside else 6, 3.4))
    left, *beside = figure.subplots(1, 2 if is_beside else 1, squeeze=False)[0]
    for number, run in enumerate(runs):
        look = {"color": f"C{number}", "label": run.name}
        rounds = sorted({round for _, round in run.answers})
        medians = [np.median(run.ttft_ms(range(at, at + 1))) for at in rounds]
        left.plot([at for _, at in run.answers], run.ttft_ms(), ".", color=f"C{number}", alpha=0.4)
        left.plot(rounds, medians, **look)
        for axes in beside:
            axes.plot(run.token_s, range(1, 1 + len(run.token_s)), **look)
    left.set(xlabel="questions before", ylabel="ms", ylim=(0, None), xticks=rounds)
    left.set_title("Time to first token; line: median")
    for axes in beside:
        axes.set(xlabel="seconds since its first token", ylabel="tokens")
        axes.set_title(f"An answer while {LONG_PROMPTS} long prompts arrive")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


# ── the command ───────────────────────────────────────────────────────────────────────────────────

ACTS: Final[dict[str, Act]] = {
    "": RestartsAct(),
    "cluster": ClusterAct(),
    "pd": PdAct(),
    "router": RouterAct(),
}
"""Act of each flag; without one of them: the first."""
Finish = Callable[[Sequence[Replay], ConversationPlan], None]
"""Called with the runs after they are shown."""


def main(
    act: str = "",
    *,
    plot: Path | None = None,
    cache: Path | None = None,
    finish: Finish = lambda *_: None,
    **changes: int | None,
) -> int:
    """Run an act of `ACTS`, with other numbers in its plan if `changes` has them; returns the exit
    status. The last line of output has the gain and what to try next.
    """
    chosen, cache = ACTS[act], cache or default_cache()
    given = {name: number for name, number in changes.items() if number is not None}
    plan = msgspec.structs.replace(chosen.plan, **given)
    # A terminated demo unwinds like an interrupted one, and so takes node and engine along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The demo was terminated."))
    console = Console()
    console.width = max(console.width, 96)  # the table must not fold when this is no terminal
    begin = time.monotonic()
    try:
        console.rule("[bold]kvstore demo" + f" --{act}" * bool(act))
        console.print(
            f"seed {plan.seed}: {plan.users} users × {plan.rounds} rounds, shared system prompt,"
            " growing history; real vLLM on this machine's CPU,"
            f" {format_size(KV_BYTES)} of KV per token; {chosen.room}.",
            highlight=False,
        )
        with Stage(console, plan, cache=cache) as stage:
            runs = list(chosen.runs(stage))
        show(console, runs)
        finish(runs, plan)
        conclude(console, chosen, runs, plot or cache / "demo" / f"{act or 'demo'}.png")
        console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)
        program = Path(sys.executable).with_name("kvstore")
        others = ", ".join(f"--{each}" for each in ACTS if each not in ("", act))
        advice = f"Next: {program} up (to ask it yourself), demo {others}"
        console.print(f"[bold]{chosen.gain(runs)}.[/] {advice}", highlight=False)
    except KeyboardInterrupt:
        console.print("[red]✗[/] The demo was interrupted; nothing of it runs any more.")
        return 130
    except (KVStoreError, NodeFailed, OSError, ImportError, ValueError) as error:
        console.print(f"[red]✗[/] {escape(str(error))}", highlight=False)
        return 1
    return 0
