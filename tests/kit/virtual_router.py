"""A router in virtual time with its engines: what `router_thread` has, without threads and sockets.

with VirtualRouter([worker.flag]) as router:      # of VirtualWorkers
    assert router.ask()[0] == 200
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.router.process import Router
from tests.kit.router_thread import RouterThread
from tests.kit.virtual_loop import VirtualLoop

_T = TypeVar("_T")


def virtual_loop() -> VirtualLoop:
    """The loop that is set."""
    loop = asyncio.get_event_loop_policy().get_event_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def until(true: Callable[[], bool]) -> None:
    """Time passes until this is so."""
    virtual_loop().until(true)


class VirtualCalls:
    """A virtual loop, as `LoopThread`. It stays open: engines are on it, too."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    def call(self, coroutine: Coroutine[Any, Any, _T], *, timeout_s: float) -> _T:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    def close(self) -> None: ...


class VirtualRouter(RouterThread):
    """The same in virtual time, on the loop that is set."""

    def _loop(self) -> VirtualCalls:
        return VirtualCalls(virtual_loop())

    def _made(self) -> Router:
        return Router(self.config, self.core, clock=virtual_loop().clock_ns)

    async def _started(self) -> int:
        await self.router.begin()
        return virtual_loop().serve(self.router.door).port[1]

    def connected(self, *, timeout_s: float = 1000.0) -> Any:
        return virtual_loop().connected(("127.0.0.1", self.port), timeout_s)

    def pass_time(self, seconds: float) -> None:
        self._calls.call(asyncio.sleep(seconds), timeout_s=seconds + 1)
