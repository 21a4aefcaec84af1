"""A router in this process, with a core of the test's choice: its own loop in a thread and a socket
that listens. `virtual_router` has the same in virtual time."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, Self, TypeVar

from kvstore.config.router import load_router_config
from kvstore.net.aio import LoopThread
from kvstore.router.process import Router
from kvstore.routing.core import RouterCore
from tests.kit.turns_core import TurnsCore

_T = TypeVar("_T")
WAIT_S = 10.0
Answer = tuple[int, dict[str, str], bytes]
ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STEADY = {
    "choice": {"top_k": 1},
    "learning": {"is_frozen": True},
    "probes": {"period_s": 3600, "late_s": 3600, "silence_s": 7200},
}
"""Policy by which the same requests go the same way, however busy this machine is."""


class Calls(Protocol):
    """A loop that runs somewhere."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def call(self, coroutine: Coroutine[Any, Any, _T], *, timeout_s: float) -> _T: ...
    def close(self) -> None: ...


class RouterThread:
    """One router and its core."""

    _calls: Calls

    def __init__(
        self, workers: Sequence[str], *, core: RouterCore | None = None, **settings: Any
    ) -> None:
        config = load_router_config(
            None, {"listen": "127.0.0.1:0", "metrics": "off", "worker": list(workers), **settings}
        )
        self.core: Any = core or TurnsCore()
        self.config = config
        self._calls = self._loop()
        try:
            self.router = self.on_loop(self._made)
        except BaseException:
            self._calls.close()
            raise
        try:
            self.port = self._calls.call(self._started(), timeout_s=10)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    # ── what another kind of time does otherwise ─────────────────────────────────────────────────

    def _loop(self) -> Calls:
        return LoopThread("router")

    def _made(self) -> Router:
        return Router(self.config, self.core)

    async def _started(self) -> int:
        """Its port."""
        await self.router.start()
        return self.router.port

    def connected(self, *, timeout_s: float = 30.0) -> Any:
        """A socket of a client."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    # ── of tests ─────────────────────────────────────────────────────────────────────────────────

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._calls.loop

    def on_loop(self, read: Callable[[], _T]) -> _T:
        async def reading() -> _T:
            return read()

        return self._calls.call(reading(), timeout_s=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.call(self.router.close(), timeout_s=60)
        self._calls.close()

    def words(self) -> dict[str, str]:
        """State of each worker, as on its pages."""
        return self.on_loop(lambda: {each.name: each.state for each in self.router.workers})

    def failure_count(self, worker: str) -> int:
        """Attempts that failed at a worker."""
        return int(self.on_loop(lambda: self.core.fleet.state(worker).failure_count))

    def begin(
        self,
        body: object = None,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Asked:
        """One request on a connection of its own, which is sent at once."""
        return Asked(self.connected(), body, path, method=method, headers=headers)

    def ask(self, body: object = None, path: str = "/v1/completions", **more: Any) -> Answer:
        """(status, headers, body) of such a request."""
        return self.begin(body, path, **more).result()


class Asked:
    """A request that is under way on a socket."""

    def __init__(
        self,
        sock: Any,
        body: object = None,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> None:
        self._connection = http.client.HTTPConnection(*sock.getpeername()[:2])
        self._socket = self._connection.sock = sock
        content = body if isinstance(body, bytes) else json.dumps(ASK if body is None else body)
        more = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request(method, path, content if method == "POST" else None, more)

    def response(self) -> http.client.HTTPResponse:
        """Its head has come."""
        return self._connection.getresponse()

    def result(self) -> Answer:
        """(status, headers, body)."""
        try:
            answer = self.response()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            self.leave()

    def done(self) -> bool:
        """Some of the answer has come. In virtual time only."""
        return bool(self._socket.coming)

    def leave(self) -> None:
        self._connection.close()


def ask(
    port: int,
    body: object = None,
    path: str = "/v1/completions",
    *,
    timeout_s: float = 30.0,
    **more: Any,
) -> Answer:
    """As the method."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    return Asked(sock, body, path, **more).result()


def until(true: Callable[[], bool]) -> None:
    """Wait in real time until this is so."""
    end_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not true():
        assert time.monotonic() < end_s, "it did not come about in time"
        pause.wait(0.02)
