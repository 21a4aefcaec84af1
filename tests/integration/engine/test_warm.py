"""A real vLLM, and a node whose process dies or is replaced: memory stays, the engine goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.demo.engine import Completion
from kvstore.demo.workload import Encode, text_tokens
from kvstore.supervisor.sockets import ask_for_upgrade
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    blocks_in_dram,
    inspect,
    metric,
    node_for,
    serves,
    wait_until,
)
from tests.kit.engines import EngineServer, complete_many

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 18
PROMPTS = 12


def test_answers_and_hits_are_the_same_after_a_crash_and_an_upgrade(
    plain: EngineServer, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    lengths = [rng.randint(1, 3) * BLOCK_TOKENS + rng.randint(1, 100) for _ in range(PROMPTS)]
    prompts = [text_tokens(rng, encode, length) for length in lengths]
    blocks = sum(length // BLOCK_TOKENS for length in lengths)

    def ask() -> list[Completion]:
        plain.forget()
        return complete_many(plain, prompts, max_tokens=6, concurrency=2)

    with node_for(plain, tmp_path, dram="256MiB") as node:
        cold = ask()
        wait_until(lambda: blocks_in_dram(node) >= blocks, "all is stored")
        for life in (1, 2):
            if life == 1:
                node.crash()
            else:
                assert "were kept in memory" in ask_for_upgrade(node.socket)
            wait_until(lambda: serves(node), "it attached again, asked for nothing", seconds=30)
            assert inspect(node, "nodes")[0]["blocks_kept"] >= blocks
            warm = ask()
            assert [done.tokens for done in warm] == [done.tokens for done in cold]
            assert [done.cached_tokens for done in warm] == [
                length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths
            ]
            wait_until(
                lambda: metric(node, "kvstore_blocks_verified_total") >= blocks,
                "what was kept was verified by its first reader",
            )
            verified = metric(node, "kvstore_blocks_verified_total")
            assert [done.tokens for done in ask()] == [done.tokens for done in cold]
            assert metric(node, "kvstore_blocks_verified_total") == verified, "once"
            assert metric(node, "kvstore_blocks_distrusted_total") == 0
            assert inspect(node, "tiers")[0]["slots_quarantined"] == 0
    assert "Traceback" not in node.log
