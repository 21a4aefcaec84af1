"""`kvstore demo`: the gain of a real vLLM from kvstore, on this machine, in a few minutes.

One act of four, from its introduction to its last line; the exit status is 0 only when all its
claims hold.

Does not cover: records and plots of the first act (`make demo`), and what stays up (`up`).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from kvstore.demo.act import Act, Claim
from kvstore.demo.flags import default_cache, read_flags
from kvstore.demo.pd import PdAct
from kvstore.demo.router import RouterAct
from kvstore.demo.stage import Replay, Stage, settled
from kvstore.demo.workload import ConversationPlan
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess

# ── cluster ───────────────────────────────────────────────────────────────────────────────────────
# `kvstore demo --cluster`: two nodes and two real engines on this machine are one cache.
#
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

    def claims(self, runs: Sequence[Replay]) -> list[Claim]:
        """The claim that node b got blocks from node a."""
        *_, other = runs
        return [
            Claim(
                f"{other.moved:,} of {other.prompt_tokens:,} prompt tokens came to node b from node"
                " a. Its engine computes first, to measure which waits pay.",
                other.moved > 0,
                "No prompt token came from the other node.",
            )
        ]


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────
# `kvstore demo`: one node, which outlives its engine, and whose disk outlives the node.
#
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

    def claims(self, runs: Sequence[Replay]) -> list[Claim]:
        """Claims that the node served prompt tokens in each run but the first."""
        alone, shared, restarted, from_disk = runs
        fewer = 1 - shared.computed_tokens / alone.computed_tokens
        first = np.median(restarted.ttft_ms(range(1))) / np.median(alone.ttft_ms(range(1)))
        kept, disk = (run.kvstore_hit_tokens / run.prompt_tokens for run in (restarted, from_disk))
        spared = f"kvstore spared the engine {fewer:.0%} of the prompt tokens it computed alone."
        from_dram = f"After a restart of the engine dram served {kept:.0%} of all prompt tokens."
        later = f"After the node was killed its disk served {disk:.0%} of all prompt tokens."
        return [
            _served(shared, spared),
            _served(restarted, from_dram),
            Claim(f"First questions then took {first:.2f} × as long as with vLLM alone."),
            _served(from_disk, later),
        ]


def _served(run: Replay, sentence: str) -> Claim:
    failure = f"The node served no prompt token in the run '{run.name}'."
    return Claim(sentence, run.kvstore_hit_tokens > 0, failure)


# ── play ──────────────────────────────────────────────────────────────────────────────────────────

ACTS: Final[dict[str, Act]] = {"cluster": ClusterAct(), "pd": PdAct(), "router": RouterAct()}
"""Act of each flag; without one of them: `RestartsAct`."""
NEXT: Final = tuple(f"--{flag}" for flag in ACTS)
"""Flags to try after a demo; its own is left out."""
Finish = Callable[[Sequence[Replay], ConversationPlan], None]
"""Called with the runs of `RestartsAct` after they are shown."""


# ── command line ─────────────────────────────────────────────────────────────────────────────────


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
        act.introduce(console, plan)
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
