"""The main promise on a real engine: the same tokens, cold, from dram, and after a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvstore.testing.engine import Completion, Engine, EngineConfig
from kvstore.testing.models import build_model
from kvstore.testing.process import NodeProcess
from kvstore.testing.workload import Encode, text_tokens
from tests.integration.engine.fixtures import MAX_TOKENS, SEED, Reference
from tests.integration.engine.support import BLOCK_TOKENS, PATIENT, blocks_in_dram, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess.start(tmp_path_factory.mktemp("node"), dram="1GiB") as process:
        yield process


def test_tokens_are_identical_cold_from_dram_and_after_an_engine_restart(
    tiny_model: Path,
    node: NodeProcess,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        model=tiny_model, socket=node.socket, connector_extra={**PATIENT, "verify_every": 1}
    )

    def differing(done: Sequence[Completion]) -> list[int]:
        return [i for i, c in enumerate(done) if c.tokens != reference.answers[i]]

    with Engine.start(config, log=tmp_path / "first.log") as engine:
        cold = engine.complete_many(prompts, max_tokens=MAX_TOKENS, concurrency=8)
        assert differing(cold) == []
        engine.forget()
        before = engine.hits().external_hits
        warm = engine.complete_many(prompts, max_tokens=MAX_TOKENS, concurrency=8)
        assert differing(warm) == []
        dram_tokens = engine.hits().external_hits - before
    full = sum(len(p) // BLOCK_TOKENS for p in prompts) * BLOCK_TOKENS
    distinct = len({p[:BLOCK_TOKENS] for p in prompts if len(p) >= BLOCK_TOKENS}) * BLOCK_TOKENS
    assert dram_tokens >= distinct, f"{dram_tokens} tokens from dram of {full} in full blocks"

    # Another engine process: its own cache is empty, the node's is not.
    with Engine.start(config, log=tmp_path / "second.log") as engine:
        restarted = engine.complete_many(prompts, max_tokens=MAX_TOKENS, concurrency=8)
        assert differing(restarted) == []
        assert engine.hits().external_hits >= distinct


def test_one_token_requests_and_the_last_request_before_idle_are_stored(
    tiny_model: Path, node: NodeProcess, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    prompt = text_tokens(rng, encode, 5 * BLOCK_TOKENS + 7)
    config = EngineConfig(model=tiny_model, socket=node.socket, connector_extra=PATIENT)
    with Engine.start(config, log=tmp_path / "engine.log") as engine:
        held = blocks_in_dram(node)
        engine.complete(prompt, max_tokens=1)
        # Nothing else is asked of the engine: it is idle now.
        wait_until(lambda: blocks_in_dram(node) == held + 5, "the five full blocks are stored")
        engine.forget()
        again = engine.complete(prompt, max_tokens=1)
    assert again.cached_tokens == 5 * BLOCK_TOKENS


def test_blocks_that_fill_during_decoding_serve_the_next_turn(
    tiny_model: Path, node: NodeProcess, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED + 1)
    first = text_tokens(rng, encode, 2 * BLOCK_TOKENS + 40)
    config = EngineConfig(model=tiny_model, socket=node.socket, connector_extra=PATIENT)
    with Engine.start(config, log=tmp_path / "engine.log") as engine:
        held = blocks_in_dram(node)
        answer = engine.complete(first, max_tokens=3 * BLOCK_TOKENS)
        history = (*first, *answer.tokens)
        second = (*history, *text_tokens(rng, encode, 30))
        # The last token of the answer was sampled but never computed, so its block may lack it.
        blocks = (len(history) - 1) // BLOCK_TOKENS
        wait_until(lambda: blocks_in_dram(node) == held + blocks, f"{blocks} blocks are stored")
        engine.forget()
        done = engine.complete(second, max_tokens=4)
    assert done.cached_tokens == blocks * BLOCK_TOKENS


def test_other_weights_in_the_same_directory_hit_nothing(
    node: NodeProcess, encode: Encode, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    prompt = text_tokens(random.Random(SEED + 2), encode, 4 * BLOCK_TOKENS)
    hits = []
    for seed in (1, 2):
        (directory.rename(tmp_path / "earlier") if directory.exists() else None)
        build_model(directory, size="tiny", weights_seed=seed)
        config = EngineConfig(model=directory, socket=node.socket, connector_extra=PATIENT)
        with Engine.start(config, log=tmp_path / f"{seed}.log") as engine:
            held = blocks_in_dram(node)
            engine.complete(prompt, max_tokens=2)
            wait_until(partial(_holds, node, held + 4), "all four are stored")
            engine.forget()
            engine.complete(prompt, max_tokens=2)
            counts = engine.hits()
            hits.append((counts.external_queries, counts.external_hits))
    (_, first_hits), (_, second_hits) = hits
    # Each engine hits its own blocks once, after `forget`; the second hits none of the first's.
    assert first_hits == second_hits
    assert 0 < second_hits <= 4 * BLOCK_TOKENS


def _holds(node: NodeProcess, blocks: int) -> bool:
    return blocks_in_dram(node) == blocks


def test_reset_with_external_is_a_fresh_start(
    tiny_model: Path, node: NodeProcess, encode: Encode, tmp_path: Path
) -> None:
    prompt = text_tokens(random.Random(SEED + 3), encode, 4 * BLOCK_TOKENS + 1)
    config = EngineConfig(model=tiny_model, socket=node.socket, connector_extra=PATIENT)
    with Engine.start(config, log=tmp_path / "engine.log") as engine:
        engine.complete(prompt, max_tokens=2)
        engine.forget(external=True)
        held = blocks_in_dram(node)
        assert engine.complete(prompt, max_tokens=2).cached_tokens == 0
        wait_until(lambda: blocks_in_dram(node) >= held + 4, "the fresh space has all four")
        engine.forget()
        assert engine.complete(prompt, max_tokens=2).cached_tokens == 4 * BLOCK_TOKENS
