"""The stage of an act: the model, nodes and engines on it, replays of the conversations, and the
display of their progress.

    with Stage(console, plan, names, cache=cache, work=work) as stage, stage.engine(0) as engine:
        run = stage.replay(0, engine)

Nodes live to the end of the stage, engines to that of their `with`.

float32, because in bfloat16 vLLM's prefix cache already changes one greedy output in about a
hundred (another kernel shape rounds otherwise), which would hide a change by kvstore.

Does not cover: what an act shows of its runs (`play`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.cli.ask import NodeClient
from kvstore.demo.engine import Completion, CompletionClient, ServerConfig, VllmServer
from kvstore.demo.models import MEDIUM, build_model, encoder
from kvstore.demo.workload import ConversationPlan, Conversations
from kvstore.engine.why.report import NodeReport, TierReport
from kvstore.routing.receipts import Receipt
from kvstore.testing.process import Lab, NodeProcess

# ── settle ────────────────────────────────────────────────────────────────────────────────────────
# Wait until a node and its engine are at rest, for benchmarks.

TIMEOUT_S: Final = 60.0


def settled(engine: VllmServer, node: NodeProcess, enough: Callable[[int, int], bool]) -> int:
    """Wait until the engine is attached, all of dram is ready, and `enough` of (blocks in dram,
    blocks on disk). Returns the blocks on disk.

    Raises:
        TimeoutError: not within TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.closing(NodeClient(node.socket)) as client:
        while time.monotonic() < deadline:
            engine.warm_up()  # an idle engine does not attach
            sessions = sum(row.sessions for row in client.rows("nodes", NodeReport))
            tiers = {row.tier: row for row in client.rows("tiers", TierReport)}
            ready = tiers["dram"].ready_bytes == tiers["dram"].capacity_bytes
            if sessions and ready and enough(tiers["dram"].blocks, tiers["file"].blocks):
                return tiers["file"].blocks
            threading.Event().wait(0.05)
    raise TimeoutError("The node did not come to rest; see its log.")


# ── stage ─────────────────────────────────────────────────────────────────────────────────────────

MODEL_LEN_MAX: Final = 3584
ENGINE_BLOCKS: Final = 32
DRAM: Final = "2GiB"
ANY_PORT: Final = "127.0.0.1:0"
ALL_ROUNDS: Final = range(sys.maxsize)
LATER_ROUNDS: Final = ALL_ROUNDS[1:]
LATER: Final = "from round 2 on"
"""Words for the requests that have a history; progress, table and last line show their median."""


class Replay(msgspec.Struct, kw_only=True):
    """Result of one replay of all conversations."""

    name: str
    answers: dict[tuple[int, int], Completion]
    """(user, round) → answer, in the order of the replay."""
    own_hit_tokens: int = 0
    """Prompt tokens found in the engines' prefix caches."""
    kvstore_hit_tokens: int = 0
    """Prompt tokens loaded from nodes."""
    saved_s: float = 0.0
    """Seconds of prefill saved less waits, as the engines estimate it."""
    moved: int = 0
    """Prompt tokens fetched from another node, or blocks pushed to it."""
    token_s: tuple[float, ...] = ()
    """Seconds from the first token of an answer beside long prompts to each of its tokens."""
    receipts: list[Receipt] = []
    receipt_log: Path = Path()

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers.values())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.own_hit_tokens - self.kvstore_hit_tokens

    def ttft_ms(self, rounds: range = ALL_ROUNDS) -> list[float]:
        """Milliseconds to the first token of each request of these rounds."""
        return [1000 * each.ttft_s for (_, at), each in self.answers.items() if at in rounds]

    @property
    def median_ms(self) -> float:
        """Median time to first token of requests that have a history."""
        return float(np.median(self.ttft_ms(LATER_ROUNDS)))

    def same_answers(self, other: Replay) -> int:
        """Number of answers equal to those of another run."""
        return sum(each.tokens == other.answers[at].tokens for at, each in self.answers.items())


