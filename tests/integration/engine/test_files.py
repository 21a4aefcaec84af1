"""A real vLLM and a node that restarts: what its disk kept is served, and answers stay the same."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.testing.engine import Engine, EngineConfig
from kvstore.testing.process import NodeProcess
from kvstore.testing.workload import Encode, text_tokens
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    PATIENT,
    blocks_in_dram,
    inspect,
    wait_until,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 11
PROMPTS = 40


def on_disk(node: NodeProcess) -> int:
    tiers = {row["tier"]: row for row in inspect(node, "tiers")}
    return int(tiers["file"]["blocks"])


def test_a_killed_node_serves_from_its_disk_and_answers_are_the_same(
    tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    lengths = [rng.randint(1, 6) * BLOCK_TOKENS + rng.randint(1, 100) for _ in range(PROMPTS)]
    prompts = [text_tokens(rng, encode, length) for length in lengths]
    blocks = sum(length // BLOCK_TOKENS for length in lengths)
    directory = tmp_path / "node"
    directory.mkdir()
    flags = ["--file", f"{tmp_path / 'files'}:1GiB"]
    extra = {**PATIENT, "verify_every": 1}
    config = EngineConfig(model=tiny_model, socket=directory / "node.sock", connector_extra=extra)

    def attached(engine: Engine, node: NodeProcess) -> bool:
        engine.warm_up()  # an idle engine looks for nobody
        return bool(inspect(node, "nodes")[0]["sessions"] == 1)

    with ExitStack() as stack:
        engine = stack.enter_context(Engine.start(config, log=tmp_path / "engine.log"))
        with NodeProcess.start(directory, dram="256MiB", flags=flags) as node:
            wait_until(lambda: attached(engine, node), "the engine attached")
            cold = [engine.complete(prompt, max_tokens=6) for prompt in prompts]
            assert {done.cached_tokens for done in cold} == {0}
            wait_until(lambda: on_disk(node) == blocks, "everything is on disk")
            node.kill()
        with NodeProcess.start(directory, dram="256MiB", flags=flags) as node:
            wait_until(lambda: attached(engine, node), "attached again")
            wait_until(lambda: on_disk(node) == blocks, "the new node knows what is on disk")
            assert blocks_in_dram(node) == 0
            engine.forget()
            first = [engine.complete(prompt, max_tokens=6) for prompt in prompts]
            assert [done.tokens for done in first] == [done.tokens for done in cold]
            # Computing a block of this model takes less than reading it: who does not wait for the
            # disk still has its blocks promoted, for the next one.
            wait_until(lambda: blocks_in_dram(node) == blocks, "all of it came back to dram")
            engine.forget()
            warm = [engine.complete(prompt, max_tokens=6) for prompt in prompts]
    assert [done.tokens for done in warm] == [done.tokens for done in cold]
    assert [done.cached_tokens for done in warm] == [
        length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths
    ]
