"""A real vLLM and a real node with a slab of GPU memory, which is simulated for both of them.

Each process has a simulated device of its own; the slab is memory that both have mapped. So bytes
come from where they come on a GPU, in the order of queues, and no GPU has been proven.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.demo.engine import Completion
from kvstore.testing.process import NodeProcess
from tests.integration.engine.fixtures import MAX_TOKENS, VERIFIED, Reference
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    damage,
    metric,
    node_for,
    serves,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.style.tree import ROOT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="memory of a simulated device is root's"),
]
ASKED, PROMOTED_S = 8, 60.0
FLAGS = ("--hbm", "128MiB", "--scrub", "off")
HIT, LEASED = 'kvstore_blocks_hit_total{tier="dram"}', "kvstore_hbm_blocks_leased_total"
PROMOTED = "kvstore_hbm_blocks_promoted_total"


@pytest.fixture
def engine(vllm: EngineNursery, tiny_model: Path, tmp_path: Path) -> Iterator[EngineServer]:
    config = EngineConfig(
        model=tiny_model,
        socket=tmp_path / "node.sock",
        connector=("tests.kit.simulated_gpu", "SimulatedGpuConnector"),
        connector_extra=VERIFIED,
    )
    with vllm.start(config, log=tmp_path / "engine.log") as server:
        yield server


@pytest.fixture
def node(
    engine: EngineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NodeProcess]:
    path = [str(ROOT / "tests" / "kit" / "simulated_cuda"), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with node_for(engine, tmp_path, dram="256MiB", flags=FLAGS) as process:
        yield process


def test_tokens_from_hbm_are_the_engines_own_and_a_killed_node_makes_none_wrong(
    engine: EngineServer,
    node: NodeProcess,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
) -> None:
    ends = [len(prompt) % BLOCK_TOKENS for prompt in prompts]
    asked = [n for n, p in enumerate(prompts) if ends[n] and len(p) > 2 * BLOCK_TOKENS][:ASKED]
    full = {
        prompts[n][:end]
        for n in asked
        for end in range(BLOCK_TOKENS, len(prompts[n]), BLOCK_TOKENS)
    }

    def ask() -> None:
        """All answers are right."""
        engine.forget()
        done = complete_many(
            engine, [prompts[n] for n in asked], max_tokens=MAX_TOKENS, concurrency=4
        )
        assert [n for n, one in zip(asked, done, strict=True) if wrong(n, one)] == []

    def wrong(n: int, one: Completion) -> bool:
        return one.tokens != reference.answers[n]

    def ask_until_promoted() -> None:
        """Blocks that were leased twice within a minute are copied, until all that are leased in
        a round have a copy."""
        end_s = time.monotonic() + PROMOTED_S
        while time.monotonic() < end_s:
            hit, leased = metric(node, HIT), metric(node, LEASED)
            ask()
            leased = metric(node, LEASED) - leased
            if metric(node, HIT) - hit == leased >= len(full) // 2:
                return
        raise AssertionError(
            f"{metric(node, PROMOTED)} of {len(full)} blocks were copied into hbm, "
            f"{metric(node, LEASED)} leased with a copy; {engine.hits()}"
        )

    ask_until_promoted()
    killer = threading.Timer(0.2, node.crash)
    killer.start()
    ask()
    killer.join()
    wait_until(lambda: serves(node), "it attached again, asked for nothing", seconds=30)
    assert metric(node, PROMOTED) < len(full) // 2, "a new slab is empty"
    ask_until_promoted()

    # Bytes in dram are damaged: what is served, and verified, is served from hbm.
    damage(node)
    before, loaded = metric(node, LEASED), engine.hits().external_hits
    ask()
    assert metric(node, LEASED) - before >= len(full) // 2
    assert engine.hits().external_hits - loaded >= ASKED // 2 * BLOCK_TOKENS
    assert metric(node, "kvstore_blocks_distrusted_total") == 0
    assert "dram alone" not in engine.log.read_text()