class Stage(ExitStack):
    """Model, nodes, engines and progress of one act; see the module."""

    def __init__(
        self, console: Console, plan: ConversationPlan, names: Sequence[str], *, cache: Path
    ) -> None:
        """Args:
        console: display of progress.
        plan: the conversations.
        names: of the runs.
        cache: folder for the model, built once, and for the engines' logs.
        """
        super().__init__()
        self.plan, self._console, self._names = plan, console, names
        self.nodes: list[NodeProcess] = []
        self.engines: list[VllmServer] = []
        self._logs, model = cache / "demo", cache / "models" / MEDIUM.size
        self._logs.mkdir(parents=True, exist_ok=True)
        self._config = ServerConfig(model=model, max_model_len=MODEL_LEN_MAX)
        self._say("building the model (once)")
        with console.status("building the model (once)"):
            build_model(model)
        self.encode = encoder(model)
        self.work = Path(self.enter_context(TemporaryDirectory(prefix="kvstore-demo-")))
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
        self._tasks = [
            self.progress.add_task(f"{name:<17}", total=total, start=False, note="waiting")
            for name in names
        ]

    # ── progress ─────────────────────────────────────────────────────────────────────────────────

    def note(self, index: int, note: str) -> None:
        """Show an activity of a run other than its requests."""
        self.progress.start_task(self._tasks[index])
        self.progress.update(self._tasks[index], note=note)
        self._say(f"{self._names[index]}: {note}")

    def _say(self, text: str) -> None:
        """Print a line where no progress can be drawn, as in a log of CI."""
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False)

    def _answered(self, index: int, answer: Completion) -> None:
        reused = 100 * answer.cached_tokens // answer.prompt_tokens
        note = f"first token {1000 * answer.ttft_s:5.0f} ms, {reused:3d} % of prompt reused"
        self.progress.update(self._tasks[index], advance=1, note=note)

    # ── processes ────────────────────────────────────────────────────────────────────────────────

    def node(self, *flags: str, name: str = "", dram: str = DRAM) -> NodeProcess:
        """Start a node. Nodes with names form a cluster, whose index is in the first one."""
        if name:
            index = ("--index", self.nodes[0].index) if self.nodes else ("--index-listen", ANY_PORT)
            flags = (*index, *flags)
        directory = self.work / name
        directory.mkdir(exist_ok=True)
        self.nodes.append(self.enter_context(NodeProcess.start(directory, dram=dram, flags=flags)))
        return self.nodes[-1]

    def peer(self, name: str, *flags: str) -> NodeProcess:
        """Start a node that moves blocks from and to others: over TCP with TLS, and certificates
        of a CA made for it."""
        certificate = Lab(self.work / "pki").flags("node", name, with_index=True)
        peers = ("--peer-listen", ANY_PORT, "--transport", "tcp")
        return self.node(*peers, *certificate, *flags, name=name)

    def engine(self, index: int, node: NodeProcess | None = None) -> VllmServer:
        """Start the engine of a run, on a node or alone."""
        self.note(index, "vLLM is starting")
        return self._start(node, ENGINE_BLOCKS)

    def engines_on(
        self, nodes: Sequence[NodeProcess], *, blocks: int = ENGINE_BLOCKS
    ) -> list[VllmServer]:
        """Start an engine on each node; they are attached, and live to the end of the stage."""
        engines = [self.enter_context(self._start(node, blocks)) for node in nodes]
        for engine, node in zip(engines, nodes, strict=True):
            settled(engine, node, lambda *_: True)
            engine.warm_up()
        return engines

    def _start(self, node: NodeProcess | None, blocks: int) -> VllmServer:
        config = replace(self._config, kv_blocks=blocks, socket=node.socket if node else None)
        log = self._logs / f"engine-{len(self.engines)}.log"
        self.engines.append(VllmServer.start(config, log=log))
        return self.engines[-1]

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    def replay(
        self,
        index: int,
        *engines: VllmServer,
        through: CompletionClient | None = None,
        abreast: int = 1,
        shows_mean: bool = False,
    ) -> Replay:
        """Replay all conversations.

        Args:
            index: of the run.
            engines: of which hits are counted.
            through: what is asked; None: the engine.
            abreast: requests at a time, of those of a round.
            shows_mean: at the end show the mean of all requests.
        """
        client, talks = through or engines[0], Conversations(self.plan, self.encode)
        answers: dict[tuple[int, int], Completion] = {}
        before = [engine.hits() for engine in engines]
        with ThreadPoolExecutor(abreast) as pool:
            for turns in talks.rounds():
                asked = pool.map(
                    lambda turn: client.complete(turn.prompt, max_tokens=self.plan.answer_tokens),
                    turns,
                )
                for turn, answer in zip(turns, asked, strict=True):
                    talks.answer(turn, answer.tokens)
                    answers[turn.user, turn.round] = answer
                    self._answered(index, answer)
        after = [engine.hits() for engine in engines]
        own, loaded, saved_s = np.subtract(after, before).sum(axis=0)
        run = Replay(
            name=self._names[index],
            answers=answers,
            own_hit_tokens=round(own),
            kvstore_hit_tokens=round(loaded),
            saved_s=saved_s,
        )
        median = f"median {run.median_ms:.0f} ms to first token {LATER}"
        mean = f"mean {np.mean(run.ttft_ms()):.0f} ms to first token"
        self.note(index, mean if shows_mean else median)
        self.progress.stop_task(self._tasks[index])
        return run
