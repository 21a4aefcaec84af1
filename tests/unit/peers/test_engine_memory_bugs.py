"""A bug in what reads KV events: said to who looks, logged once, and not the end of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from kvstore.index.engine_feed import EngineFeed
from kvstore.node.node import MonotonicClock
from kvstore.peers import engine_memory
from kvstore.peers.engine_memory import EngineMemory
from kvstore.wire.feed import Change
from tests.integration.node.conftest import eventually
from tests.kit.engine_publisher import EnginePublisher, stored
from tests.unit.peers.test_engine_memory import (
    JOINS_S,
    TOKENS,
    comes,
    follow,
    reader,
    source,
)


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(engine_memory, "REOPEN_MS_MAX", 50)
    return f"ipc://{tmp_path}/kv"


def logged(caplog: pytest.LogCaptureFixture) -> int:
    return len([record for record in caplog.records if record.exc_info])


def test_a_bug_costs_the_engine_that_it_is_about(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tick, bugs = EngineFeed.tick, 0
    is_there = False

    def buggy(its: EngineFeed, now_ms: int) -> Any:
        nonlocal bugs
        if is_there and its.source.engine == "e" and len(its.blocks):
            bugs += 1
            raise KeyError("a name")
        return tick(its, now_ms)

    monkeypatch.setattr(EngineFeed, "tick", buggy)
    two = source(f"{endpoint}2", engine="other")
    with (
        EnginePublisher(endpoint) as engine,
        EnginePublisher(two.endpoint) as other,
        reader(source(endpoint), two) as (memory, heard),
    ):
        engine.publish(stored(TOKENS, 0, 3))
        other.publish(stored(TOKENS, 0, 2))
        assert comes(heard, {0, 1, 2})
        assert comes(heard, {0, 1}, engine="other")
        is_there = True
        assert comes(heard, set()), "what it told may be wrong"
        trouble = f"KV events of e at {endpoint} are not read after a bug, which the log has"
        assert eventually(lambda: memory.trouble == trouble, timeout_s=JOINS_S)
        assert eventually(lambda: bugs >= 3, timeout_s=JOINS_S), "it is tried again"
        assert heard.blocks(engine="other") == {0, 1}
        assert logged(caplog) == 1
        is_there = False
        assert comes(heard, {0, 1, 2})
        assert eventually(lambda: memory.trouble == "", timeout_s=JOINS_S)


def test_a_bug_elsewhere_lets_all_begin_again(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, bugs = EngineMemory._take_orders, 0

    def buggy(its: EngineMemory) -> None:
        nonlocal bugs
        if bugs:
            bugs -= 1
            raise KeyError("an order")
        take(its)

    with EnginePublisher(endpoint) as engine, reader(source(endpoint)) as (memory, heard):
        engine.publish(stored(TOKENS, 0, 3))
        assert comes(heard, {0, 1, 2})
        bugs = 2
        monkeypatch.setattr(EngineMemory, "_take_orders", buggy)
        memory.carry_out(follow(1, f"{endpoint}2", engine="other"))
        assert eventually(lambda: len(memory.reports()) == 2, timeout_s=JOINS_S)
        assert comes(heard, {0, 1, 2})
        assert engine.asked.count(0) > 1, "from its beginning"
        assert logged(caplog) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_nothing_is_read_any_more_it_says_so(endpoint: str) -> None:
    def tell(told: Change) -> None:
        raise KeyError("a replica")

    memory = EngineMemory([source(endpoint)], clock=MonotonicClock(), tell=tell)
    with contextlib.closing(memory), EnginePublisher(endpoint) as engine:
        memory.start()
        engine.publish(stored(TOKENS, 0, 1))
        assert eventually(lambda: "not read any more" in memory.trouble, timeout_s=JOINS_S)
