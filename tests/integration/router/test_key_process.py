"""The process that makes tokens and keys: answers in order, and what its faults cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from pathlib import Path

import msgspec
import pytest

from kvstore.demo import models
from kvstore.index.chain import block_keys
from kvstore.router.keys import process
from kvstore.router.keys.child import KeyOrder, Tokenizers, answer_to
from kvstore.router.keys.process import KeyProcess


def order(count: int, **more: object) -> KeyOrder:
    body = json.dumps({"prompt": list(range(count))}).encode()
    return msgspec.structs.replace(KeyOrder(body=body, block_tokens=4, seed="s"), **more)


def keys(count: int) -> bytes:
    return b"".join(block_keys(range(count), block_tokens=4, seed="s"))


async def answered(keeper: KeyProcess) -> None:
    """Until a child has started and answers."""
    async with asyncio.timeout(30):
        while (answer := await keeper.make(order(8))) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert answer.keys == keys(8)


def test_orders_are_answered_in_order_and_a_dead_child_replaced() -> None:
    async def scenario() -> None:
        keeper = KeyProcess({})
        try:
            answers = await asyncio.gather(*(keeper.make(order(n)) for n in range(4, 60, 5)))
            assert [a and a.keys for a in answers] == [keys(n) for n in range(4, 60, 5)]
            child = vars(keeper)["_child"]
            child.send_signal(signal.SIGKILL)
            await answered(keeper)
            assert keeper.restart_count == 1
        finally:
            await keeper.close()

    asyncio.run(scenario())


def test_a_hanging_child_costs_time_outs_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(process, "HANG_S", 4.0)
    monkeypatch.setattr(process, "WAITING_MAX", 2)

    async def scenario() -> None:
        keeper = KeyProcess({})
        try:
            await answered(keeper)
            vars(keeper)["_child"].send_signal(signal.SIGSTOP)
            answers = await asyncio.gather(*(keeper.make(order(8)) for _ in range(4)))
            assert answers == [None] * 4
            assert keeper.refused_count == 2, "no more than WAITING_MAX wait"
            await answered(keeper)
        finally:
            await keeper.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("loading_s", "restarts"), [(300.0, 0), (0.0, 1)])
def test_a_child_that_loads_has_longer(
    monkeypatch: pytest.MonkeyPatch, loading_s: float, restarts: int
) -> None:
    """On a busy machine it took longer than a child may hang: it was killed each time."""
    monkeypatch.setattr(process, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(process, "HANG_S", 0.0)
    monkeypatch.setattr(process, "LOADING_S", loading_s)

    async def scenario() -> None:
        keeper = KeyProcess({})
        try:
            child = await keeper._running()
            child.send_signal(signal.SIGSTOP)
            assert await keeper.make(order(8)) is None
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
            monkeypatch.setattr(process, "LOADING_S", 300.0)
            await answered(keeper)
            assert keeper.restart_count == restarts
        finally:
            await keeper.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (KeyOrder(rendered=b'{"token_ids": [1, 2, 3], "x": 1}'), 3),
        (KeyOrder(rendered=b'[{"token_ids": [1, 2]}]'), 2),
        (KeyOrder(rendered=b'[{"token_ids": [1]}, {"token_ids": [2]}]'), None),
        (KeyOrder(rendered=b'{"error": 1}'), None),
        (KeyOrder(rendered=b"{"), None),
        (KeyOrder(body=b'{"prompt": ["a", "b"]}'), None),
        (KeyOrder(body=b'{"prompt": [[1], [2]]}'), None),
        (KeyOrder(body=b'{"prompt": [1, 2, 3, 4]}'), 4),
        (KeyOrder(model="unknown", body=b'{"prompt": "x"}'), None),
    ],
)
def test_one_prompt_has_tokens_and_all_else_has_none(given: KeyOrder, count: int | None) -> None:
    answer = answer_to(given, Tokenizers({}))
    assert (answer.token_count, bool(answer.why)) == (count or 0, count is None)


@pytest.mark.engine  # transformers
def test_only_plain_bodies_are_rendered_here(tmp_path: Path) -> None:
    models._write_tokenizer(tmp_path, models.SHAPES["tiny"])
    tokenizers = Tokenizers({"m": str(tmp_path)})

    def count(**fields: object) -> int:
        body = json.dumps({"model": "m", **fields}).encode()
        return answer_to(KeyOrder(model="m", body=body), tokenizers).token_count

    hello = [{"role": "user", "content": "hello"}]
    assert count(prompt="hello") > 0
    assert count(messages=hello, temperature=0.5) > count(prompt="hello")
    changes: list[dict[str, object]] = [
        {"chat_template_kwargs": {"x": 1}},
        {"add_generation_prompt": False},
        {"truncate_prompt_tokens": 1},
        {"documents": []},
        {"tool_choice": "none"},
        {"response_format": {}},
    ]
    for changed in changes:
        assert count(messages=hello, **changed) == 0, changed
    assert count(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]) == 0
    assert count(prompt=["hello"]) == 0
