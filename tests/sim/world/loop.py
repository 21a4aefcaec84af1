"""The loop of one simulated process: it goes on when the world lets it, by the clock of the world.

A process that is stopped is a loop that is not let go on; `end` is its death: from then on
nothing that it does reaches anybody.

Does not cover: sockets (`net` stands in for gRPC).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, NoReturn

import grpc

from kvstore.errors import KVStoreError
from kvstore.units import NS_PER_S
from tests.kit.virtual_loop import VirtualLoop

_EXPECTED: Final = (KVStoreError, grpc.RpcError, TimeoutError, StopAsyncIteration)
"""What a task may end with: somebody waits for it. Anything else is a bug, and is raised."""


class SimLoop(VirtualLoop):
    """See the module."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        super().__init__()
        self.is_dead = False
        self._now_ns = now_ns
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._error: BaseException | None = None
        self.knock: Callable[[str, int], bool | None] = lambda _, __: None
        """Whether somebody listens at (host, port); None: it cannot be known."""

    def end(self) -> None:
        """Its process is gone: all tasks end where they are."""
        self.is_dead = True
        for task in list(self._tasks):
            task.cancel()
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.go_on()
        self._ready.clear()  # type: ignore[attr-defined]

    def go_on(self) -> bool:
        due = super().go_on()
        error, self._error = self._error, None
        if error is not None and not self.is_dead:
            raise error
        return due

    def time(self) -> float:
        return self._now_ns() / NS_PER_S

    def is_closed(self) -> bool:
        """It holds nothing that could be."""
        return True

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, _EXPECTED):
            self._error = error

    async def create_connection(self, *args: Any, **_: Any) -> NoReturn:
        """Only whether it is refused is of interest to anybody here."""
        _, host, port = args
        match self.knock(host, port):
            case False:
                raise ConnectionRefusedError
            case None:
                await asyncio.Event().wait()
        raise OSError("it is open, and of no use")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raises is raised by `go_on`. Of tasks that nobody waited for, `_ended`
        has said what is to be said."""
        if "handle" in context:
            self._error = context["exception"]
