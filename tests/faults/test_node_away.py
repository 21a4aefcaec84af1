"""P2 on a real engine: the node killed or stopped in the middle of loads and stores.

The peer that was measured under the same treatment lost 43 of 60 requests. Here none may be lost,
none wrong, and none later than the limit beyond its own recompute time.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from kvstore.demo.engine import Completion
from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.amounts import amount
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
)
from tests.kit.engines import EngineConfig, EngineServer, server_pid
from tests.kit.gauges import starved_s

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = 60
REQUESTS = amount(30, nightly=60)
"""Of a round."""
PROMPTS = 12
LATE_S = 1.5
HURT_MIN = 4
"""Kills, and stops, at least."""
ROUNDS_MAX = 12
UNHURT_MAX = 4
"""Answers between two kills or stops, at most."""


class Tormentor:
    """Kills or stops the node again and again, in a thread, until told to stop.

    What it waits for between are answers, not seconds: a slow machine's node serves as often.
    """

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._done = threading.Event()
        self._answers = 0
        self._changed = threading.Condition()
        self.node = NodeProcess.start(directory, dram="256MiB")
        self.kills = 0
        self.stops = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.node.stop()

    def answered(self) -> None:
        """One more answer."""
        with self._changed:
            self._answers += 1
            self._changed.notify()

    def _wait_unhurt(self) -> bool:
        """Some answers, and a part of the next one; whether to go on."""
        with self._changed:
            enough = self._answers + self._rng.randint(1, UNHURT_MAX)
            self._changed.wait_for(lambda: self._done.is_set() or self._answers >= enough)
        return not self._done.wait(self._rng.uniform(0.0, 0.5))

    def _run(self) -> None:
        while self._wait_unhurt():
            if self._rng.random() < 0.5:
                self.node.kill()
                self.kills += 1
                self._done.wait(self._rng.uniform(0.0, 0.8))
                self.node = NodeProcess.start(self._directory, dram="256MiB")
            else:
                self.node.pause()
                self.stops += 1
                self._done.wait(self._rng.uniform(0.5, 4.0))
                self.node.resume()


@pytest.fixture
def tormentor(tmp_path: Path) -> Iterator[Tormentor]:
    with Tormentor(tmp_path, random.Random(SEED)) as running:
        yield running


def test_no_request_is_lost_wrong_or_late_while_the_node_dies_again_and_again(
    vllm: EngineNursery, medium_model: Path, encode: Encode, tormentor: Tormentor, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    shared = text_tokens(rng, encode, 4 * BLOCK_TOKENS)
    prompts = [
        (*shared, *text_tokens(rng, encode, rng.randint(1, 12) * BLOCK_TOKENS + rng.randint(0, 90)))
        for _ in range(PROMPTS)
    ]
    # Few blocks: prompts push each other out, so that the node is asked again and again.
    config = EngineConfig(
        model=medium_model,
        socket=tormentor.node.socket,
        kv_blocks=48,
        connector_extra={"verify_every": 1},
    )
    with vllm.start(config, log=tmp_path / "engine.log") as engine:
        recompute = [_computed(engine, prompt) for prompt in prompts]
        reference = [done.tokens for done in recompute]
        order = [rng.randrange(PROMPTS) for _ in range(REQUESTS)]
        rounds = 0
        before = engine.hits().external_hits
        with ThreadPoolExecutor(2) as pool:
            # Over and over until the node was hurt often enough and served in between.
            while rounds < ROUNDS_MAX and not (
                tormentor.kills >= HURT_MIN
                and tormentor.stops >= HURT_MIN
                and engine.hits().external_hits > before
            ):
                rounds += 1
                asked = list(pool.map(lambda i: _timed(engine, prompts[i], tormentor), order))
                done = [each for each, _ in asked]
                wrong = [i for i, c in zip(order, done, strict=True) if c.tokens != reference[i]]
                assert wrong == []
                # Two at a time share the cores: each may take as long as both recomputed.
                slowest = 2 * max(c.duration_s for c in recompute)
                # What they waited for a core, on a machine with other work, is no lateness.
                late = [c.duration_s for c, s in asked if c.duration_s - s > slowest + LATE_S]
                assert late == []
        assert engine.hits().external_hits > before, "the node never served: nothing was tested"
        assert min(tormentor.kills, tormentor.stops) >= HURT_MIN, "the node was hardly hurt"
    logging.getLogger(__name__).info(
        "seed %d: %d requests, %d kills, %d stops",
        *(SEED, rounds * REQUESTS, tormentor.kills, tormentor.stops),
    )


def _timed(
    engine: EngineServer, prompt: tuple[int, ...], tormentor: Tormentor
) -> tuple[Completion, float]:
    """Also the seconds that the engine waited for a core meanwhile."""
    before_s = starved_s(server_pid(engine))
    done = engine.complete(prompt, max_tokens=8)
    tormentor.answered()
    return done, starved_s(server_pid(engine)) - before_s


def _computed(engine: EngineServer, prompt: tuple[int, ...]) -> Completion:
    engine.forget(external=True)
    return engine.complete(prompt, max_tokens=8)
