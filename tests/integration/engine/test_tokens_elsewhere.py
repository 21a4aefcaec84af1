"""The same promise where engines get complicated: bfloat16, drafts, chunks, few blocks, aborted
requests, resets, and prompts of 4,000 blocks.

Does not cover: chosen moments of an abort or a copy (`tests/sim`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.amounts import amount
from tests.integration.engine.fixtures import ANSWER_TOKENS, MAX_TOKENS, SEED, VERIFIED, Reference
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    PREEMPTIONS,
    blocks_in_dram,
    inspect,
    served,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, abandon, complete_many
from tests.kit.models import build_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

DRAFTS = (
    "--speculative-config",
    '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}',
)
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
LOADED_BYTES = "vllm:kvstore_load_bytes_total"
ABANDONED_MAX = 8
ABANDONED = amount(24, nightly=96)
WAITS_S = (0.0, 0.01, 0.03, 0.1, 0.3)
"""Until a request is given up."""


def test_bfloat16_tokens_are_those_of_the_engines_own_hit_of_the_same_length(
    vllm: EngineNursery, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    """Against a full recompute even vLLM's own hit differs now and then in this type."""
    rng = random.Random(SEED + 10)
    lengths = [
        rng.randint(1, 5) * BLOCK_TOKENS + rng.randint(1, 100)
        for _ in range(amount(12, nightly=60))
    ]
    prompts = [text_tokens(rng, encode, length) for length in lengths]
    config = EngineConfig(model=tiny_model, dtype="bfloat16", connector_extra=VERIFIED)
    with served(vllm, tmp_path, config, dram="256MiB") as (engine, node):
        complete_many(engine, prompts, max_tokens=1, concurrency=8)
        own = [engine.complete(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
        assert engine.hits().external_hits == 0
        blocks = sum(length // BLOCK_TOKENS for length in lengths)
        wait_until(lambda: blocks_in_dram(node) == blocks, "every block is stored")
        engine.forget()
        ours = [engine.complete(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
    hit_tokens = [length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths]
    assert [done.cached_tokens for done in own] == hit_tokens
    assert [done.cached_tokens for done in ours] == hit_tokens
    assert [done.tokens for done in ours] == [done.tokens for done in own]


def test_drafts_chunks_few_blocks_aborts_and_resets_change_no_token(
    vllm: EngineNursery,
    tiny_model: Path,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        model=tiny_model,
        max_model_len=1280,
        kv_blocks=24,  # three requests at their longest; eight are begun
        max_num_seqs=8,
        connector_extra=VERIFIED,
        arguments=("--max-num-batched-tokens", "160", *DRAFTS),
    )
    with served(vllm, tmp_path, config) as (engine, node):
        _hold_conversations(engine, reference)
        _ask_all(engine, prompts, reference)
        _abandon_some(engine, prompts)
        wait_until(lambda: not inspect(node, "leases"), "aborted requests gave leases back")
        _ask_all(engine, prompts, reference)
        engine.forget(external=True)
        before = engine.hits().external_hits
        short = [p for p in prompts if len(p) < BLOCK_TOKENS]
        for prompt in (prompts[0], short[0]):
            assert engine.complete(prompt, max_tokens=1).cached_tokens == 0
        assert engine.hits().external_hits == before, "served after reset_external"
        _ask_all(engine, prompts, reference)


def _hold_conversations(engine: EngineServer, reference: Reference) -> None:
    """Both turns of all; the second finds what the first one's decoding has filled."""
    talks = reference.conversations
    before = engine.metrics()[PREEMPTIONS]
    first = complete_many(engine, [t.first for t in talks], max_tokens=ANSWER_TOKENS, concurrency=8)
    assert [done.tokens for done in first] == [talk.answer for talk in talks]
    counts = engine.metrics()
    assert counts[PREEMPTIONS] > before, "nothing was preempted: the test tests nothing"
    assert 0 < counts[ACCEPTED] < counts[DRAFTED], "all drafts had the same fate"
    engine.forget()
    for talk in talks:
        hits = engine.hits().external_hits
        done = engine.complete(talk.second, max_tokens=MAX_TOKENS)
        assert done.tokens == talk.second_answer
        history = len(talk.first) + len(talk.answer)
        loaded = engine.hits().external_hits - hits
        # The last token of the answer was sampled but never computed, so its block may lack it.
        assert loaded == (history - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def _ask_all(
    engine: EngineServer, prompts: Sequence[tuple[int, ...]], reference: Reference
) -> None:
    """Twice, so that the second time is from the store."""
    for _ in range(2):
        hits = engine.hits().external_hits
        done = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=8)
        assert [c.tokens for c in done] == reference.answers
        engine.forget()
    assert engine.hits().external_hits > hits


def _abandon_some(engine: EngineServer, prompts: Sequence[tuple[int, ...]]) -> None:
    """Hang up at any moment: waiting, loading, computing, storing, decoding."""
    rng = random.Random(SEED + 11)
    engine.warm_up()  # counts travel with answers
    loaded = engine.metrics()[LOADED_BYTES]
    jobs = [(rng.choice(prompts[:60]), rng.choice(WAITS_S)) for _ in range(ABANDONED)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: _abandon(engine, job[0], after_s=job[1]), jobs))
    engine.warm_up()
    assert engine.metrics()[LOADED_BYTES] > loaded, "nothing was loaded for them"


def _abandon(engine: EngineServer, prompt: Sequence[int], *, after_s: float) -> None:
    end = time.monotonic() + after_s
    abandon(engine, prompt, max_tokens=ANSWER_TOKENS, until=lambda: time.monotonic() >= end)


def _has_more(node: NodeProcess, blocks: int) -> bool:
    return blocks_in_dram(node) > blocks


def _abandoned_half_way(
    engine: EngineServer, node: NodeProcess, prompts: Sequence[Sequence[int]], blocks: int
) -> tuple[Sequence[int], int]:
    """The first of these prompts of so many blocks that is not computed to its end, as those are
    whose abort comes late on a busy machine; and how many of its blocks are there."""
    for prompt in prompts:
        before = blocks_in_dram(node)
        begun = partial(_has_more, node, before + 100)
        abandon(engine, prompt, max_tokens=4, until=begun)
        engine.forget()
        if (held := blocks_in_dram(node) - before) < blocks:
            return prompt, held
    pytest.fail("each was computed to its end")


def test_a_prompt_of_many_blocks_and_one_that_is_abandoned_half_way(
    vllm: EngineNursery, tmp_path: Path
) -> None:
    model = build_model(tmp_path / "model", size="long")
    rng = random.Random(SEED + 12)
    block_tokens, blocks, few = 32, amount(1200, nightly=4000), amount(450, nightly=1500)
    long, *shorter = (
        [rng.randrange(256) for _ in range(count * block_tokens + 5)]
        for count in (blocks, *[few] * ABANDONED_MAX)
    )
    config = EngineConfig(
        model=model,
        max_model_len=(blocks + 8) * block_tokens,
        connector_extra=VERIFIED,
        arguments=("--block-size", str(block_tokens), "--max-num-batched-tokens", "4096"),
    )
    with served(vllm, tmp_path, config, dram="1GiB") as (engine, node):
        half, held = _abandoned_half_way(engine, node, shorter, few)
        resumed = engine.complete(half, max_tokens=4)
        # One of those blocks may be that of the warm-up, stored meanwhile.
        assert (held - 1) * block_tokens <= resumed.cached_tokens < few * block_tokens
        engine.forget(external=True)
        computed = engine.complete(half, max_tokens=4)
        assert computed.cached_tokens == 0
        assert computed.tokens == resumed.tokens

        cold = engine.complete(long, max_tokens=4)
        engine.forget()
        for after_s in (0.05, 0.1, 0.15, 0.2, 0.25):  # a load takes about 0.1 s
            _abandon(engine, long, after_s=after_s)
        engine.forget()
        warm = engine.complete(long, max_tokens=4)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == blocks * block_tokens
    assert warm.tokens == cold.tokens
