"""Several engines and models on one node, and a dram that is far too small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    PATIENT,
    PREEMPTIONS,
    blocks_in_dram,
    inspect,
    node_for,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.kit.models import build_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 5
FOUR_SLOTS = "2MiB"
"""A block of the tiny model in float32 is 512 KiB."""


def test_two_engines_share_blocks_and_two_models_do_not(
    vllm: EngineNursery, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    other_model = build_model(tmp_path / "other", size="tiny", weights_seed=77)
    prompt = text_tokens(random.Random(SEED), encode, 4 * BLOCK_TOKENS + 9)
    with NodeProcess.start(tmp_path, dram="128MiB") as node:
        mine = EngineConfig(model=tiny_model, socket=node.socket, connector_extra=PATIENT)
        theirs = EngineConfig(model=other_model, socket=node.socket, connector_extra=PATIENT)
        with (
            vllm.start(mine, log=tmp_path / "a.log") as a,
            vllm.start(mine, log=tmp_path / "b.log") as b,
            vllm.start(theirs, log=tmp_path / "c.log") as c,
        ):
            first = a.complete(prompt, max_tokens=8)
            assert first.cached_tokens == 0
            wait_until(lambda: blocks_in_dram(node) == 4, "the first engine's blocks are stored")
            second = b.complete(prompt, max_tokens=8)
            assert second.cached_tokens == 4 * BLOCK_TOKENS
            assert second.tokens == first.tokens
            foreign = c.complete(prompt, max_tokens=8)
            assert foreign.cached_tokens == 0
            assert foreign.tokens != first.tokens
            wait_until(lambda: blocks_in_dram(node) == 8, "the other model's blocks are stored")
            assert len(inspect(node, "spaces")) == 2
            # The second engine goes away; the first still hits what either stored.
            b.kill()
            a.forget()
            assert a.complete(prompt, max_tokens=8).cached_tokens == 4 * BLOCK_TOKENS
            c.forget()
            again = c.complete(prompt, max_tokens=8)
            assert again.cached_tokens == 4 * BLOCK_TOKENS
            assert again.tokens == foreign.tokens


def test_a_dram_of_four_slots_serves_what_it_can_and_answers_stay_right(
    plain: EngineServer, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED + 1)
    prompts = [text_tokens(rng, encode, rng.randint(1, 6) * BLOCK_TOKENS + 3) for _ in range(12)]
    plain.forget()
    truth = [plain.complete(prompt, max_tokens=6).tokens for prompt in prompts]
    with node_for(plain, tmp_path, dram=FOUR_SLOTS) as node:
        for _ in range(4):
            plain.forget()
            done = complete_many(plain, prompts, max_tokens=6, concurrency=6)
            assert [c.tokens for c in done] == truth
        # One prompt at a time: its first block at least stays and is found.
        plain.complete(prompts[0], max_tokens=1)
        plain.forget()
        wait_until(lambda: 0 < blocks_in_dram(node) <= 4, "something is held")
        served = plain.hits().external_hits
        for _ in range(3):
            plain.forget()
            plain.complete(prompts[0], max_tokens=1)
        assert plain.hits().external_hits > served


def test_a_preempted_request_loads_its_own_blocks_when_it_resumes(
    vllm: EngineNursery, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED + 2)
    prompts = [text_tokens(rng, encode, 3 * BLOCK_TOKENS + 20) for _ in range(6)]
    with NodeProcess.start(tmp_path, dram="256MiB") as node:
        # Three of these requests fit at their full length; six are begun.
        config = EngineConfig(
            model=tiny_model,
            socket=node.socket,
            kv_blocks=22,
            max_model_len=1024,
            connector_extra=PATIENT,
            arguments=("--no-enable-prefix-caching",),
        )
        with vllm.start(config, log=tmp_path / "engine.log") as engine:
            calm = complete_many(engine, prompts, max_tokens=3 * BLOCK_TOKENS, concurrency=3)
            # The last one's copies may still be under way: its next start would find less.
            held = len(prompts) * ((3 * BLOCK_TOKENS + 20 + 3 * BLOCK_TOKENS - 1) // BLOCK_TOKENS)
            wait_until(lambda: blocks_in_dram(node) == held, f"{held} blocks are stored")
            before = engine.metrics()
            done = complete_many(engine, prompts, max_tokens=3 * BLOCK_TOKENS, concurrency=6)
            after = engine.metrics()
    assert before[PREEMPTIONS] == 0
    assert [c.tokens for c in done] == [c.tokens for c in calm]
    preemptions = after[PREEMPTIONS] - before[PREEMPTIONS]
    assert preemptions >= 1, "nothing was preempted: the test tests nothing"
    name = "vllm:kvstore_hit_tokens_total"
    loaded = after[name] - before[name]
    # All six prompts are held, so every start loads 3 blocks; a resumption also what it decoded.
    assert loaded >= 3 * BLOCK_TOKENS * (len(prompts) + preemptions)
