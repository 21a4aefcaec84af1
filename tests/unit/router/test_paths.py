"""Paths that reach an engine, and those that never do."""

from __future__ import annotations

import pytest

from kvstore.router.front.paths import STORED, is_passed_on
from kvstore.router.front.proxy import takes_prompts


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
    assert not is_passed_on(path, "GET", has_tenants=True)
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


MANAGEMENT = [
    *("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache", "/pause"),
    *("/reset_mm_cache", "/update_weights", "/update_weight_version", "/get_world_size", "/resume"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply", "/abort_requests"),
    *("/inference/v1/abort_requests", "/server_info", "/release_kv_cache_memory", "/is_paused"),
    *("/flush_cache", "/release_memory_occupation", "/set_internal_state", "/open_session"),
    *("/freeze_gc", "/pause_generation", "/continue_generation", "/slots/1", "/props", "/api/pull"),
    *("/models/load", "/lora-adapters", "/v2/repository/models/m/load", "/v2/trace/setting"),
    *("/SLEEP", "//sleep", "/x/../sleep", "/sleep/", "/a%2Fsleep"),
    *("/metrics", "/metrics/", "/kvstore/", "/kvstore/explain", "/kvstore/a\nb"),
    *("/v1/responses/", "/v1/responses/a/b", "/v1/responses/.."),
]


@pytest.mark.parametrize("path", MANAGEMENT)
def test_management_of_engines_is_for_nobody(path: str) -> None:
    assert not is_passed_on(path, "POST", has_tenants=False)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/version", "/load", "/tokenizer_info", "/invocations", "/docs", "/v1/systemone"),
        *("/cohere/v2/chat", "/inference/v1/generate", "/v1/completions/render", "/generate"),
        *("/v1/files", "/v1/images/generations", "/v1/realtime/sessions", "/v1/datasets/a"),
        *(
            "/v2/models/m/infer",
            "/api/generate",
            "/api/chat",
            "/v1/threads/a/runs",
            "/get_model_info",
        ),
    ],
)
def test_all_other_paths_are_for_clients(path: str) -> None:
    assert is_passed_on(path, "POST", has_tenants=False)
