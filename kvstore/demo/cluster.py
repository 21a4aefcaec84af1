"""`kvstore demo --cluster`: two nodes and two real engines on this machine are one cache.

The same seeded conversations three times: by vLLM alone, by an engine on node a, and by another
engine on node b, which has seen none of them and fetches blocks from node a, over TCP with TLS and
certificates of a CA made for it, by the locations in the index of node a. The exit status is 0 only
when all tokens are identical and prompt tokens came from the other node.

Covers: the runs and their report. Does not cover: one run (`play`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console

from kvstore.demo.engine import VllmServer
from kvstore.demo.play import DRAM, DemoError, DemoStage, ReplayRun, check_answers
from kvstore.demo.settle import settled
from kvstore.demo.workload import ConversationPlan
from kvstore.testing.index_process import Lab
from kvstore.testing.process import NodeProcess

NAMES: Final = ("vLLM alone", "engine on node a", "engine on node b")
PEER_TOKENS: Final = "vllm:kvstore_hit_tokens_peer_total"


class ClusterDemo:
    """The three runs, one after the other; node a and its engine live on while b works."""

    def __init__(
        self, console: Console, plan: ConversationPlan, *, cache: Path, work: Path
    ) -> None:
        self._stage = DemoStage(console, plan, NAMES, cache=cache)
        self._work = work
        self._lab = Lab(work / "pki")

    def run(self, finish: Callable[[list[ReplayRun], float], None]) -> None:
        """`finish` is called with the runs and the number of prompt tokens from the other node."""
        stage = self._stage
        with stage.progress, ExitStack() as stack:
            with stage.start_engine(0, None) as alone:
                runs = [stage.replay(0, alone)]
            a = stack.enter_context(self._start_node("a", ("--index-listen", "127.0.0.1:0")))
            engine = stack.enter_context(stage.start_engine(1, a.socket))
            runs.append(stage.replay(1, engine))
            settled(engine, a, lambda dram, _: dram > 0)
            b = stack.enter_context(self._start_node("b", ("--index", a.index)))
            other = stack.enter_context(stage.start_engine(2, b.socket))
            settled(other, b, lambda *_: True)
            before = _peer_tokens(other)
            runs.append(stage.replay(2, other))
            fetched = _peer_tokens(other) - before
            stage.progress.stop()
            finish(runs, fetched)

    def _start_node(self, name: str, index: Sequence[str]) -> NodeProcess:
        directory = self._work / name
        directory.mkdir()
        peers = ("--peer-listen", "127.0.0.1:0", "--transport", "tcp")
        certificate = self._lab.flags("node", name, with_index=True)
        return NodeProcess.start(directory, dram=DRAM, flags=(*index, *peers, *certificate))


def _peer_tokens(engine: VllmServer) -> float:
    return engine.metrics().get(PEER_TOKENS, 0.0)


def conclude(console: Console, runs: Sequence[ReplayRun], fetched_tokens: float) -> None:
    """One line each; raises DemoError when a claim of the demo fails."""
    *_, other = runs
    check_answers(runs)
    if not fetched_tokens:
        raise DemoError("No prompt token came from the other node.")
    console.print(
        f"[green]✓[/] {fetched_tokens:,.0f} of {other.prompt_tokens:,} prompt tokens came to node b"
        " from node a. Its engine computes first, to measure which waits pay."
    )
    console.print("[green]✓[/] All answers are identical, token by token (float32).")
