"""A real vLLM whose requests are asked, by the ids that clients have, why they hit or missed."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.demo.engine import SERVED_NAME, Completion
from kvstore.demo.workload import Encode, text_tokens
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import RoutingPolicy
from kvstore.testing.process import NodeProcess
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    BLOCK_TOKENS,
    PATIENT,
    attached,
    blocks_in_dram,
    kvstore,
    wait_until,
)
from tests.kit.collector import Collector, check_tree, collecting
from tests.kit.engines import EngineConfig, EngineServer
from tests.kit.router_thread import RouterThread

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(500)]

SEED = 23
BLOCKS = 3
DRAM = "16MiB"
"""32 blocks of the tiny model in float32, some of which are credits."""


def explained(node: NodeProcess, done: Completion | str) -> dict[str, Any]:
    """The one request with the id that the client was told."""
    found: list[dict[str, Any]] = []
    request = done if isinstance(done, str) else done.id

    def is_told() -> bool:
        found[:] = kvstore(node, "explain", request).get("requests", [])
        return len(found) == 1

    wait_until(is_told, "the request's story has arrived", seconds=30)
    return found[0]


def ranges(story: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [(row["blocks"], row["tier"], row["reason"]) for row in story["ranges"]]


def test_every_request_can_be_asked(
    vllm: EngineNursery, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    text = "".join(chr(rng.randint(97, 122)) for _ in range(BLOCKS * BLOCK_TOKENS + 20))
    prompt = encode(text)
    assert len(prompt) // BLOCK_TOKENS == BLOCKS
    directory = tmp_path / "node"
    directory.mkdir()
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        config = EngineConfig(
            model=tiny_model,
            socket=directory / "node.sock",
            connector_extra=PATIENT,
            arguments=("--otlp-traces-endpoint", collector.url),
        )

        def start() -> NodeProcess:
            return NodeProcess.start(directory, dram=DRAM, flags=["--trace", collector.url])

        engine = stack.enter_context(vllm.start(config, log=tmp_path / "engine.log"))
        with start() as node:
            wait_until(lambda: attached(engine, node), "the engine attached")
            check_cold_and_hit(engine, node, prompt, text, tiny_model, tmp_path)
            check_traced(engine, node, prompt, collector)
            check_evicted(engine, node, prompt, rng, encode)
            check_another_space(engine, node, prompt)
            node.kill()
        engine.forget()
        lonely = engine.complete(prompt, max_tokens=1)
        with start() as node:
            wait_until(lambda: attached(engine, node), "attached again")
            story = explained(node, lonely)
            assert story["outcome"] == "node unreachable"
            assert ranges(story) == [(BLOCKS, "", "node unreachable")]


def check_cold_and_hit(
    engine: EngineServer,
    node: NodeProcess,
    prompt: list[int],
    text: str,
    model: Path,
    tmp_path: Path,
) -> None:
    cold = explained(node, engine.complete(prompt, max_tokens=1))
    assert (cold["prompt_tokens"], cold["outcome"]) == (len(prompt), "never stored")
    assert ranges(cold) == [(BLOCKS, "", "never stored")]
    assert cold["lookup_us"] > 0
    wait_until(lambda: blocks_in_dram(node) == BLOCKS, "the prompt is stored")
    own = explained(node, engine.complete(prompt, max_tokens=1))
    assert ranges(own) == [(BLOCKS, "engine", "")]
    engine.forget()
    hit = explained(node, engine.complete(prompt, max_tokens=1))
    assert (hit["loaded_tokens"], hit["file_tokens"]) == (BLOCKS * BLOCK_TOKENS, 0)
    assert (hit["outcome"], ranges(hit)) == ("", [(BLOCKS, "dram", "")])
    assert hit["load_us"] > 0
    assert hit["saved_us"] > 0, "the pace of computing is known after one step of a prompt"
    counts = engine.metrics()
    assert counts["vllm:kvstore_waited_seconds_total"] >= hit["load_us"] / 1e6
    assert counts["vllm:kvstore_saved_prefill_seconds_total"] >= hit["saved_us"] / 1e6
    loaded = 'vllm:kvstore_hit_tokens_total{tier="dram"}'
    wait_until(lambda: engine.metrics()[loaded] == BLOCKS * BLOCK_TOKENS, "hits by tier")
    check_first_token(engine, node, prompt)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(prompt))
    for prompt_flags in (
        ("--tokens-file", str(file)),
        ("--text", text, "--tokenizer", str(model)),
    ):
        prefix = kvstore(node, "inspect", "prefix", *prompt_flags)["prefix"]
        assert prefix["held_tokens"] == BLOCKS * BLOCK_TOKENS, prompt_flags


def check_first_token(engine: EngineServer, node: NodeProcess, prompt: list[int]) -> None:
    """A request's first token is not earlier than by vLLM's own measurement of its prefill."""
    name = "vllm:request_prefill_time_seconds_sum"
    before_s = engine.metrics()[name]
    story = explained(node, engine.complete(prompt[::-1], max_tokens=4))
    assert story["first_token_us"] / 1e6 >= 0.9 * (engine.metrics()[name] - before_s)


def check_traced(
    engine: EngineServer, node: NodeProcess, prompt: list[int], collector: Collector
) -> None:
    """A request through a router is one trace, with the engine's own span and those of the node."""
    engine.forget()
    worker = f"w=http://127.0.0.1:{engine.port}"
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1}
    with RouterThread(
        [worker], core=RouterCore(RoutingPolicy(), seed=SEED), trace=collector.url
    ) as router:
        status, _, answer = router.ask(body)
    assert status == 200, answer
    (route,) = collector.named("kvstore.route")

    def names() -> list[str]:
        below = [span for span in collector.spans if span.parent_id == route.span_id]
        return sorted(span.name for span in below if span.trace_id == route.trace_id)

    collector.await_that(lambda: names() == ["kvstore.request", "llm_request"])
    found = [span for span in collector.spans if span.trace_id == route.trace_id]
    request = next(span for span in found if span.name == "kvstore.request")
    story = explained(node, json.loads(answer)["id"])
    said = [
        (its["kvstore.blocks"], its.get("kvstore.tier", ""), its.get("kvstore.miss.reason", ""))
        for _, its in request.events
    ]
    assert said == ranges(story) == [(BLOCKS, "dram", "")]
    assert {"kvstore.lookup", "kvstore.load"} < {span.name for span in found}
    assert route.begin_ns <= request.begin_ns <= request.end_ns
    check_tree(found)


