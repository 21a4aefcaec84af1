"""The stage of an act: the model, nodes and engines on it, replays of the conversations, and a line
for each phase.

    with Stage(console, plan, cache=cache) as stage, stage.engine("vLLM alone") as engine:
        run = stage.replay("vLLM alone", engine)

Nodes and engines live to the end of the stage, an engine with a `with` of its own to that.

float32, because in bfloat16 vLLM's prefix cache already changes one greedy output in about a
hundred (another kernel shape rounds otherwise), which would hide a change by kvstore.

Does not cover: what an act shows of its runs (`play`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from kvstore.cli.ask import node_client
from kvstore.demo.engine import (
    Completion,
    CompletionClient,
    HitCounts,
    ServerConfig,
    VllmServer,
)
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
    with node_client(node.socket) as client:
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
"""Words for the requests that have a history; lines and table show their median."""


class Replay(msgspec.Struct, kw_only=True):
    """Result of one replay of all conversations."""

    name: str
    answers: dict[tuple[int, int], Completion]
    """(user, round) → answer, in the order of the replay."""
    hits: HitCounts = HitCounts(0, 0, 0)
    """Sum of all its engines."""
    moved: int = 0
    """Prompt tokens fetched from another node, or blocks pushed to it."""
    token_s: tuple[float, ...] = ()
    """Seconds from the first token of an answer beside long prompts to each of its tokens."""
    receipts: list[Receipt] = []
    """Decisions of the router, in the order of its log."""

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers.values())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - round(self.hits.local_hits + self.hits.external_hits)

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
    """Model, nodes and engines of one act; see the module."""

    def __init__(self, console: Console, plan: ConversationPlan, *, cache: Path) -> None:
        """Args:
        console: gets a line for each phase; a terminal also shows the latest request.
        plan: the conversations.
        cache: folder for the model, built once, and for the engines' logs.
        """
        super().__init__()
        self.plan, self._console = plan, console
        self._status = console.status("")
        self.nodes: list[NodeProcess] = []
        self.engines: list[VllmServer] = []
        self._logs, model = cache / "demo", cache / "models" / MEDIUM.size
        self._logs.mkdir(parents=True, exist_ok=True)
        self._config = ServerConfig(model=model, max_model_len=MODEL_LEN_MAX)
        with self._status:
            self.note("building the model (once)")
            self.encode = encoder(build_model(model))
        self.work = Path(self.enter_context(TemporaryDirectory(prefix="kvstore-demo-")))
        self.enter_context(self._status)

    def note(self, text: str) -> None:
        """Print what begins or has ended."""
        self._console.print(text, highlight=False, markup=False)
        self._status.update(escape(text))

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

    def engine(
        self, name: str, node: NodeProcess | None = None, *, blocks: int = ENGINE_BLOCKS
    ) -> VllmServer:
        """Start an engine: on a node, to which it is attached then, or alone."""
        self.note(f"{name}: vLLM is starting")
        config = replace(self._config, kv_blocks=blocks, socket=node.socket if node else None)
        engine = VllmServer.start(config, log=self._logs / f"engine-{len(self.engines)}.log")
        self.engines.append(self.enter_context(engine))
        if node is not None:
            settled(engine, node, lambda *_: True)
        return engine

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    def replay(
        self,
        name: str,
        *engines: VllmServer,
        through: CompletionClient | None = None,
        abreast: int = 1,
    ) -> Replay:
        """Replay all conversations.

        Args:
            name: of the run.
            engines: of which hits are counted.
            through: what is asked; None: the engine.
            abreast: requests at a time, of those of a round.
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
                    reused = 100 * answer.cached_tokens // answer.prompt_tokens
                    self._status.update(
                        f"{name}: request {len(answers)} of {self.plan.users * self.plan.rounds},"
                        f" first token {1000 * answer.ttft_s:.0f} ms, {reused} % of prompt reused"
                    )
        after = [engine.hits() for engine in engines]
        hits = HitCounts(*np.subtract(after, before).sum(axis=0).tolist())
        run = Replay(name=name, answers=answers, hits=hits)
        self.note(f"{name}: median {run.median_ms:.0f} ms to first token {LATER}")
        return run
