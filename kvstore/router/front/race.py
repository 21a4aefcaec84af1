"""Two attempts of one request: the first piece of an answer decides which one goes on.

    first ─── after_s without a piece ─▶ second ─▶ claim: the other one is cancelled
      └─ fails ─▶ the other one goes on alone          └─ both fail: LegFailure of the last one

A cancelled attempt closes its connection, by which its engine aborts the request. Claims are made
on the loop, with the piece in hand and before anything reaches the client: exactly one is granted.
Does not cover: whether and where (`kvstore.routing.legs.races`).
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from kvstore.router.front.attempt import Attempt, Beaten, LegFailure

_T = TypeVar("_T")


class Race:
    """See the module. `attempt`: the one that answers, or was left last."""

    def __init__(
        self, first: Attempt, on_over: Callable[[Attempt, LegFailure | None], None]
    ) -> None:
        """`on_over`: takes the attempt that ended while the other one goes on, and its failure;
        None: it was slower."""
        self.attempt = self._first = first
        self._on_over = on_over
        self._tasks: dict[Attempt, asyncio.Task[web.StreamResponse]] = {}
        self._beaten: list[asyncio.Task[web.StreamResponse]] = []

    async def run(
        self,
        decode: Callable[[Attempt], Coroutine[Any, Any, web.StreamResponse]],
        after_s: float,
        second: Callable[[], Attempt | None],
    ) -> web.StreamResponse:
        """The answer, wholly sent. Args: `second`: asked for another attempt after `after_s`, and
        again later while there is none.
        Raises as `decode` of the attempt that was left."""
        tasks, first = self._tasks, self._first
        tasks[first] = asyncio.create_task(decode(first))
        try:
            await asyncio.wait(tasks.values(), timeout=after_s)
            while not (tasks[first].done() or first.has_answered):
                other = second()
                if other is not None:
                    tasks[other] = asyncio.create_task(decode(other))
                    break
                after_s *= 2  # the others may be free then
                await asyncio.wait(tasks.values(), timeout=after_s)
            while True:
                await asyncio.wait(tasks.values(), return_when=FIRST_COMPLETED)
                # One that was beaten is over before the failure of the other, which is the last.
                for attempt in sorted(tasks, key=lambda each: not _is_beaten(tasks[each])):
                    task = tasks[attempt]
                    if task.done() and (len(tasks) == 1 or not _is_lost(task)):
                        self.attempt = attempt
                        return task.result()
                    if task.done():
                        self._over(attempt, task)
        finally:
            ended = [*tasks.values(), *self._beaten]
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)

    def _over(self, attempt: Attempt, task: asyncio.Task[web.StreamResponse]) -> None:
        del self._tasks[attempt]
        [self.attempt] = self._tasks
        error = task.exception()
        self._on_over(attempt, error if isinstance(error, LegFailure) else None)

    def claim(self, attempt: Attempt) -> None:
        """The attempt has the first piece of an answer. Raises Beaten: it is not sent."""
        if attempt not in self._tasks:
            raise Beaten
        for other, task in list(self._tasks.items()):
            if task.done() and _is_lost(task):  # said before the claim, which begins an answer
                self._over(other, task)
        others = [other for other, task in self._tasks.items() if not task.done()]
        others.remove(attempt)
        if others and attempt is not self._first and attempt.status >= 400:
            raise Beaten  # a word about the request is that of the worker that was chosen first
        for other in others:
            task = self._tasks.pop(other)
            task.cancel()
            self._beaten.append(task)
            self.attempt = attempt
            self._on_over(other, None)


def _is_beaten(task: asyncio.Task[web.StreamResponse]) -> bool:
    return task.done() and not task.cancelled() and isinstance(task.exception(), Beaten)


def _is_lost(task: asyncio.Task[web.StreamResponse]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), LegFailure | Beaten)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Work of its own task, which ends with the context."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def refuse_if(is_too_late: asyncio.Event, _: Attempt) -> None:
    """As of `Race.claim`: where its prefill failed, the first piece of a decode leg that is being
    ended is no answer."""
    if is_too_late.is_set():
        raise Beaten
