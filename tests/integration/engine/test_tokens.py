"""The main promise on a real engine: the same tokens, cold, from dram, and in another engine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.integration.engine.fixtures import MAX_TOKENS, SEED, Reference
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    OWN_ERRORS,
    PATIENT,
    blocks_in_dram,
    node_for,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.kit.models import build_model

FEW_BLOCKS = 40

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def node(plain: EngineServer, tmp_path: Path) -> Iterator[NodeProcess]:
    with node_for(plain, tmp_path, dram="512MiB") as process:
        yield process


def loaded_in_two_rounds(
    engine: EngineServer, prompts: Sequence[tuple[int, ...]], reference: Reference
) -> list[int]:
    """Tokens from the node in each round, the engine's own cache empty before it. All answers are
    those of the reference."""
    loaded = []
    for _ in range(2):
        engine.forget()
        before = engine.hits().external_hits
        done = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=8)
        assert [i for i, c in enumerate(done) if c.tokens != reference.answers[i]] == []
        loaded.append(int(engine.hits().external_hits - before))
    return loaded


def test_tokens_are_identical_cold_from_dram_and_in_another_engine(
    vllm: EngineNursery,
    plain: EngineServer,
    node: NodeProcess,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    loaded = loaded_in_two_rounds(plain, prompts, reference)
    full = sum(len(p) // BLOCK_TOKENS for p in prompts) * BLOCK_TOKENS
    distinct = len({p[:BLOCK_TOKENS] for p in prompts if len(p) >= BLOCK_TOKENS}) * BLOCK_TOKENS
    assert loaded[1] >= distinct, f"{loaded[1]} tokens from dram of {full} in full blocks"

    # Another engine process: its own cache is empty, the node's is not.
    with vllm.start(plain.config, log=tmp_path / "second.log") as engine:
        done = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=8)
        assert [i for i, c in enumerate(done) if c.tokens != reference.answers[i]] == []
        assert engine.hits().external_hits >= distinct


def test_tokens_are_identical_where_copies_are_those_of_a_gpu(
    vllm: EngineNursery,
    plain: EngineServer,
    node: NodeProcess,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    """Its memory is the simulated device's: copies are done later, and in an order of its choice.
    With few blocks they are needed again while stores read them."""
    config = dataclasses.replace(
        plain.config,
        connector=("tests.kit.simulated_gpu", "SimulatedGpuConnector"),
        kv_blocks=FEW_BLOCKS,
    )
    with vllm.start(config, log=tmp_path / "gpu.log") as engine:
        _, loaded = loaded_in_two_rounds(engine, prompts, reference)
        full = sum(len(p) // BLOCK_TOKENS for p in prompts) * BLOCK_TOKENS
        assert loaded >= full // 2, f"{loaded} tokens from dram of {full} in full blocks"
        assert not engine.metrics().get(OWN_ERRORS)


def test_other_weights_in_the_same_directory_hit_nothing(
    vllm: EngineNursery, node: NodeProcess, encode: Encode, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    prompt = text_tokens(random.Random(SEED + 2), encode, 4 * BLOCK_TOKENS)
    hits = []
    for seed in (1, 2):
        (directory.rename(tmp_path / "earlier") if directory.exists() else None)
        build_model(directory, size="tiny", weights_seed=seed)
        config = EngineConfig(model=directory, socket=node.socket, connector_extra=PATIENT)
        with vllm.start(config, log=tmp_path / f"{seed}.log") as engine:
            held = blocks_in_dram(node)
            engine.complete(prompt, max_tokens=2)
            wait_until(partial(_holds, node, held + 4), "all four are stored")
            engine.forget()
            engine.complete(prompt, max_tokens=2)
            hits.append(engine.hits().external_hits)
    first_hits, second_hits = hits
    # Each engine hits its own blocks once, after `forget`; the second hits none of the first's.
    assert first_hits == second_hits
    assert 0 < second_hits <= 4 * BLOCK_TOKENS


def _holds(node: NodeProcess, blocks: int) -> bool:
    return blocks_in_dram(node) == blocks
