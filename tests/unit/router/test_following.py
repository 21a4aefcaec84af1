"""Which routers' loads are followed, and at which of their addresses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import grpc
import pytest

from kvstore.router.dispatch import Dispatcher
from kvstore.router.exchange import BEAT_S, RETRY_S, LoadExchange
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import RoutingPolicy
from kvstore.wire.load import RouterLoads, encode_loads
from tests.kit.virtual_loop import VirtualLoop

OWN = "own"


class Streams:
    """Routers by address, in place of their channels; one that is not there, or has no name, ends
    its streams.
    """

    def __init__(self, routers: dict[str, str]) -> None:
        self.routers = routers
        self.begun = Counter[str]()

    async def resolved(self, _host: str, _port: int) -> list[str]:
        return list(self.routers)

    def channel(self, address: str, *_: Any) -> Channel:
        return Channel(self, address)


class Channel:
    """As grpc's, its stub and its call."""

    def __init__(self, streams: Streams, address: str) -> None:
        self._streams, self._address, self._has_begun = streams, address, False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def unary_stream(self, *_: Any) -> Callable[[bytes], Self]:
        return self._begin

    def _begin(self, _: bytes) -> Self:
        self._streams.begun[self._address] += 1
        return self

    async def read(self) -> object:
        if self._has_begun:
            await asyncio.sleep(BEAT_S)
        self._has_begun = True
        name = self._streams.routers.get(self._address)
        return grpc.aio.EOF if not name else encode_loads(RouterLoads(name, ()))

    def cancel(self) -> None: ...


def run(
    monkeypatch: pytest.MonkeyPatch,
    routers: dict[str, str],
    test: Callable[[Streams, LoadExchange], Coroutine[Any, Any, None]],
) -> None:
    loop, streams = VirtualLoop(), Streams(routers)
    monkeypatch.setattr("kvstore.router.exchange.resolved", streams.resolved)
    monkeypatch.setattr("kvstore.router.exchange.aio_channel", streams.channel)
    dispatcher = Dispatcher(RouterCore(RoutingPolicy(), seed=1), clock=loop.clock_ns)

    async def running() -> None:
        exchange = LoadExchange(["routers:1"], None, name=OWN, dispatcher=dispatcher)
        await test(streams, exchange)
        await exchange.close()

    loop.run(running())


async def play(exchange: LoadExchange, seconds: float) -> None:
    for _ in range(round(seconds / exchange.pause_s)):
        await exchange.once()
        await asyncio.sleep(exchange.pause_s)


def test_an_address_that_leads_back_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(streams: Streams, exchange: LoadExchange) -> None:
        await play(exchange, 30)
        assert streams.begun == {"back": 1, "other": 1}
        assert (len(exchange.routers), str(exchange.troubles)) == (1, "")

    run(monkeypatch, {"back": OWN, "other": "b"}, test)


def test_an_address_without_a_router_stays_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(_: Streams, exchange: LoadExchange) -> None:
        for _second in range(5):
            await play(exchange, 1)
            why = "loads of the router at routers:1 are not counted: it has ended"
            assert str(exchange.troubles) == why

    run(monkeypatch, {"routers:1": ""}, test)


def test_a_router_is_followed_at_one_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(streams: Streams, exchange: LoadExchange) -> None:
        await play(exchange, 5)
        assert len(exchange.routers) == 1
        del streams.routers["first"]
        await play(exchange, 2 * RETRY_S)
        assert len(exchange.routers) == 1, "at the other one"
        begun = streams.begun.total()
        await exchange.close()
        await play(exchange, 2 * RETRY_S)
        assert streams.begun.total() == begun, "nobody is followed after the end"

    run(monkeypatch, {"first": "b", "second": "b"}, test)
