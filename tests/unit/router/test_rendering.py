"""When a tokenizer here is used: its tokens beside those of engines that a test makes up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.calls import EngineHttp, HttpAnswer
from kvstore.router.engines.workers import Workers
from kvstore.router.front.intake import peek
from kvstore.router.keys import rendering
from kvstore.router.keys.child import KeyAnswer, KeyOrder, KeyPlan, Tokenizers, answer_to
from kvstore.router.keys.index_calls import PrefixScope
from kvstore.router.keys.process import KeyProcess
from kvstore.router.keys.rendering import CHAT, COMPLETIONS, UNCOMPARED, Rendering, source_of
from kvstore.routing.rows import StateChange
from kvstore.routing.values import WorkerWord
from tests.kit.coroutines import on_loop

SCOPE = PrefixScope("m", KeyPlan(block_tokens=4, seed="s"), frozenset(), {})
TOOLS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a tool"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


class Letters(Tokenizers):
    """A token for each letter, of what its template does not refuse."""

    refused = b"refused"

    def ids(self, model: str, body: bytes) -> list[int] | None:
        if self.refused in body:
            raise ValueError
        return list(body)


class Site:
    """Engines that make the same tokens, but for texts that they see in another way."""

    def __init__(self, *names: str) -> None:
        self.workers = Workers(lambda _: None)
        self.odd: dict[str, Callable[[bytes], bool]] = {}
        """Worker → bodies of which it makes other tokens."""
        self.status = 200
        self.orders: list[KeyOrder] = []
        self.letters = Letters({})
        self.models = ("m",)
        engines, keys = cast("EngineHttp", self), cast("KeyProcess", self)
        self.rendering = Rendering(engines, self.workers, keys)
        self.serve(*names)

    def serve(self, *names: str) -> None:
        addresses = [WorkerAddress(name=name, url=f"http://{name}") for name in names]
        for worker in self.workers.replace(addresses):
            worker.word, worker.models = WorkerWord.UP, ("m",)

    async def fetch(self, url: Any, *, body: bytes, **_: Any) -> HttpAnswer:
        ids = list(body)
        if url.host in self.odd and self.odd[url.host](body):
            ids = [0, *ids]
        return HttpAnswer(self.status, [], msgspec.json.encode({"token_ids": ids}))

    async def make(
        self, order: KeyOrder, tenant: str = "", *, delays_request: bool = True
    ) -> KeyAnswer:
        assert delays_request is not order.wants_ids, "a comparison is patient, a request is not"
        self.orders.append(order)
        return answer_to(order, self.letters)

    async def compare(self, *names: str) -> None:
        for name in names:
            await self.rendering.compare("m", self.workers[name])

    async def ask(self, path: str = COMPLETIONS, **fields: Any) -> str:
        """Where the tokens came from; a sample of it has been compared, if it was one."""
        body = msgspec.json.encode(fields or {"prompt": "hello"})
        before = dict(self.rendering.counts)
        await self.rendering.keys_of(path, body, peek(body), SCOPE, "")
        await asyncio.gather(*self.rendering._checks._running)
        (source,) = [k for k, count in self.rendering.counts.items() if count > before[k]]
        return source

    @property
    def why(self) -> str:
        return self.rendering.local["m"]


def is_hello(body: bytes) -> bool:
    return b'{"prompt":"hello"}' in body


@on_loop
async def test_equal_tokens_are_made_here_and_tools_without_a_trip_to_the_child() -> None:
    site = Site("a")
    assert site.why == UNCOMPARED
    assert await site.ask() == "engine"
    await site.compare("a")
    assert site.why == ""
    assert await site.ask() == "local"
    site.orders.clear()
    assert await site.ask(CHAT, **TOOLS) == "engine"
    assert [order.model for order in site.orders] == [""], "its rendering only"
    assert await site.ask(prompt="refused") == "engine"


@on_loop
async def test_ids_are_keys_unless_the_engine_changes_them() -> None:
    site = Site("a")
    assert await site.ask(prompt=[1, 2, 3]) == "ids"
    assert await site.ask(prompt=[1, 2, 3], truncate_prompt_tokens=2) == "engine"
    assert await site.ask(prompt=["hello"]) == "engine", "a list of texts is no ids"
    assert await site.ask(CHAT, **TOOLS, prompt=[1, 2, 3]) == "engine"


@on_loop
async def test_a_difference_that_probes_do_not_have_stays_until_the_engine_is_another_one() -> None:
    """It was accepted again five minutes later, and differed again: flapping."""
    site = Site("a")
    site.odd["a"] = is_hello
    await site.compare("a")
    assert await site.ask() == "local", "a sample"
    assert site.why == "its tokens differ from those of worker a (18 and 19) at " + COMPLETIONS
    assert site.why in "".join(site.rendering.unused())
    await site.compare("a")
    assert site.why, "probes do not show it"
    assert await site.ask() == "engine"
    del site.odd["a"]
    await site.compare("a")
    assert site.why, "the same engine cannot have changed"
    site.workers.changed(StateChange("a", WorkerWord.DOWN, "refused"))
    site.workers.changed(StateChange("a", WorkerWord.UP, ""))
    await site.compare("a")
    assert site.why == "", "what came back may be another"
    assert await site.ask() == "local"


@on_loop
async def test_samples_are_taken_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "CHECK_EVERY", 3)

    site = Site("a")
    await site.compare("a")
    assert await site.ask() == "local"
    site.odd["a"] = is_hello
    assert [await site.ask() for _ in range(4)] == ["local", "local", "local", "engine"]


@pytest.mark.parametrize("order", ["ab", "ba"])
@on_loop
async def test_engines_of_one_model_must_all_make_its_tokens(order: str) -> None:
    """The last one that was compared decided for all."""
    site = Site("a", "b")
    site.odd["b"] = lambda _: True
    await site.compare(*order)
    assert "of worker b" in site.why
    await site.compare(*order)
    assert "of worker b" in site.why
    site.serve("a")
    await site.compare("a")
    assert site.why == "", "the other one has left"


@on_loop
async def test_an_engine_that_does_not_render_says_nothing_about_tokens() -> None:
    site = Site("a", "b")
    site.status = 404
    await site.compare("a")
    assert site.why == "no engine renders"
    assert "404" in site.workers["a"].unrendered
    site.workers.changed(StateChange("a", WorkerWord.DOWN, "restarts"))
    assert site.workers["a"].unrendered == "", "it may have another flag"
    site.workers.changed(StateChange("a", WorkerWord.UP, ""))
    site.status = 200
    site.workers["a"].renders_after_s = 0.0
    await site.compare("a")
    assert site.why == ""
    site.status = 404
    await site.compare("a", "b")
    assert site.why == "", "they were equal, and nobody says otherwise"


@on_loop
async def test_chats_that_a_template_refuses_prove_nothing_and_texts_must_be_made() -> None:
    site = Site("a")
    site.letters.refused = b'"prompt"'
    await site.compare("a")
    assert site.why == "no tokens (ValueError)"
    site.letters.refused = b'"system"'
    site.odd["a"] = lambda body: b'"system"' in body
    await site.compare("a")
    assert site.why == ""


@on_loop
async def test_a_difference_that_is_gone_at_once_was_none() -> None:
    """A template that shows the time, at midnight."""
    site = Site("a")
    await site.compare("a")
    rendered = iter((True, False))
    site.odd["a"] = lambda _: next(rendered)
    assert await site.ask() == "local"
    assert site.why == ""
    assert next(rendered, None) is None, "it was looked at twice"


def test_probes_hold_tools_calls_and_developers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to the engine, whatever it makes of them; who changes that is refused."""

    def is_normalised(body: bytes) -> bool:
        return any(each in body for each in marks)

    marks: list[bytes] = []

    async def why() -> str:
        site = Site("a")
        site.odd["a"] = is_normalised
        await site.compare("a")
        return site.why

    for mark in (b'"tools"', b'"tool_calls"', b'"developer"'):
        marks[:] = [mark]
        with monkeypatch.context() as patch:
            assert asyncio.run(why()) == ""
            patch.setattr(rendering, "source_of", lambda *_: "local")
            assert "differ" in asyncio.run(why()), mark


# ── which bodies get their tokens here ───────────────────────────────────────────────────────────


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
