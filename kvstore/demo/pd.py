"""`kvstore demo --pd`: prefill on one engine and node, decode on another, behind a router.

The same seeded conversations twice: by vLLM alone, and by a prefill engine and a decode engine on
two nodes, which pushes the blocks of each prompt over TCP with TLS. After each run an answer is
streamed while long prompts arrive: an engine that does both makes the answer wait for the prompts.
The exit status is 0 only when all tokens are identical and blocks were pushed.

Covers: the runs, report, plot. Does not cover: one replay (`play`), the processes (`pair`).
"""

from __future__ import annotations

import re
import tempfile
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from rich.console import Console

from kvstore.demo.completions import CompletionClient
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import encoder
from kvstore.demo.pair import pd_pair
from kvstore.demo.play import DRAM, DemoError, DemoStage, ReplayRun, check_answers
from kvstore.demo.workload import ConversationPlan, Encode, fresh_prompts
from kvstore.testing.process import NodeProcess

NAMES: Final = ("one engine", "prefill → decode")
ANSWER_TOKENS: Final = 160
"""Length of the answer that is streamed while other prompts arrive."""
LONG_PROMPTS: Final = 3
LONG_TOKENS: Final = 2000
PAUSE_S: Final = 0.3
"""Time from the request of the answer to the first long prompt."""
PUSHED: Final = "kvstore_push_blocks_landed_total"


class PdRun(NamedTuple):
    """One run: its conversations, and the answer beside long prompts."""

    replayed: ReplayRun
    token_s: tuple[float, ...]
    """When each token of the answer arrived, from the first one on."""
    pushed_blocks: int

    @property
    def gaps_ms(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Milliseconds between two tokens of the answer."""
        return 1000 * np.diff(self.token_s)


class PdDemo:
    """Both runs, one after the other."""

    def __init__(
        self, console: Console, plan: ConversationPlan, *, cache: Path, work: Path
    ) -> None:
        self._stage = DemoStage(console, plan, NAMES, cache=cache)
        self._seed, self._work = plan.seed, work

    def run(self) -> list[PdRun]:
        """Raises TimeoutError, EngineError, NodeFailed."""
        stage, encode = self._stage, encoder(self._stage.config().model)
        with stage.progress:
            with stage.start_engine(0, None) as alone:
                replayed = stage.replay(0, alone)
                runs = [PdRun(replayed, self._beside(alone, encode), 0)]
            stage.note(1, "two nodes and two engines are starting")
            with (
                tempfile.TemporaryDirectory(dir=self._work) as folder,
                pd_pair(
                    Path(folder),
                    stage.config(),
                    lambda config, log: VllmServer.start(config, log=log),
                    dram=DRAM,
                ) as pair,
            ):
                replayed = stage.replay(1, pair.router)
                pushed = metric(pair.node_d, PUSHED)
                runs.append(PdRun(replayed, self._beside(pair.router, encode), round(pushed)))
        return runs

    def _beside(self, engine: CompletionClient, encode: Encode) -> tuple[float, ...]:
        return answer_beside_prompts(engine, encode, seed=self._seed)


def answer_beside_prompts(
    engine: CompletionClient, encode: Encode, *, seed: int
) -> tuple[float, ...]:
    """Seconds from the first token of a long answer to each of its tokens; long prompts arrive
    meanwhile, one after the other."""
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


def conclude(console: Console, runs: list[PdRun], picture: Path) -> None:
    """One line each; raises DemoError when a claim of the demo fails."""
    alone, split = runs
    check_answers([run.replayed for run in runs])
    if not split.pushed_blocks:
        raise DemoError("No block was pushed from the prefill node to the decode node.")
    ratio = np.median(split.replayed.all_ttft_ms()) / np.median(alone.replayed.all_ttft_ms())
    console.print(
        "Sources and computed tokens of the second row are of the decode engine: the prefill engine"
        " computed what was pushed, and node d keeps it for the next turn."
    )
    console.print(
        f"[green]✓[/] {split.pushed_blocks:,} blocks were pushed from node p to node d. Time to"
        f" first token of all requests: {ratio:.2f} × that of one engine (median)."
    )
    console.print(
        f"[green]✓[/] Longest gap between two tokens of an answer while {LONG_PROMPTS} prompts of"
        f" {LONG_TOKENS:,} tokens are computed: {split.gaps_ms.max():.0f} ms, on one engine"
        f" {alone.gaps_ms.max():.0f} ms. (Both engines share the cores of this machine.)"
    )
    console.print("[green]✓[/] All answers are identical, token by token (float32).")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, picture)
    except ImportError:
        console.print("No plot without matplotlib: pip install 'kvstore-llm[demo]'")
    else:
        console.print(f"plot: {picture}", highlight=False)


def draw(runs: list[PdRun], picture: Path) -> None:
    """Left: time to first token; right: tokens of the answer beside long prompts. Raises
    ImportError."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1, 1.25))
    for row, (run, colour) in enumerate(zip(runs, ("#8a94a0", "#0072b2"), strict=True)):
        name, times = run.replayed.name, np.array(run.replayed.all_ttft_ms()) / 1000
        spread = np.linspace(-0.12, 0.12, len(times))
        left.plot(times, row + spread, "o", color=colour, alpha=0.5, markersize=4, mew=0)
        middle = float(np.median(times))
        left.plot([middle, middle], [row - 0.25, row + 0.25], color=colour, linewidth=2)
        left.annotate(
            f"{middle:.2f} s", (middle, row - 0.3), color=colour, ha="center", va="bottom"
        )
        right.plot(run.token_s, range(1, 1 + len(run.token_s)), color=colour, label=name)
    left.set_yticks((0, 1), [run.replayed.name for run in runs])
    left.set(ylim=(1.5, -0.7), xlim=(0, None), xlabel="seconds; bar: median")
    left.set_title("Time to first token", fontsize=10, loc="left")
    right.set(xlabel="seconds since its first token", ylabel="tokens", xlim=(0, None))
    right.set_title(f"An answer while {LONG_PROMPTS} long prompts arrive", fontsize=10, loc="left")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)
    plt.close(figure)
