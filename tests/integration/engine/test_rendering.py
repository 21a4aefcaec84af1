"""Tokens that the router makes beside those of a real engine, for bodies of many shapes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.config.router import WorkerAddress
from kvstore.demo.engine import SERVED_NAME
from kvstore.index.chain import block_keys
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.workers import Workers
from kvstore.router.front.intake import peek
from kvstore.router.keys.child import KeyPlan
from kvstore.router.keys.index_calls import PrefixScope
from kvstore.router.keys.process import KeyProcess
from kvstore.router.keys.rendering import PLAIN_FIELDS, Rendering
from kvstore.routing.values import WorkerWord
from tests.integration.engine.nursery import EngineNursery
from tests.kit.engines import EngineConfig, EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ODD = "Über 7 Hügel: what is\n\n  the 3rd word?\t👋 </s> <|end|>"
TEMPLATE = """\
{%- for d in documents or [] %}[{{ d.title }}]{% endfor -%}
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif -%}
{%- for m in messages %}<|{{ m.role }}|>{{ m.name or '' }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor -%}
{{ m.tool_call_id or '' }}<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|assistant|>{{ reasoning_effort or '' }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif -%}
"""
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}


def said(*contents: str, role: str = "user") -> list[dict[str, Any]]:
    """Turns of a conversation that ends with this role."""
    roles = ("user", "assistant") if role == "user" else ("assistant", "user")
    return [
        {"role": roles[(len(contents) - 1 - number) % 2], "content": content}
        for number, content in enumerate(contents)
    ]


def system(content: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    """A history with a call of a tool, and its answer."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    answer = {"role": "tool", "tool_call_id": "c", "content": "4", **more}
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [*said("hello"), call, answer, *said("and?")]}


