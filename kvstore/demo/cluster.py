"""`kvstore demo --cluster`: two nodes and two real engines on this machine are one cache.

The same seeded conversations three times: by vLLM alone, by an engine on node a, and by another
engine on node b, which has seen none of them and fetches blocks from node a, by the locations in
the index of node a. The exit status is 0 only when all tokens are identical and prompt tokens came
from the other node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.demo.act import Act, Claim
from kvstore.demo.settle import settled
from kvstore.demo.stage import Replay, Stage

PEER_TOKENS: Final = 'vllm:kvstore_hit_tokens_total{tier="peer"}'


class ClusterAct(Act):
    """Node a and its engine live on while b works."""

    names = ("vLLM alone", "engine on node a", "engine on node b")

    def runs(self, stage: Stage) -> Iterator[Replay]:
        """See the class."""
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
        """Node b served what node a had."""
        *_, other = runs
        return [
            Claim(
                f"{other.moved:,} of {other.prompt_tokens:,} prompt tokens came to node b from node"
                " a. Its engine computes first, to measure which waits pay.",
                other.moved > 0,
                "No prompt token came from the other node.",
            )
        ]
