"""`kvstore demo --pd`: prefill on one engine and node, decode on another, behind a router.

    client ─▶ router ─▶ engine p ── node p (with the index)
                └─────▶ engine d ── node d

The same seeded conversations twice: by vLLM alone, and by a prefill engine and a decode engine on
two nodes, which pushes the blocks of each prompt over TCP with TLS. After each run an answer is
streamed while long prompts arrive: an engine that does both makes the answer wait for the prompts.
The exit status is 0 only when all tokens are identical and blocks were pushed.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.demo.act import COLOURS, Act, Claim, dots
from kvstore.demo.completions import CompletionClient
from kvstore.demo.stage import LATER, Replay, Stage
from kvstore.demo.workload import Encode, fresh_prompts
from kvstore.testing.process import NodeProcess, RouterProcess

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        workers = [
            *("--worker", f"p=http://127.0.0.1:{p.port},role=prefill,node=p"),
            *("--worker", f"d=http://127.0.0.1:{d.port},role=decode,node=d"),
        ]
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

    def claims(self, runs: Sequence[Replay]) -> list[Claim]:
        """Claims that blocks were pushed, and how long an answer pauses."""
        alone, split = runs
        return [
            Claim(
                f"{split.moved:,} blocks were pushed from node p to node d. Time to first token"
                f" {LATER}: {split.median_ms / alone.median_ms:.2f} × that of one engine (median).",
                split.moved > 0,
                "No block was pushed from the prefill node to the decode node.",
            ),
            Claim(
                f"Longest gap between two tokens of an answer while {LONG_PROMPTS} prompts of"
                f" {LONG_TOKENS:,} tokens are computed: {longest_gap_ms(split):.0f} ms, on one"
                f" engine {longest_gap_ms(alone):.0f} ms. (Both engines share the cores of this"
                " machine.)"
            ),
        ]

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
