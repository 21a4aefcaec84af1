"""Shadow checks on a real engine: no false alarm over honest prompts, and a planted identity bug.

The bug: weights change, and the fingerprint stays. A connector of the tests has it.
"""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from kvstore.client.core.lookups import SHADOW_CHECK
from kvstore.demo.workload import Encode, text_tokens
from kvstore.engine.why.findings import SPACE_DIGITS
from kvstore.testing.process import NodeProcess
from tests.amounts import amount
from tests.integration.engine.fixtures import MAX_TOKENS, SEED
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    COMPARED,
    DIVERGED,
    SHADOWED,
    WORST,
    blocks_in_dram,
    inspect,
    kvstore,
    metric,
    no_alarm,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.kit.gauges import page
from tests.kit.models import build_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

logger = logging.getLogger(__name__)

PROMPT_COUNT = amount(16, nightly=48)


def hit_blocks(node: NodeProcess) -> int:
    """Of the second engine's prompts, those whose lookups were answered in time."""
    stories = kvstore(node, "explain", "--last", str(PROMPT_COUNT)).get("requests", [])
    return sum(
        story["prompt_tokens"] // BLOCK_TOKENS
        for story in stories
        if story["outcome"] == SHADOW_CHECK
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"][: amount(1, nightly=2)])
def test_honest_prompts_raise_no_alarm(
    vllm: EngineNursery,
    tiny_model: Path,
    encode: Encode,
    tmp_path: Path,
    dtype: Literal["float32", "bfloat16"],
) -> None:
    """Stored eight at a time and in one piece, computed again three at a time and in chunks."""
    rng = random.Random(SEED + 30)
    lengths = [rng.randint(1, 8) * BLOCK_TOKENS + rng.randint(1, 100) for _ in range(PROMPT_COUNT)]
    prompts = [text_tokens(rng, encode, length) for length in lengths]
    blocks = sum(length // BLOCK_TOKENS for length in lengths)
    with NodeProcess.start(tmp_path, dram="512MiB") as node:
        config = EngineConfig(
            model=tiny_model, dtype=dtype, socket=node.socket, connector_extra=SHADOWED
        )
        with vllm.start(config, log=tmp_path / "first.log") as engine:
            complete_many(engine, prompts, max_tokens=1, concurrency=8)
            wait_until(lambda: blocks_in_dram(node) == blocks, "every block is stored")
        config = EngineConfig(
            model=tiny_model,
            dtype=dtype,
            socket=node.socket,
            connector_extra=SHADOWED,
            max_model_len=1280,
            arguments=("--max-num-batched-tokens", "200"),
        )
        with vllm.start(config, log=tmp_path / "second.log") as engine:
            done = complete_many(engine, prompts, max_tokens=1, concurrency=3)
            assert engine.hits().external_hits == 0, "every hit is computed"
            assert [answer.cached_tokens for answer in done] == [0] * len(prompts)
            # On a busy machine a few lookups are answered too late, and a few comparisons are given
            # up, because the engine needs their blocks (`Handoff.keep_off`).
            wait_until(
                lambda: blocks * 3 / 4 < metric(node, COMPARED) <= hit_blocks(node),
                "most blocks are compared, and none that was no hit",
            )
        no_alarm(node, dtype, compared_min=1)
        logger.info("worst error of %d blocks in %s: %.2g", blocks, dtype, metric(node, WORST))
        assert not any(space["off"] for space in inspect(node, "spaces"))
        assert page(node, "/healthz") == (200, "ok\n")


def test_other_weights_under_the_same_fingerprint_are_seen_and_switched_off(
    vllm: EngineNursery, encode: Encode, tmp_path: Path
) -> None:
    prompts = [text_tokens(random.Random(n), encode, 4 * BLOCK_TOKENS + 9) for n in range(4)]
    with NodeProcess.start(tmp_path, dram="256MiB") as node:
        for seed in (1, 2):
            model = build_model(tmp_path / f"model{seed}", size="tiny", weights_seed=seed)
            config = EngineConfig(
                model=model,
                socket=node.socket,
                connector_extra=SHADOWED,
                connector=("tests.kit.same_digest", "SameDigestConnector"),
            )
            with vllm.start(config, log=tmp_path / f"{seed}.log") as engine:
                if seed == 1:
                    complete_many(engine, prompts, max_tokens=1, concurrency=4)
                    wait_until(lambda: blocks_in_dram(node) == 16, "every block is stored")
                else:
                    _check_caught(node, engine, prompts)


def _check_caught(node: NodeProcess, engine: EngineServer, prompts: list[tuple[int, ...]]) -> None:
    assert engine.complete(prompts[0], max_tokens=MAX_TOKENS).cached_tokens == 0
    wait_until(lambda: metric(node, DIVERGED) == 4, "all four blocks of it differ")
    assert metric(node, WORST) > 0.5
    (space,) = inspect(node, "spaces")
    assert space["off"] == "all"
    digits = space["space"][:SPACE_DIGITS]  # as logs and health say it
    assert blocks_in_dram(node) == 0
    assert f"space {digits} of tenant default is switched off in all tiers" in node.log
    advice = f"'kvstore clear --space {digits}' switches it on again"
    assert advice in node.log
    assert advice in page(node, "/healthz")[1]
    engine.forget()
    for prompt in prompts:  # nothing of the other model is ever served
        assert engine.complete(prompt, max_tokens=1).cached_tokens == 0
    assert blocks_in_dram(node) == 0, "nor is anything stored"
    _clear(node, digits)
    assert page(node, "/healthz") == (200, "ok\n")
    engine.forget()
    engine.complete(prompts[1], max_tokens=1)
    wait_until(lambda: blocks_in_dram(node) == 4, "it is on again")
    engine.forget()
    engine.complete(prompts[1], max_tokens=1)
    wait_until(lambda: metric(node, COMPARED) == 8, "what is stored now is compared")
    assert metric(node, DIVERGED) == 4, "and it is its own"


def _clear(node: NodeProcess, digits: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore.cli.main", "clear"),
            *("--space", digits, "--socket", str(node.socket)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "0 blocks forgotten" in done.stdout
