"""`kvstore demo --router`: two engines behind the router, by cost and by turns.

The same seeded conversations twice, through the same router, engines and nodes, all users of a
round at once: with the policy `round-robin`, then, after both engines and nodes have forgotten
everything, with `cost`. Each engine and node has room for the histories of half the users and a
little more, and nodes fetch nothing from each other. By turns each engine sees every history. This
is the case that routing by prefix is for: with room for everything, or with prompts that share
nothing, both are about alike. The exit status is 0 only when all tokens are identical and `cost` is
faster.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final

import numpy as np
from rich.markup import escape

from kvstore.cli.ask import NodeClient
from kvstore.demo.act import COLOURS, KV_BYTES, Act, Claim, DemoError, Measure, dots
from kvstore.demo.completions import CompletionClient
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.demo.stage import LATER_ROUNDS, Replay, Stage
from kvstore.demo.workload import ConversationPlan, Conversations, Encode
from kvstore.router.receipt_log import read_receipts
from kvstore.testing.process import RouterProcess

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES: Final = ("round-robin", "cost")
CACHE_SHARE: Final = 0.56
"""Dram of a node, and cache of its engine, as a share of the KV of all histories."""


class RouterAct(Act):
    """Act of `--router`: the policies of `POLICIES`, one after the other."""

    heading = "kvstore demo --router"
    names = ("round robin", "kvstore router")
    requests = "of all requests"
    columns = (
        Measure("TTFT\nmean ms", lambda run, _: f"{np.mean(run.ttft_ms()):.0f}"),
        Measure("TTFT\np95 ms", lambda run, _: f"{np.percentile(run.ttft_ms(), 95):.0f}"),
        Measure("round 2 on\nmean ms", lambda run, _: f"{np.mean(run.ttft_ms(LATER_ROUNDS)):.0f}"),
        Measure("tokens\nreused", lambda run, _: f"{run.prompt_tokens - run.computed_tokens:,}"),
        Measure("tokens\ncomputed", lambda run, _: f"{run.computed_tokens:,}"),
        Measure(
            "requests\nat a, b", lambda run, _: f"{requests_at(run, 'a')}, {requests_at(run, 'b')}"
        ),
        Measure("turns at\none engine", lambda run, _: "{}/{}".format(*stays(run))),
    )
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
        for name, engine in zip("ab", stage.engines, strict=True):
            flags += ["--worker", f"{name}=http://127.0.0.1:{engine.port},node={name}"]
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

    def claims(self, runs: Sequence[Replay]) -> list[Claim]:
        """The claim that `cost` is faster than `round-robin`."""
        turns, routed = runs
        ratio = np.mean(routed.ttft_ms()) / np.mean(turns.ttft_ms())
        return [
            Claim(
                f"Mean time to first token: {ratio:.2f} × that of round robin. Policy `cost` weighs"
                " the history that an engine's node holds against the queue in front of it.",
                bool(ratio < 1),
                f"The router's mean time to first token is {ratio:.2f} × round robin's.",
            )
        ]

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