def check_evicted(
    engine: EngineServer, node: NodeProcess, prompt: list[int], rng: random.Random, encode: Encode
) -> None:
    def is_evicted() -> bool:
        # More than dram holds, and each no more than there are credits at a time.
        for _ in range(20):
            engine.complete(text_tokens(rng, encode, 2 * BLOCK_TOKENS), max_tokens=1)
        engine.forget()
        first = explained(node, engine.complete(prompt, max_tokens=1))["ranges"][0]
        engine.forget()
        return first["reason"] == "evicted" and "to make room for stores of" in first["text"]

    wait_until(is_evicted, "the prompt was evicted", seconds=120)


def check_another_space(engine: EngineServer, node: NodeProcess, prompt: list[int]) -> None:
    held: list[dict[str, Any]] = []

    def is_held() -> bool:
        held[:] = [explained(node, engine.complete(prompt, max_tokens=1))]
        engine.forget()
        return bool(held[0]["ranges"][0]["tier"] == "dram")

    wait_until(is_held, "the prompt is stored again", seconds=60)
    engine.forget(external=True)  # the same model, a space of its own
    wait_until(lambda: attached(engine, node), "attached to the new space")
    moved = explained(node, engine.complete(prompt, max_tokens=1))
    assert moved["outcome"] == moved["ranges"][0]["reason"] == "reset by the engine"
    assert held[0]["space"] in moved["ranges"][0]["text"]
