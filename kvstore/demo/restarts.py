"""`kvstore demo`: one node, which outlives its engine, and whose disk outlives the node.

The same seeded conversations four times: by vLLM alone, with kvstore, with kvstore after the engine
was restarted, and after the node was killed and started again, so that its disk serves. All
histories together exceed the engine's own cache, as in service. The exit status is 0 only when all
tokens are identical and the node served prompt tokens each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvstore.demo.act import Act, Claim
from kvstore.demo.settle import settled
from kvstore.demo.stage import Replay, Stage
from kvstore.testing.process import NodeProcess

FILE: Final = "4GiB"


class RestartsAct(Act):
    """The node outlives the engine after the second run, and the engine the node after the
    third."""

    names = ("vLLM alone", "with kvstore", "engine restarted", "node restarted")

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """See the class."""
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
        """The node served each run but the first."""
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
