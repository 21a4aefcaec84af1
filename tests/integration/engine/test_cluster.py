"""Two nodes, two real engines: what one computed, the other is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.demo.engine import Completion
from kvstore.testing.process import Lab, NodeProcess
from tests.integration.engine.fixtures import MAX_TOKENS, Reference
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    attached,
    blocks_in_dram,
    node_for,
    wait_until,
)
from tests.kit.engines import EngineServer, complete_many
from tests.kit.peers import at_rest, metric

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_engine_is_served_what_another_nodes_engine_computed_and_says_the_same_tokens(
    vllm: EngineNursery,
    plain: EngineServer,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    reachable = ("--peer-listen", "127.0.0.1:0")
    with_index = ("--index-listen", "127.0.0.1:0")
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    flags = (*with_index, *reachable, *lab.flags("node", "there", with_index=True))
    with node_for(plain, there, flags=flags) as far:
        complete_many(plain, prompts, max_tokens=MAX_TOKENS, concurrency=8)
        expected = len(leading_blocks(prompts))
        assert blocks_in_dram(far) >= expected
        flags = ("--index", far.index, "--fetch", "always", *reachable, *lab.flags("node", "here"))
        with NodeProcess.start(here, dram="512MiB", flags=flags) as near:
            # What it computes is not kept: every block that is here came from there.
            extra = plain.config.connector_extra | {"store": "none"}
            config = replace(plain.config, socket=near.socket, connector_extra=extra)
            with vllm.start(config, log=here / "engine.log") as engine:
                wait_until(lambda: attached(engine, near), "the engine attached", seconds=60)

                def has_come() -> bool:
                    """A block of this model is computed sooner than fetched: who does not wait
                    still has blocks fetched for the next one."""
                    done = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=8)
                    assert wrong_answers(done, reference) == []
                    engine.forget()
                    return blocks_in_dram(near) >= expected

                wait_until(has_come, "all that the other holds is here", seconds=300)
                before = hit_tokens(engine)
                done = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=8)
                assert wrong_answers(done, reference) == []
                assert hit_tokens(engine) - before >= expected * BLOCK_TOKENS
            at_rest(near)
        assert metric(far, "kvstore_served_blocks_total") >= expected


def leading_blocks(prompts: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Every block before the last token of a prompt, which vLLM always computes; by all tokens up
    to its end."""
    ends = ((p, range(BLOCK_TOKENS, len(p), BLOCK_TOKENS)) for p in prompts)
    return {prompt[:end] for prompt, its in ends for end in its}


def wrong_answers(done: Sequence[Completion], reference: Reference) -> list[int]:
    """Which of them are not what the truth says."""
    return [i for i, c in enumerate(done) if c.tokens != reference.answers[i]]


def hit_tokens(engine: EngineServer) -> float:
    """Tokens that it has loaded so far."""
    return engine.metrics().get("vllm:kvstore_hit_tokens_total", 0.0)
