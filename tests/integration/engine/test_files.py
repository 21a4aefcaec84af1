"""A real vLLM and a node that restarts: what its disk kept is served, and answers stay the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.demo.engine import Completion
from kvstore.demo.workload import Encode, text_tokens
from tests.amounts import amount
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    blocks_in_dram,
    blocks_on_disk,
    node_for,
    wait_until,
)
from tests.kit.engines import EngineServer, complete_many

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 11
PROMPTS = amount(30, nightly=100)
CONCURRENCY = 4


def test_a_killed_node_serves_from_its_disk_and_answers_are_the_same(
    plain: EngineServer, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    lengths = [rng.randint(1, 3) * BLOCK_TOKENS + rng.randint(1, 100) for _ in range(PROMPTS)]
    prompts = [text_tokens(rng, encode, length) for length in lengths]
    blocks = sum(length // BLOCK_TOKENS for length in lengths)
    flags = ["--file", f"{tmp_path / 'files'}:1GiB"]

    def ask() -> list[Completion]:
        return complete_many(plain, prompts, max_tokens=6, concurrency=CONCURRENCY)

    with node_for(plain, tmp_path, flags=flags) as node:
        cold = ask()
        assert {done.cached_tokens for done in cold} == {0}
        wait_until(lambda: blocks_on_disk(node) == blocks, "everything is on disk")
        node.kill()
    with node_for(plain, tmp_path, flags=flags) as node:
        wait_until(lambda: blocks_on_disk(node) == blocks, "the new node knows what is on disk")
        assert blocks_in_dram(node) == 0

        def is_back() -> bool:
            """Computing a block of this model takes less than reading it: who does not wait for
            the disk still has blocks promoted for the next one, as many as it can bring."""
            again = ask()
            plain.forget()
            assert [done.tokens for done in again] == [done.tokens for done in cold]
            return blocks_in_dram(node) == blocks

        wait_until(is_back, "all of it came back to dram", seconds=120)
        warm = ask()
    assert [done.tokens for done in warm] == [done.tokens for done in cold]
    assert [done.cached_tokens for done in warm] == [
        length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths
    ]
