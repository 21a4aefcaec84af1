"""Calls of nodes that bring blocks ahead of time: how many, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.ahead import CALLS_MAX, FAILURES_MAX, Preparations
from kvstore.router.engines.workers import Workers
from kvstore.router.keys.index_calls import Spaces
from kvstore.routing.events import Prepare, PrepareAnswered, PrepareReason
from kvstore.wire.peers import PrepareReply, PrepareRequest, encode
from tests.kit.virtual_loop import VirtualLoop

ANSWER_S = 0.5
Code = grpc.StatusCode


class Node:
    """In place of its channel. `fault`: with which it refuses every call."""

    def __init__(self) -> None:
        self.fault: Code | None = None
        self.calls = self.closed = 0

    def unary_unary(self, *_: object) -> Callable[..., Coroutine[Any, Any, bytes]]:
        return self.prepare

    async def prepare(self, _: PrepareRequest, **_limit: float) -> bytes:
        self.calls += 1
        await asyncio.sleep(ANSWER_S)
        if self.fault is not None:
            raise grpc.aio.AioRpcError(self.fault, grpc.aio.Metadata(), grpc.aio.Metadata(), "")
        return encode(PrepareReply(reading=3))

    async def close(self) -> None:
        self.closed += 1


class Site:
    """A router with a worker whose node the index knows."""

    def __init__(self) -> None:
        self.node, self.answers = Node(), list[PrepareAnswered]()
        self.addresses = {"n": "n:1"}
        self.workers = workers = Workers(lambda _: None)
        workers.replace([WorkerAddress(name="a", url="http://a:1", node="n")])
        index = SimpleNamespace(addresses=self.addresses)
        spaces = SimpleNamespace(of=lambda _: [("", b"space")], index=index, workers=workers)
        self.ahead = Preparations(None, cast("Spaces", spaces), answered=self.answers.append)

    async def prepare(self, count: int) -> list[str]:
        """So many at the same time; why each was refused, empty: it was not."""
        self.answers.clear()
        for number in range(count):
            self.ahead.begin(Prepare(number, "r", "a", bytes(32), PrepareReason.WAITS))
        await asyncio.sleep(2 * ANSWER_S)
        return [each.its.refused for each in sorted(self.answers, key=lambda each: each.number)]


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    site = Site()
    monkeypatch.setattr("kvstore.router.ahead.aio_channel", lambda *_: site.node)

    async def running() -> None:
        await test(site)
        await site.ahead.close()

    VirtualLoop().run(running())


def test_a_node_has_eight_calls_at_a_time_and_the_next_ones_when_they_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(site: Site) -> None:
        for _ in range(3):
            found = await site.prepare(CALLS_MAX + 1)
            assert found == [""] * CALLS_MAX + ["its node has not answered others yet"]
        assert site.node.calls == 3 * CALLS_MAX

    run(monkeypatch, test)


def test_calls_go_to_the_address_that_the_index_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(site: Site) -> None:
        assert await site.prepare(1) == [""]
        del site.addresses["n"]
        assert await site.prepare(1) == ["the index has no address of its node"]
        site.addresses["n"] = "n:2"
        assert await site.prepare(1) == [""]
        site.addresses["n"] = "n:3"
        assert await site.prepare(1) == [""]
        assert (site.node.calls, site.node.closed) == (3, 2), "each address has a channel"
        site.workers.replace([])
        assert await site.prepare(1) == ["the worker has left"]

    run(monkeypatch, test)


@pytest.mark.parametrize(
    ("fault", "calls"), [(Code.UNAVAILABLE, FAILURES_MAX), (Code.RESOURCE_EXHAUSTED, 10)]
)
def test_a_node_that_fails_is_left_alone_and_one_that_is_full_is_not(
    monkeypatch: pytest.MonkeyPatch, fault: Code, calls: int
) -> None:
    async def test(site: Site) -> None:
        site.node.fault = fault
        for _ in range(10):
            (trouble,) = await site.prepare(1)
            assert trouble
        assert site.node.calls == calls
        assert bool(site.ahead.trouble) == (calls < 10)

    run(monkeypatch, test)
