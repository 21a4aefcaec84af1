"""Engines whose models mix full attention with windows: several KV cache groups.

Gemma 3's shape has six groups, gpt-oss's has two; windows of 256 and 128 tokens are crossed by most
prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.demo.models import BLOCK_TOKENS
from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.amounts import amount
from tests.integration.engine.fixtures import ANSWER_TOKENS, MAX_TOKENS, SEED, VERIFIED
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    OWN_ERRORS,
    PREEMPTIONS,
    SHADOWED,
    damage,
    hits,
    inspect,
    no_alarm,
    node_for,
    served,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.kit.hybrid_models import TOKEN_BYTES, build_hybrid
from tests.kit.prompts import varied_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = amount(20, nightly=120)
CONCURRENCY = 8
FEW_BLOCKS = {"gemma3": 80, "gpt-oss": 36}
"""Of all groups together: too few for CONCURRENCY requests."""
ONE_OR_BOTH = amount(1, nightly=2)
"""Shapes with which a test is done that takes long."""
LOADED_SHARE = 0.75
"""At most so much of what full attention in all layers would load."""


class Hybrid:
    """A model, prompts, and the answers of an engine that computes all of them."""

    def __init__(
        self,
        model: Path,
        prompts: Sequence[tuple[int, ...]],
        answers: list[tuple[int, ...]],
        long_answers: list[tuple[int, ...]],
    ) -> None:
        self.model, self.prompts = model, prompts
        self.answers, self.long_answers = answers, long_answers

    def check(self, engine: EngineServer, *, long: bool = False) -> None:
        """All prompts, several at a time."""
        count = CONCURRENCY if long else len(self.prompts)
        tokens = ANSWER_TOKENS if long else MAX_TOKENS
        done = complete_many(
            engine, self.prompts[:count], max_tokens=tokens, concurrency=CONCURRENCY
        )
        expected = self.long_answers if long else self.answers
        assert [at for at, each in enumerate(done) if each.tokens != expected[at]] == []


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(
    vllm: EngineNursery,
    shape: str,
    tiny_model: Path,
    encode: Encode,
    tmp_path_factory: pytest.TempPathFactory,
) -> Hybrid:
    directory = tmp_path_factory.mktemp("hybrid")
    model = build_hybrid(directory / "model", tiny_model, shape=shape)
    short = varied_prompts(
        SEED, count=PROMPTS - CONCURRENCY, block_tokens=BLOCK_TOKENS, blocks_max=8, encode=encode
    )
    rng = random.Random(SEED)
    stem = text_tokens(rng, encode, 5 * BLOCK_TOKENS + 3)
    long = [
        (*stem[: rng.randrange(len(stem))], *text_tokens(rng, encode, 3 * BLOCK_TOKENS + 70))
        for _ in range(CONCURRENCY)
    ]
    prompts = [*long, *short]
    config = EngineConfig(model=model, arguments=("--no-enable-prefix-caching",))
    with vllm.start(config, log=directory / "reference.log") as engine:
        answers = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=CONCURRENCY)
        longer = complete_many(engine, long, max_tokens=ANSWER_TOKENS, concurrency=CONCURRENCY)
    return Hybrid(
        model, prompts, [each.tokens for each in answers], [each.tokens for each in longer]
    )


@pytest.fixture
def engine(vllm: EngineNursery, hybrid: Hybrid, tmp_path: Path) -> Iterator[EngineServer]:
    config = EngineConfig(
        model=hybrid.model, socket=tmp_path / "node.sock", connector_extra=VERIFIED
    )
    with vllm.start(config, log=tmp_path / "engine.log") as engine:
        yield engine


def test_tokens_are_equal_and_hits_as_long_as_they_can_be(
    engine: EngineServer, hybrid: Hybrid, shape: str, tmp_path: Path
) -> None:
    with node_for(engine, tmp_path) as node:
        hybrid.check(engine)
        engine.forget()
        before = engine.metrics()
        for prompt, answer in zip(hybrid.prompts, hybrid.answers, strict=True):
            # As in a cache of unlimited size: whole blocks, without the last token. A node on a
            # busy machine may have dropped a store: the request that misses it stores it.
            whole = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            for _ in range(3):
                engine.forget()
                done = engine.complete(prompt, max_tokens=MAX_TOKENS)
                assert done.tokens == answer
                if done.cached_tokens == whole:
                    break
            assert done.cached_tokens == whole
        counts = {name: value - before.get(name, 0) for name, value in engine.metrics().items()}
        tokens = counts["vllm:kvstore_hit_tokens_total"]
        loaded = counts["vllm:kvstore_load_bytes_total"] / (tokens * TOKEN_BYTES[shape])
        assert 0 < loaded < LOADED_SHARE
        assert not engine.metrics().get(OWN_ERRORS)
        wait_until(lambda: not inspect(node, "leases"), "every lease was given back")


@pytest.mark.parametrize("shape", ["gemma3", "gpt-oss"][:ONE_OR_BOTH], scope="module")
def test_with_few_blocks_and_preemption_tokens_stay_equal(
    vllm: EngineNursery, hybrid: Hybrid, shape: str, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=hybrid.model,
        connector_extra=VERIFIED,
        kv_blocks=FEW_BLOCKS[shape],
        max_num_seqs=CONCURRENCY,
        max_model_len=1536,
    )
    with served(vllm, tmp_path, config) as (engine, _):
        for turn in range(8):  # how many requests meet is up to the machine
            hybrid.check(engine, long=True)
            hybrid.check(engine)
            engine.forget()
            if turn and engine.metrics()[PREEMPTIONS] > 0:
                break
        assert engine.metrics()[PREEMPTIONS] > 0
        assert engine.hits().external_hits > 0


@pytest.mark.parametrize("shape", ["gpt-oss", "gemma3"][:ONE_OR_BOTH], scope="module")
def test_a_node_that_is_killed_or_stopped_and_damaged_bytes_change_no_answer(
    engine: EngineServer, hybrid: Hybrid, tmp_path: Path
) -> None:
    # Loads shall find the damage, not the scrub, which would drop it first.
    flags = ["--file", f"{tmp_path / 'files'}:1GiB", "--scrub", "off"]
    with ThreadPoolExecutor(1) as pool:
        for fault in (NodeProcess.kill, NodeProcess.pause, damage):
            with node_for(engine, tmp_path, flags=flags) as node:
                hybrid.check(engine)
                engine.forget()
                before = hits(engine)
                load = pool.submit(hybrid.check, engine)
                while hits(engine) == before and not load.done():
                    continue
                fault(node)
                load.result()
                if fault is NodeProcess.pause:
                    node.resume()
                engine.forget()
                hybrid.check(engine)
    assert engine.metrics()["vllm:kvstore_load_failures_total"] > 0, "damage was met"
    assert not engine.metrics().get(OWN_ERRORS)


@pytest.mark.parametrize("shape", ["gemma3", "gpt-oss"][:ONE_OR_BOTH], scope="module")
def test_shadow_checks_compare_blocks_of_all_groups(
    vllm: EngineNursery, hybrid: Hybrid, shape: str, tmp_path: Path
) -> None:
    prompts = hybrid.prompts[:16]
    config = EngineConfig(
        model=hybrid.model,
        connector_extra=SHADOWED,
        arguments=("--max-num-batched-tokens", "600"),
    )
    full = sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)
    with served(vllm, tmp_path, config) as (engine, node):
        for _ in range(2):
            complete_many(engine, prompts, max_tokens=1, concurrency=3)
            engine.forget()
        assert engine.hits().external_hits == 0, "every hit is computed"
        wait_until(lambda: not inspect(node, "leases"), "every comparison has ended")
        no_alarm(node, "float32", compared_min=2 * full + 1)  # more than full attention has
