"""Bodies of both legs, engines in turn, and the rules for addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.pd.config import pd_config
from kvstore.pd.engines import FAILURES_MAX, Rotation
from kvstore.pd.legs import (
    early_parameters,
    parameters_of,
    prefill_body,
    source_of,
    wants_prefill,
)
from kvstore.units import NS_PER_S

GOOD: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "prefill": ["http://127.0.0.1:8100"],
    "decode": ["https://decode.example:8200/"],
    "legs": "in-turn",
    "prefill_timeout_s": 1.0,
    "cert": None,
    "key": None,
    "engine_ca": None,
    "insecure": False,
}


def test_the_prefill_engine_samples_one_token_whatever_the_client_wants() -> None:
    body = {
        "messages": [],
        "max_completion_tokens": 99,
        "min_tokens": 5,
        "n": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "tools": [1],
    }
    sent = prefill_body(body, "t")
    assert sent.pop("kv_transfer_params")["kvstore"] == {"transfer": "t"}
    assert sent == {
        "messages": [],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "tools": [1],
    }
    assert "min_tokens" in body  # of the caller, for the other leg


def test_a_request_about_its_own_prompt_is_not_prefilled_elsewhere() -> None:
    assert wants_prefill({"prompt": "x"})
    assert not wants_prefill({"prompt": "x", "echo": True})
    assert not wants_prefill({"prompt": "x", "prompt_logprobs": 0})


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"kv_transfer_params": [1]}', b"\xff"])
def test_answers_without_parameters(answer: bytes) -> None:
    assert parameters_of(answer) is None


def test_only_kvstores_parameters_name_a_node_for_later_requests() -> None:
    assert source_of(None) is None
    assert source_of({"remote_engine_id": "e"}) is None
    assert source_of({"kvstore": {"node": 7}}) is None
    source = source_of({"remote_engine_id": "e", "kvstore": {"node": "n", "transfer": "old"}})
    assert source is not None
    assert early_parameters(source, "new")["kvstore"] == {"node": "n", "transfer": "new"}


def test_engines_are_used_in_turn_and_failing_ones_left_out() -> None:
    rotation = Rotation(["a", "b", "c"])
    a, b, c = rotation.engines
    assert [rotation.pick(0) for _ in range(4)] == [a, b, c, a]
    for _ in range(FAILURES_MAX):
        b.breaker.failed(0)
    assert [rotation.pick(0) for _ in range(3)] == [c, a, c]
    assert rotation.pick(0, not_these=[a, c]) is b  # rather than none
    assert rotation.pick(0, not_these=[a, b, c]) is None
    assert b in [rotation.pick(2 * NS_PER_S) for _ in range(3)]
    for engine in (a, b, c):
        for _ in range(FAILURES_MAX):
            engine.breaker.failed(3 * NS_PER_S)
    assert rotation.pick_healthy(3 * NS_PER_S) is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"listen": "0.0.0.0:8000"}, "give --cert and --key"),
        ({"listen": "example.com:80"}, "IP address and a port"),
        ({"cert": Path("a")}, "go together"),
        ({"cert": Path("/none"), "key": Path("/none")}, "cannot be used: No such file"),
        ({"engine_ca": Path("/none")}, "--engine-ca /none cannot be used"),
        ({"prefill": []}, "--prefill names 1 to"),
        ({"decode": ["http://127.0.0.1:1"] * 2}, "each once"),
        ({"decode": ["http://127.0.0.1:1", "http://localhost:1/"]}, "each once"),
        ({"decode": ["http://localhost:8100/"]}, "both name the engine at 127.0.0.1:8100"),
        ({"prefill": ["https://decode.example:8200"]}, "name two engines"),
        ({"prefill": ["http://10.0.0.1:8100"]}, "without TLS"),
        ({"prefill": ["127.0.0.1:8100"]}, "must be like http://"),
        ({"prefill": ["http://127.0.0.1:8100/v1"]}, "must be like http://"),
        ({"prefill": ["http://u:p@127.0.0.1:8100"]}, "must be like http://"),
        ({"prefill": ["http://127.0.0.1:99999"]}, "must be like http://"),
    ],
)
def test_a_wrong_setting_is_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        pd_config(**GOOD | wrong)


def test_what_is_meant_is_allowed() -> None:
    config = pd_config(**GOOD)
    assert config.decode == ("https://decode.example:8200",)
    beyond = {"listen": "0.0.0.0:80", "prefill": ["http://10.0.0.1:1"], "insecure": True}
    assert pd_config(**GOOD | beyond).host == "0.0.0.0"
