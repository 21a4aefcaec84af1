"""A router in this process: its own loop in a thread, a core of the test's choice."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from kvstore.config.router import load_router_config
from kvstore.net.aio import LoopThread
from kvstore.router.process import Router
from kvstore.routing.core import RouterCore
from tests.kit.turns_core import TurnsCore

_T = TypeVar("_T")
ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STEADY = {
    "choice": {"top_k": 1},
    "learning": {"is_frozen": True},
    "probes": {"period_s": 3600, "late_s": 3600, "silence_s": 7200},
}
"""Policy by which the same requests go the same way, however busy this machine is."""


class RouterThread(AbstractContextManager["RouterThread"]):
    """One router and its core."""

    def __init__(
        self, workers: Sequence[str], *, core: RouterCore | None = None, **settings: Any
    ) -> None:
        config = load_router_config(
            None, {"listen": "127.0.0.1:0", "metrics": "off", "worker": list(workers), **settings}
        )
        self.core: Any = core or TurnsCore()
        self.config = config
        self._loop = LoopThread("router")
        try:
            self.router = self.on_loop(lambda: Router(self.config, self.core))
        except BaseException:
            self._loop.close()
            raise
        try:
            self._loop.call(self.router.start(), timeout_s=10)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.port = self.router.port

    def on_loop(self, read: Callable[[], _T]) -> _T:
        async def reading() -> _T:
            return read()

        return self._loop.call(reading(), timeout_s=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call(self.router.close(), timeout_s=60)
        self._loop.close()

    def words(self) -> dict[str, str]:
        """State of each worker, as on its pages."""
        return self.on_loop(lambda: {each.name: each.state for each in self.router.workers})

    def failure_count(self, worker: str) -> int:
        """Attempts that failed at a worker."""
        return int(self.on_loop(lambda: self.core.fleet.state(worker).failure_count))

    def ask(
        self,
        body: object = None,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request on a connection of its own."""
        return ask(self.port, body, path, method=method, headers=headers)


def ask(
    port: int,
    body: object = None,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
) -> tuple[int, dict[str, str], bytes]:
    """As the method."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        content = body if isinstance(body, bytes) else json.dumps(ASK if body is None else body)
        more = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, content if method == "POST" else None, more)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()
