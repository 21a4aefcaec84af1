"""Engines that draft with a model whose cache lies beside the model's, in the same blocks.

The model has two KV heads a layer, its draft models one or four, so pages of two sizes share a
slot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.demo.models import BLOCK_TOKENS
from tests.amounts import amount
from tests.integration.engine.fixtures import MAX_TOKENS, VERIFIED, Reference
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import served
from tests.kit.engines import EngineConfig, complete_many
from tests.kit.side_models import build_eagle, build_twin

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = amount(24, nightly=120)
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_models_cache_is_stored_and_loaded_with_the_models(
    method: str,
    vllm: EngineNursery,
    tiny_model: Path,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
) -> None:
    if method == "eagle":
        draft = build_eagle(tmp_path / "draft", tiny_model)
    else:
        draft = build_twin(tmp_path / "draft", tiny_model)
    speculative = {"method": method, "model": str(draft), "num_speculative_tokens": 2}
    chosen, answers = prompts[:PROMPTS], reference.answers[:PROMPTS]
    config = EngineConfig(
        model=tiny_model,
        connector_extra=VERIFIED,
        arguments=("--speculative-config", json.dumps(speculative)),
    )
    with served(vllm, tmp_path, config) as (engine, _):
        first = complete_many(engine, chosen, max_tokens=MAX_TOKENS, concurrency=8)
        assert [done.tokens for done in first] == answers
        drafted = engine.metrics()[DRAFTED]
        assert drafted > 0
        # The same hits, most of them from the engine's own cache, then none: equal drafts.
        accepted, loaded = [], []
        for _ in range(2):
            before = engine.metrics().get(ACCEPTED, 0), engine.hits().external_hits
            done = [engine.complete(prompt, max_tokens=MAX_TOKENS) for prompt in chosen]
            assert [each.tokens for each in done] == answers
            assert [each.cached_tokens for each in done] == [
                _hit_tokens(prompt, method) for prompt in chosen
            ]
            accepted.append(engine.metrics().get(ACCEPTED, 0) - before[0])
            loaded.append(engine.hits().external_hits - before[1])
            engine.forget()
        assert accepted[0] == accepted[1]
        assert method == "eagle" or accepted[0] > 0.9 * drafted / 3, "guesses of a twin are right"
        assert loaded[1] > 4 * loaded[0]


def _hit_tokens(prompt: tuple[int, ...], method: str) -> int:
    """Whole blocks of the prompt; with EAGLE all but the last of them."""
    blocks = len(prompt) // BLOCK_TOKENS
    return max(0, blocks - (method == "eagle")) * BLOCK_TOKENS
