"""Requests with LoRA adapters: each adapter's weights have blocks of their own."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.ask import node_client
from kvstore.demo.engine import SERVED_NAME, Completion
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.engine.why.explain import HashingReport
from kvstore.index.chain import adapter_keys, block_keys
from kvstore.testing.process import NodeProcess
from kvstore.wire.requests import ADAPTER_QUESTION, adapter_digest
from tests.amounts import amount
from tests.integration.engine.fixtures import MAX_TOKENS, VERIFIED
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import blocks_in_dram, kvstore, node_for, wait_until
from tests.kit.engines import EngineConfig, EngineServer
from tests.kit.side_models import RANK, build_adapter

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = amount(8, nightly=40)
"""For each of three models."""
MODELS = (SERVED_NAME, "one", "two")


def test_blocks_of_an_adapter_are_served_to_its_own_weights_alone(
    vllm: EngineNursery, tiny_model: Path, prompts: Sequence[tuple[int, ...]], tmp_path: Path
) -> None:
    folders = {
        name: build_adapter(tmp_path / name, tiny_model, seed=seed)
        for seed, name in enumerate(MODELS[1:])
    }
    chosen = [prompt for prompt in prompts if len(prompt) > BLOCK_TOKENS][:PROMPTS]
    config = EngineConfig(
        model=tiny_model,
        socket=tmp_path / "node.sock",
        connector_extra=VERIFIED,
        environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        arguments=("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)),
    )
    with vllm.start(config, log=tmp_path / "engine.log") as engine:
        for name, folder in folders.items():
            _post(engine, "load_lora_adapter", lora_name=name, lora_path=str(folder))
        # Without a node, and nothing in the engine's own cache: the truth.
        truth = {name: [done.tokens for done in _ask(engine, name, chosen)] for name in MODELS}
        assert len({tuple(answers) for answers in truth.values()}) == len(MODELS)
        engine.forget()
        with node_for(engine, tmp_path) as node:
            before = blocks_in_dram(node)
            for name in MODELS:
                assert [done.tokens for done in _ask(engine, name, chosen)] == truth[name]
            blocks = len(
                {prompt[: end * BLOCK_TOKENS] for prompt in chosen for end in _ends(prompt)}
            )
            wait_until(lambda: blocks_in_dram(node) >= before + 3 * blocks, "all is stored")
            engine.forget()
            for name in MODELS:
                done = _ask(engine, name, chosen)
                assert [each.tokens for each in done] == truth[name]
                assert all(each.cached_tokens for each in done), name
            assert engine.hits().external_hits > 0
            _routers_make_its_keys(engine, node, folders, chosen[0])
            engine.forget()

            _other_weights(engine, folders["one"], tiny_model, chosen[0], truth["one"][0])
            done = _ask(engine, "two", chosen)
            assert [each.tokens for each in done] == truth["two"]
            assert _cached(done) > 0


def _routers_make_its_keys(
    engine: EngineServer, node: NodeProcess, folders: Mapping[str, Path], prompt: tuple[int, ...]
) -> None:
    """With the path that the engine lists, and the digest that it says."""
    with node_client(node.socket) as nodes:
        (hashing,) = nodes.rows("hashings", HashingReport)
    digests: dict[str, bytes] = {}
    listed = {row["id"]: row for row in _call(engine, "models")["data"]}
    for name, folder in folders.items():
        assert (listed[name]["parent"], listed[name]["root"]) == (SERVED_NAME, str(folder))
        body = {"model": name, "prompt": prompt, "max_tokens": 1}
        answer = _call(engine, "completions", **body, kv_transfer_params=ADAPTER_QUESTION)
        digest = adapter_digest(answer["kv_transfer_params"])
        assert isinstance(digest, bytes), digest
        digests[name] = digest
    one, two = folders
    assert digests[one] != digests[two]
    file = folders[one].parent / "keys"

    def held_blocks(weights: str) -> int:
        own = block_keys(
            prompt,
            block_tokens=hashing.block_tokens,
            seed=hashing.hash_seed,
            adapter=(one, str(folders[one])),
        )
        keys = adapter_keys(own, digests[weights])
        file.write_text("\n".join(key.hex() for key in keys))
        found = kvstore(node, "inspect", "prefix", "--keys-file", str(file))["prefix"]
        return int(found["held_tokens"]) // hashing.block_tokens

    assert held_blocks(one) == len(_ends(prompt))
    assert held_blocks(two) == 0


def _other_weights(
    engine: EngineServer,
    folder: Path,
    target: Path,
    prompt: tuple[int, ...],
    before: tuple[int, ...],
) -> None:
    """The adapter gets them under its name and path. Once seen, no block serves a request while the
    engine may have either, and none of the old ones after it has loaded the new weights."""
    build_adapter(folder, target, seed=7)
    # The files are looked at beside the requests, so the first ones may still find the old blocks:
    # they are those of the weights that the engine has.
    wait_until(lambda: _again(engine, prompt) == (before, False), "the change is seen")
    assert "adapter one are computed: its files changed" in engine.log.read_text()
    _post(engine, "unload_lora_adapter", lora_name="one")
    _post(engine, "load_lora_adapter", lora_name="one", lora_path=str(folder))
    engine.forget()
    hits = engine.hits().external_hits
    (first,) = _ask(engine, "one", [prompt])
    assert first.cached_tokens == engine.hits().external_hits - hits == 0
    assert first.tokens != before
    engine.forget()
    wait_until(lambda: _again(engine, prompt) == (first.tokens, True), "they are found")


def _again(engine: EngineServer, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The answer, and whether any of it was loaded."""
    hits = engine.hits().external_hits
    (done,) = _ask(engine, "one", [prompt])
    engine.forget()
    return done.tokens, engine.hits().external_hits > hits


def _ask(engine: EngineServer, model: str, prompts: Sequence[tuple[int, ...]]) -> list[Completion]:
    return [
        engine.complete(prompt, max_tokens=MAX_TOKENS, extra={"model": model}) for prompt in prompts
    ]


def _cached(done: Sequence[Completion]) -> int:
    return sum(each.cached_tokens for each in done)


def _ends(prompt: tuple[int, ...]) -> range:
    return range(1, len(prompt) // BLOCK_TOKENS + 1)


def _call(engine: EngineServer, path: str, **body: object) -> Any:
    """JSON of an answer."""
    return json.loads(_ask_for(engine, "POST" if body else "GET", path, body))


def _post(engine: EngineServer, path: str, **body: str) -> None:
    _ask_for(engine, "POST", path, body)


def _ask_for(engine: EngineServer, method: str, path: str, body: Mapping[str, object]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, f"/v1/{path}", json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == http.client.OK, text
        return text
    finally:
        connection.close()