HELLO = {"messages": said("hello")}
PART = {"type": "text", "text": "a part"}
FULL = {"description": "d", "parameters": PARAMETERS}
MADE_HERE: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": (TEXT, {"prompt": ODD}),
    "a text with spaces": (TEXT, {"prompt": "\n hello \n"}),
    "a text, and nulls": (TEXT, {"prompt": "hello", "suffix": None, "echo": None}),
    "ids": (TEXT, {"prompt": [1, 2, 3, 4]}),
    "one message": (CHAT, HELLO),
    "odd signs": (CHAT, {"messages": said(ODD)}),
    "system": (CHAT, {"messages": [system("Be brief."), *said("hello")]}),
    "an empty system": (CHAT, {"messages": [system(""), *said("hello")]}),
    "two systems": (CHAT, {"messages": [system("a"), system("b"), *said("hello")]}),
    "turns": (CHAT, {"messages": [system("a"), *said("hello", " Hi! ", ODD)]}),
    "empty turns": (CHAT, {"messages": said("", "", "hello")}),
    "an answer last": (CHAT, {"messages": said("hello", "Hi", role="assistant")}),
    "thoughts in an answer": (CHAT, {"messages": said("a", "<think>\nno\n</think>\n\nb", "c")}),
    "nulls": (CHAT, HELLO | {"tools": None, "response_format": None, "documents": None}),
}
LEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "a tool": (CHAT, HELLO | tool(**FULL)),
    "a tool in another order": (CHAT, HELLO | tool(**dict(reversed(FULL.items())))),
    "a tool without description": (CHAT, HELLO | tool(parameters=PARAMETERS)),
    "a tool without parameters": (CHAT, HELLO | tool(description="d")),
    "a strict tool": (CHAT, HELLO | tool(**FULL, strict=True)),
    "a tool with other fields": (CHAT, HELLO | tool(**FULL, other=1)),
    "no choice of tools": (CHAT, HELLO | tool(**FULL) | {"tool_choice": "none"}),
    "calls": (CHAT, called('{"x": "y"}')),
    "calls with other spaces": (CHAT, called('{"x":"y"}')),
    "calls without arguments": (CHAT, called("")),
    "calls, and tools": (CHAT, called('{"x":"y"}') | tool(**FULL)),
    "an answer of a tool in parts": (CHAT, called("{}", content=[PART, PART])),
    "no calls": (CHAT, {"messages": [{**system("a", "assistant"), "tool_calls": []}, *said("b")]}),
    "developer": (CHAT, {"messages": [system("Be brief.", "developer"), *said("hello")]}),
    "developer and system": (
        CHAT,
        {"messages": [system("a"), system("b", "developer"), *said("hello")]},
    ),
    "parts": (CHAT, {"messages": [system([PART, PART], "user")]}),
    "no content": (CHAT, {"messages": [*said("a"), system(None, "assistant"), *said("b")]}),
    "a name": (CHAT, {"messages": [{**system("a", "user"), "name": "n"}]}),
    "thoughts": (
        CHAT,
        {"messages": [*said("a"), {**system("b", "assistant"), "reasoning_content": "c"}]},
    ),
    "a header that changes": (
        CHAT,
        {"messages": [system("x-anthropic-billing-header: cch=1;\nBe brief."), *said("a")]},
    ),
    "an argument of the template": (
        CHAT,
        HELLO | {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    "effort": (CHAT, HELLO | {"reasoning_effort": "low"}),
    "documents": (CHAT, HELLO | {"documents": [{"title": "t", "text": "x"}]}),
    "no prompt to generate": (CHAT, HELLO | {"add_generation_prompt": False}),
    "an answer to go on with": (
        CHAT,
        {
            "messages": said("a", "b", role="assistant"),
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "special tokens in a chat": (CHAT, HELLO | {"add_special_tokens": True}),
    "a cut chat": (CHAT, HELLO | {"truncate_prompt_tokens": 3}),
    "a prompt beside": (CHAT, HELLO | {"prompt": "other"}),
    "ids beside": (CHAT, HELLO | {"prompt": [1, 2, 3]}),
    "messages beside": (TEXT, {"prompt": "hello", **HELLO}),
    "no special tokens": (TEXT, {"prompt": "hello", "add_special_tokens": False}),
    "a cut text": (TEXT, {"prompt": "hello", "truncate_prompt_tokens": 2}),
    "cut ids": (TEXT, {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2}),
    "an echo": (TEXT, {"prompt": "hello", "echo": True}),
    "a list of one text": (TEXT, {"prompt": ["hello"]}),
    "a list of one list": (TEXT, {"prompt": [[1, 2, 3]]}),
    "an input": (RESPONSES, {"input": "hello"}),
    "instructions": (RESPONSES, {"input": "hello", "instructions": "Be brief."}),
    "a list of inputs": (RESPONSES, {"input": said("hello", "Hi", "and?")}),
}
HARMLESS: dict[str, object] = {
    **dict.fromkeys(("stream", "ignore_eos", "skip_special_tokens", "return_token_ids"), True),
    **dict.fromkeys(("n", "seed", "max_tokens", "min_tokens", "top_k", "top_logprobs"), 1),
    **dict.fromkeys(("max_completion_tokens", "logprobs", "priority"), 1),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), 0.5),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.1),
    **dict.fromkeys(("user", "cache_salt", "session_id", "request_id", "service_tier"), "s"),
    **dict.fromkeys(("store", "include_stop_str_in_output"), True),
    "stop": ["x"],
    "stop_token_ids": [1],
    "logit_bias": {"1": 1.0},
    "metadata": {"a": "b"},
    "stream_options": {"include_usage": True},
}
"""All fields that may stand beside a prompt, with values other than the engine's own."""
NEEDS: dict[str, dict[str, object]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "min_tokens": {"max_tokens": 2},
}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a template that shows whatever it is given, and a token before each text."""
    directory = tmp_path_factory.mktemp("telling") / "model"
    shutil.copytree(tiny_model, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    tokenizer["post_processor"]["single"].insert(0, first)
    tokenizer["post_processor"]["special_tokens"] = {
        "<|end|>": {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}
    }
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def engine(
    vllm: EngineNursery, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    config = EngineConfig(model=model, arguments=("--enable-scale-out", *tools))
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with vllm.start(config, log=log, warm=False) as started:
        yield started


class Witness:
    """A router's rendering beside the engine's."""

    def __init__(self, engine: EngineServer, model: Path) -> None:
        self._engines, self._keys = EngineHttp(None), KeyProcess({SERVED_NAME: model})
        workers = Workers(lambda _: None)
        address = WorkerAddress(name="a", url=f"http://127.0.0.1:{engine.port}")
        (self._worker,) = workers.replace([address])
        self._worker.word, self._worker.models = WorkerWord.UP, (SERVED_NAME,)
        self._rendering = Rendering(self._engines, workers, self._keys)

    async def accepted(self) -> None:
        async with asyncio.timeout(60):
            while self._rendering.local[SERVED_NAME]:
                await self._rendering.compare(SERVED_NAME, self._worker)

    async def verdict(self, path: str, fields: dict[str, Any]) -> str:
        """Who made the tokens, or how they differ from the engine's."""
        body = msgspec.json.encode({"model": SERVED_NAME, **fields})
        rendered = await self._rendering.rendered(path, body, [self._worker], timeout_s=30)
        scope = PrefixScope(SERVED_NAME, KeyPlan(block_tokens=1, seed="s"), frozenset(), {})
        before = dict(self._rendering.counts)
        self._worker.renders_after_s = 0.0
        made = await self._rendering.keys_of(path, body, peek(body), scope, "")
        (source,) = [k for k, count in self._rendering.counts.items() if count > before[k]]
        if made is None or rendered is None:
            return source if rendered else f"refused, {source}"
        found = msgspec.json.decode(rendered)
        ids = (found[0] if isinstance(found, list) else found)["token_ids"]
        same = made.keys == b"".join(block_keys(ids, block_tokens=1, seed="s"))
        return source if same else f"{source}, and differs: {made.token_count} and {len(ids)}"

    async def close(self) -> None:
        self._engines.close()
        await self._keys.close()


def test_tokens_made_here_are_those_of_the_engine(engine: EngineServer, model: Path) -> None:
    """All else is left to it: that was not so for tools, calls, developers and parts of others."""

    async def scenario() -> dict[str, str]:
        witness = Witness(engine, model)
        try:
            await witness.accepted()
            found = {name: await witness.verdict(*case) for name, case in LEFT.items()}
            for name, case in MADE_HERE.items():
                found[name] = await witness.verdict(*case)
            for name in PLAIN_FIELDS - {"model"}:
                more = {name: HARMLESS[name], **NEEDS.get(name, {})}
                for path, fields in ((TEXT, {"prompt": "hello"}), (CHAT, HELLO)):
                    found[f"{name} at {path}"] = await witness.verdict(path, fields | more)
            return found
        finally:
            await witness.close()

    found = asyncio.run(scenario())
    left = {name: found.pop(name) for name in LEFT}
    assert {name: said for name, said in left.items() if said not in ("engine", "none")} == {}
    assert found.pop("ids") == "ids"
    assert {name: said for name, said in found.items() if said != "local"} == {}
