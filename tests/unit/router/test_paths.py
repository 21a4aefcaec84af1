"""Paths that reach an engine, and those that never do."""

from __future__ import annotations

import pytest

from kvstore.router.front.proxy import STORED, takes_prompts


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/pooling"),
        *("/v1/messages/count_tokens", "/v1/embeddings", "/v2/embed", "/classify", "/v1/score"),
        *("/tokenize", "/detokenize", "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/speech"),
    ],
)
def test_the_api_of_clients_is_routed(path: str) -> None:
    assert takes_prompts(path)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/v1", "/v1/completions/", "//v1/completions", "/v1/completions/render"),
        *("/v1/../v1/completions", "/v1/audio", "/v1/audio/", "/v1/audio/../models", "/v1/audio/A"),
        *("/v1/audio/speech/x", "/v1/audio/speech\n", "/v1/completions\n", "/V1/completions"),
        *("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/update_weights"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache", "/pause", "/metrics"),
        *("/server_info", "/start_profile", "/get_world_size", "/is_sleeping", "/v1/models"),
    ],
)
def test_administration_and_odd_spellings_are_not(path: str) -> None:
    assert not takes_prompts(path)
    assert STORED.fullmatch(path) is None


@pytest.mark.parametrize("rest", ["", "/cancel", "/input_items"])
def test_a_stored_response_is_known_by_its_id(rest: str) -> None:
    found = STORED.fullmatch(f"/v1/responses/resp_0a-Z{rest}")
    assert found is not None
    assert found[1] == "resp_0a-Z"


@pytest.mark.parametrize(
    "rest",
    [
        *("", "a/", "a/other", "a/cancel/", "a/cancel\n", "a\n", "a%2Fb", "..", "../models", "a b"),
        *("é", "a" * 257, "a/input_items/b"),
    ],
)
def test_other_paths_below_responses_are_none(rest: str) -> None:
    assert STORED.fullmatch(f"/v1/responses/{rest}") is None
