"""An asyncio loop in virtual time, for one simulated process: it goes on when the world lets it.

Coroutines of the product run unchanged: tasks, events, time limits, calls in threads. Ready
callbacks run in the order in which they became ready, so the same seed gives the same order.
A process that is stopped is a loop that is not let go on; `end` is its death: from then on
nothing that it does reaches anybody.

Does not cover: sockets (`net` stands in for gRPC), real threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import itertools
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, NoReturn

import grpc

from kvstore.errors import KVStoreError
from kvstore.units import NS_PER_S

_TURNS_MAX: Final = 100_000
"""Of one `go_on`: more is a loop that never waits."""
_EXPECTED: Final = (KVStoreError, grpc.RpcError, TimeoutError, StopAsyncIteration)
"""What a task may end with: somebody waits for it. Anything else is a bug, and is raised."""


class SimHandle(asyncio.TimerHandle):
    """A callback, at once or later."""

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: contextvars.Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.context = context or contextvars.copy_context()
        self.run: Callable[[], object] = functools.partial(self.context.run, callback, *args)


class SimLoop(asyncio.BaseEventLoop):
    """See the module. `spend` is for what runs in one of its threads."""

    _goes_on = False

    def __init__(self, now_ns: Callable[[], int]) -> None:
        super().__init__()
        self.is_dead = False
        self._now_ns = now_ns
        self._soon: deque[SimHandle] = deque()
        self._later: list[tuple[float, int, SimHandle]] = []
        self._numbers = itertools.count()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._error: BaseException | None = None
        self._spent_s = 0.0
        self.knock: Callable[[str, int], bool | None] = lambda _, __: None
        """Whether somebody listens at (host, port); None: it cannot be known."""

    # ── of the world ─────────────────────────────────────────────────────────────────────────────

    def go_on(self) -> bool:
        """Run what is due, and all that follows from it. False: there was nothing."""
        due = self._due()
        if due:
            _set_running_loop(self)
            self._goes_on = True
            try:
                for _ in range(_TURNS_MAX):
                    if not self._due():
                        break
                    self._run(self._soon.popleft())
                else:
                    raise AssertionError("a loop that never waits")
            finally:
                _set_running_loop(None)
                self._goes_on = False
        return due

    def end(self) -> None:
        """Its process is gone: all tasks end where they are."""
        self.is_dead = True
        for task in list(self._tasks):
            task.cancel()
        self._later.clear()
        self.go_on()
        self._soon.clear()

    def _due(self) -> bool:
        now_s = self.time()
        while self._later and self._later[0][0] <= now_s:
            self._soon.append(heapq.heappop(self._later)[2])
        return bool(self._soon)

    def _run(self, handle: SimHandle) -> None:
        if not handle.cancelled():
            handle.run()
        error, self._error = self._error, None
        if error is not None and not self.is_dead:
            raise error

    # ── as asyncio calls it ──────────────────────────────────────────────────────────────────────

    def time(self) -> float:
        return self._now_ns() / NS_PER_S

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._goes_on

    def is_closed(self) -> bool:
        """It holds nothing that could be."""
        return True

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        handle = SimHandle(self.time(), callback, args, self, context)
        self._soon.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]
    """There are no threads."""

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        handle = SimHandle(when, callback, args, self, context)
        heapq.heappush(self._later, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

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

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """What a thread does is done at once, and told when it has taken its time (`spend`)."""
        future = self.create_future()
        self._spent_s = 0.0
        try:
            result, error = func(*args), None
        except KVStoreError as raised:
            result, error = None, raised

        def tell() -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._spent_s, tell)
        return future

    def spend(self, duration_ns: int) -> None:
        """Of a function in a thread: it takes so long."""
        self._spent_s += duration_ns / NS_PER_S

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
        """An expected end that nobody waited for; what is unexpected is raised by `_ended`."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when it is due."""
