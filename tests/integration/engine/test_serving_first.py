"""The router with its defaults before two real engines that are slow: all that is asked is served.

A prompt of 2,500 tokens takes an engine seconds, and a dozen at once wait for many times that.
Cases of engines that fail, and of latency: `tests/sim/test_serving_first.py`, in virtual time.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.demo.engine import SERVED_NAME
from kvstore.testing.process import RouterProcess
from tests.amounts import amount
from tests.integration.engine.nursery import EngineNursery
from tests.kit.engines import EngineConfig
from tests.kit.router_thread import ask

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = amount(12, nightly=24)
PROMPT_TOKENS = 2500
SEED = 20261127


def test_prompts_that_wait_for_many_times_their_own_seconds_are_all_served(
    vllm: EngineNursery, medium_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                vllm.start(EngineConfig(model=medium_model), log=tmp_path / f"{name}.log")
            )
            for name in "ab"
        ]
        flags = [
            f"--worker={n}=http://127.0.0.1:{e.port}" for n, e in zip("ab", engines, strict=True)
        ]
        router = stack.enter_context(RouterProcess.start(tmp_path, flags))

        def asked(number: int) -> tuple[int, bytes, str]:
            ids = random.Random(SEED + number).choices(range(3, 250), k=PROMPT_TOKENS)
            body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 4, "temperature": 0}
            body |= {"stream": number % 2 == 0}
            status, headers, content = ask(router.port, body, timeout_s=300)
            return status, content, headers["x-kvstore-worker"]

        with ThreadPoolExecutor(PROMPTS) as pool:
            found = list(pool.map(asked, range(PROMPTS)))
        for number, (status, content, _) in enumerate(found):
            assert (status, b"error" in content) == (200, False), content
            assert number % 2 or content.endswith(b"data: [DONE]\n\n")
        assert {worker for *_, worker in found} == {"a", "b"}
        assert "is down" not in router.log
        assert "breaker" not in router.log
