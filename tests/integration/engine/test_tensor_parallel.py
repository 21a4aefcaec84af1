"""Engines of several ranks: each stores its part, replicated heads are stored once, tokens stay.

One start of such an engine takes a quarter of a minute, so the tests are few and each asks much.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from kvstore.demo.engine import EngineError
from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.amounts import IS_NIGHTLY, amount
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    PATIENT,
    at_baseline,
    blocks_in_dram,
    blocks_on_disk,
    inspect,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many, worker_pids
from tests.kit.models import SHAPES, build_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20261122
PROMPT_COUNT = amount(10, nightly=60)
MAX_TOKENS = 4
CONCURRENCY = 2
"""Fewer than the breaker's limit: ranks that wait for each other spin, and on two cores the node
was seen to answer after a second. With more under way, that once would open the breaker."""
TWO_HEADS = ("--tensor-parallel-size", "2")
COMPILED = ("--no-enforce-eager", "--compilation-config", '{"mode": 3, "backend": "eager"}')
"""Eager as the others, but by way of the compiler: an engine that compiles nothing skips the
warm-up on CPUs, in which a later stage makes the tensors that it receives into. In `make test` the
nursery makes them, and the quarter of a minute for the compiler is saved."""
TWO_STAGES = ("--pipeline-parallel-size", "2", *(COMPILED if IS_NIGHTLY else ()))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess.start(tmp_path, dram="512MiB") as process:
        yield process


@pytest.fixture(scope="module")
def prompts(encode: Encode) -> list[tuple[int, ...]]:
    """Different from the first token on, so that a first pass is computed whole."""
    rng = random.Random(SEED)
    lengths = [rng.randint(1, 2) * BLOCK_TOKENS + rng.randint(1, 40) for _ in range(PROMPT_COUNT)]
    return [text_tokens(rng, encode, length) for length in lengths]


def config(model: Path, node: NodeProcess, *arguments: str) -> EngineConfig:
    return EngineConfig(
        model=model,
        socket=node.socket,
        max_model_len=1024,
        connector_extra={**PATIENT, "verify_every": 1, "log_requests": True},
        arguments=arguments,
    )


def full_blocks(prompts: Sequence[Sequence[int]]) -> int:
    return sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)


def complete(engine: EngineServer, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    done = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=CONCURRENCY)
    return [completion.tokens for completion in done]


def cold_then_from_dram(
    engine: EngineServer, node: NodeProcess, prompts: list[tuple[int, ...]], *, slots_per_block: int
) -> list[tuple[int, ...]]:
    """Tokens of a cold pass, after seeing that a pass from dram gives the same."""
    held, hits = blocks_in_dram(node), engine.hits().external_hits
    cold = complete(engine, prompts)
    assert engine.hits().external_hits == hits, "the cold pass is computed"
    blocks = full_blocks(prompts)
    wait_until(
        lambda: blocks_in_dram(node) == held + slots_per_block * blocks, "every block is stored"
    )
    engine.forget()
    assert complete(engine, prompts) == cold
    assert_mostly_loaded(engine, prompts, before=hits)
    return cold


def assert_mostly_loaded(
    engine: EngineServer, prompts: Sequence[Sequence[int]], *, before: float = 0
) -> None:
    """Most blocks came from dram. Not all: on a machine that is busy with two ranks, an answer of
    the node may come after the deadline, and then the request is computed."""
    loaded = engine.hits().external_hits - before
    full = full_blocks(prompts) * BLOCK_TOKENS
    assert full / 2 <= loaded <= full, f"{loaded} tokens from dram of {full}: see {engine.log}"


def test_two_ranks_give_the_same_tokens_cold_from_dram_and_files_and_may_be_killed(
    vllm: EngineNursery, tiny_model: Path, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    flags = ["--file", f"{tmp_path / 'files'}:1GiB"]
    slots = 2 * full_blocks(prompts)
    with ExitStack() as stack:
        first = stack.enter_context(NodeProcess.start(tmp_path, dram="512MiB", flags=flags))
        two = config(tiny_model, first, *TWO_HEADS)
        engine = stack.enter_context(vllm.start(two, log=tmp_path / "two.log"))
        assert len(worker_pids(engine)) == 2
        cold = cold_then_from_dram(engine, first, prompts, slots_per_block=2)
        wait_until(lambda: blocks_on_disk(first) == slots, "everything is on disk")
        first.kill()
        node = stack.enter_context(NodeProcess.start(tmp_path, dram="512MiB", flags=flags))
        wait_until(lambda: is_served(engine, node), "all ranks are attached again")
        wait_until(lambda: blocks_on_disk(node) == slots, "the new node knows what is on disk")
        engine.forget()

        def is_back() -> bool:
            """The disk is asked for as much at once as it can bring in time."""
            assert complete(engine, prompts) == cold
            engine.forget()
            return blocks_in_dram(node) == slots

        wait_until(is_back, "all of it came back to dram", seconds=120)
        before = engine.hits().external_hits
        assert complete(engine, prompts) == cold
        assert_mostly_loaded(engine, prompts, before=before)
        kill_one_rank_under_load(engine, prompts)
        wait_until(lambda: at_baseline(node), "the node is back at baseline")


def is_served(engine: EngineServer, node: NodeProcess) -> bool:
    """An idle engine looks for nobody, so it is asked something."""
    engine.warm_up()
    return has_session(node)


def kill_one_rank_under_load(engine: EngineServer, prompts: list[tuple[int, ...]]) -> None:
    """SIGKILL to the second worker while loads run; returns when vLLM has ended. It ends by itself,
    but for its HTTP server, which sometimes waits for the answers that nobody will give."""
    engine.forget()
    before = engine.hits().external_hits

    def busy() -> None:
        try:
            complete_many(engine, prompts * 6, max_tokens=40, concurrency=6)
        except EngineError:
            return  # it is being killed

    load = Thread(target=busy)
    load.start()
    wait_until(lambda: engine.hits().external_hits > before, "loads are under way")
    os.kill(worker_pids(engine)[1], signal.SIGKILL)
    engine.wait(30)
    engine.kill()
    load.join(60)
    assert not load.is_alive()


def has_session(node: NodeProcess) -> bool:
    """Credits are out: the node has opened a session."""
    (dram,) = [tier for tier in inspect(node, "tiers") if tier["tier"] == "dram"]
    return bool(dram["slots_granted"])


def test_replicated_heads_are_stored_once_and_shared_with_an_engine_of_one_rank(
    vllm: EngineNursery, node: NodeProcess, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    model = build_model(tmp_path / "model", size="tiny-one-head")
    few = prompts[:6]
    with vllm.start(config(model, node, *TWO_HEADS), log=tmp_path / "two.log") as engine:
        assert len(worker_pids(engine)) == 2
        cold_then_from_dram(engine, node, few, slots_per_block=1)
    block_bytes = BLOCK_TOKENS * SHAPES["tiny-one-head"].kv_bytes_per_token(4)
    (dram,) = [tier for tier in inspect(node, "tiers") if tier["tier"] == "dram"]
    assert dram["used_bytes"] == full_blocks(few) * block_bytes, "stored by both ranks"
    with vllm.start(config(model, node), log=tmp_path / "one.log") as engine:
        wait_until(lambda: has_session(node), "the rank is attached")
        complete(engine, few)
        assert_mostly_loaded(engine, few)
    assert blocks_in_dram(node) == full_blocks(few)


def test_pipeline_stages_give_the_same_tokens_cold_and_from_dram(
    vllm: EngineNursery,
    tiny_model: Path,
    node: NodeProcess,
    prompts: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    few = prompts[:6]
    with vllm.start(config(tiny_model, node, *TWO_STAGES), log=tmp_path / "stages.log") as engine:
        assert len(worker_pids(engine)) == 2
        cold_then_from_dram(engine, node, few, slots_per_block=2)
