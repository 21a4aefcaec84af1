"""Which bodies get their tokens here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.router.keys.rendering import CHAT, COMPLETIONS, source_of

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}


def source(path: str, **fields: Any) -> str:
    return source_of(path, json.dumps({"model": "m", **fields}).encode())


def chat(*messages: dict[str, Any], **fields: Any) -> str:
    return source(CHAT, messages=messages, **fields)


def test_plain_texts_chats_and_ids_are_made_here() -> None:
    assert source(COMPLETIONS, prompt="hello", temperature=0.5, stop=["x"]) == "local"
    assert source(COMPLETIONS, prompt=[1, 2], max_tokens=5) == "ids"
    assert chat({"role": "system", "content": ""}, HELLO, {**HELLO, "role": "assistant"}) == "local"
    assert chat(HELLO, tools=None, response_format=None, prompt=None) == "local", "null is absent"
    assert source_of(CHAT, b'{ "messages" : [ {"content" : "x", "role" : "user"} ] }') == "local"


@pytest.mark.parametrize(
    "fields",
    [
        *({name: 1} for name in ("chat_template_kwargs", "add_generation_prompt", "documents")),
        *({name: 1} for name in ("continue_final_message", "add_special_tokens", "echo")),
        *({name: 1} for name in ("truncate_prompt_tokens", "reasoning_effort", "prompt_embeds")),
        *({name: 1} for name in ("response_format", "tool_choice", "suffix", "not_known_yet")),
        {"tools": [TOOL]},
        {"tools": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_any_other_field_is_left_to_the_engine(fields: dict[str, Any]) -> None:
    assert chat(HELLO, **fields) == ""
    assert source(COMPLETIONS, prompt="hello", **fields) == ""
    assert source(COMPLETIONS, prompt=[1, 2], **fields) == ""


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
        {"role": "user", "content": "x", "name": "n"},
        {"role": "user"},
        {"content": "x"},
        ["user", "x"],
        "x",
        None,
    ],
    ids=str,
)
def test_any_other_message_is_left_to_the_engine(message: Any) -> None:
    assert chat(HELLO, message, HELLO) == ""


def test_what_is_read_elsewhere_or_not_at_all_is_left_to_the_engine() -> None:
    assert source("/v1/responses", input="hello") == ""
    assert source("/v1/messages", messages=[HELLO]) == ""
    assert source("/pooling", messages=[HELLO]) == ""
    assert source(COMPLETIONS, messages=[HELLO]) == ""
    assert source(CHAT, prompt=[1, 2]) == ""
    assert chat(HELLO, prompt=[1, 2]) == ""
    assert source(COMPLETIONS, prompt="hello", messages=[HELLO]) == ""
    assert source(COMPLETIONS, prompt=None) == ""
    assert source(COMPLETIONS, prompt={"id": "x"}) == ""
    assert chat() == ""
    assert source(CHAT, messages={"role": "user"}) == ""
