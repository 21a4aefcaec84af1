"""Threads that take turns: a stand-in for the module `threading` that a seed can schedule.

Real threads, of which one runs at a time and only when the world gives it a turn; a turn ends where
the thread waits: for a lock's condition, an event, or the simulated disk. So code with threads runs
unchanged in virtual time, and the same seed gives the same order. `kill` ends them where they are,
as the death of their process does.

Does not cover: data races inside one turn. A thread must not wait while it holds a lock, but for
the condition itself; that is asserted.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self

from kvstore.units import NS_PER_S

_PATIENCE_S: Final = 60.0
"""Of the real clock: a turn that lasts longer waits for something that nobody will ever do."""
_Condition = Callable[[], bool]


def _closed_gate() -> threading.Lock:
    """What one thread waits at until another lets it through. Each is let through once before the
    next waits, so the plainest lock will do, which wakes a thread several times sooner than a
    semaphore."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Killed(BaseException):
    """Its process is gone: the thread that sees this never goes on."""


class Threads:
    """All threads of one simulated process, and what they wait with."""

    def __init__(
        self, source: random.Random, now_ns: Callable[[], int], pass_time: Callable[[], None]
    ) -> None:
        """Args:
        source: whose turn it is.
        now_ns: the virtual clock.
        pass_time: called while the world itself waits for a thread and none can go on.
        """
        self.now_ns = now_ns
        self.pass_time = pass_time
        self.is_dead = False
        self.locks_held = 0
        self.current: SimThread | None = None
        """Whose turn it is; None: the world's own."""
        self._source = source
        self._threads: list[SimThread] = []
        self._back = _closed_gate()

    # ── as in `threading` ────────────────────────────────────────────────────────────────────────

    def Thread(  # as `threading` calls it
        self,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> SimThread:
        """A thread that begins with its first turn, after `start`."""
        assert daemon, "nobody waits for it at the end"
        thread = SimThread(self, target, args, name)
        self._threads.append(thread)
        return thread

    def Condition(self) -> SimCondition:
        """A condition with its lock."""
        return SimCondition(self)

    def Lock(self) -> contextlib.AbstractContextManager[None]:
        """A lock that only one thread ever takes."""
        return contextlib.nullcontext()

    def Event(self) -> SimEvent:
        """A flag that can be waited for, with a time limit of virtual time."""
        return SimEvent(self)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start all of them."""
        for thread in self._threads:
            thread.start()

    def run_one(self) -> str:
        """Give a turn to some thread that can go on; its name, or nothing: none can."""
        ready = [thread for thread in self._threads if thread.may_run()]
        if not ready:
            return ""
        thread = self._source.choice(ready)
        self._turn(thread)
        return thread.name

    def park(self, condition: _Condition) -> None:
        """Of the thread whose turn it is: end the turn until this holds. Of the world: nothing."""
        thread = self.current
        if self.is_dead:
            raise Killed
        if thread is None:
            return
        assert not self.locks_held, f"{thread.name} waits while it holds a lock"
        thread.waits_for = condition
        self._back.release()
        thread.go.acquire()
        if self.is_dead:
            raise Killed

    def kill(self) -> None:
        """All of them end where they are."""
        self.is_dead = True
        for thread in self._threads:
            if thread.is_alive():
                self._turn(thread)
        self.locks_held = 0

    def _turn(self, thread: SimThread) -> None:
        self.current = thread
        thread.go.release()
        came_back = self._back.acquire(timeout=_PATIENCE_S)
        assert came_back, f"{thread.name} waits for something real"
        self.current = None
        if thread.error is not None:
            error, thread.error = thread.error, None
            raise AssertionError(f"{thread.name} died of {error!r}") from error

    def ended(self) -> None:
        """The thread whose turn it is does nothing any more."""
        self._back.release()


class SimThread:
    """One of them; `Threads.Thread` makes it."""

    def __init__(
        self, threads: Threads, target: Callable[..., None], args: Sequence[Any], name: str
    ) -> None:
        self.name = name
        self.go = _closed_gate()
        self.waits_for: _Condition = lambda: True
        self.error: BaseException | None = None
        self._threads = threads
        self._target = target
        self._args = args
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        self._is_started = self._is_ended = False

    def start(self) -> None:
        """Take part in turns from now on."""
        if not self._is_started:
            self._is_started = True
            self._thread.start()

    def is_alive(self) -> bool:
        return self._is_started and not self._is_ended

    def may_run(self) -> bool:
        return self.is_alive() and self.waits_for()

    def join(self, timeout: float | None = None) -> None:
        """Of the world: give turns until this one has ended or the time is over."""
        threads = self._threads
        end_ns = None if timeout is None else threads.now_ns() + int(timeout * NS_PER_S)
        while self.is_alive() and (end_ns is None or threads.now_ns() < end_ns):
            if not threads.run_one():
                threads.pass_time()

    def _body(self) -> None:
        self.go.acquire()
        try:
            if not self._threads.is_dead:
                self._target(*self._args)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the world raises it again
            self.error = error
        finally:
            self._is_ended = True
            self._threads.ended()


class SimCondition:
    """As `threading.Condition`, without a time limit."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._calls = 0

    def __enter__(self) -> Self:
        self._threads.locks_held += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.locks_held -= 1

    def wait(self) -> None:
        calls = self._calls
        with self._released():
            self._threads.park(lambda: self._calls != calls)

    def wait_for(self, condition: _Condition) -> None:
        while not condition():
            assert self._threads.current is not None, "the world waits for a thread"
            with self._released():
                self._threads.park(condition)

    def notify_all(self) -> None:
        self._calls += 1

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        self._threads.locks_held -= 1
        try:
            yield
        finally:
            self._threads.locks_held += 1


class SimEvent:
    """As `threading.Event`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float) -> bool:
        due_ns = self._threads.now_ns() + int(timeout * NS_PER_S)
        self._threads.park(lambda: self._is_set or self._threads.now_ns() >= due_ns)
        return self._is_set
