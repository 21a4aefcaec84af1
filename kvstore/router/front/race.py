"""Two attempts of one request: the first piece of an answer decides which one goes on.

    first ─── after_s without a piece ─▶ second ─▶ claim: the other one is ended
      └─ fails ─▶ the other one goes on alone          └─ both fail: LegFailure of the last one

The first runs in the task of the request, which costs nothing as long as there is no second. An
attempt that is ended closes its connection, by which its engine aborts the request. Claims are made
on the loop, with the piece in hand and before anything reaches the client: exactly one is granted.
Does not cover: whether and where (`kvstore.routing.legs`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from kvstore.router.front.attempt import Attempt, Beaten, LegFailure

_T = TypeVar("_T")


class Race:
    """Two attempts of one request; see the module. `attempt`: the one that answers, or was left
    last.
    """

    def __init__(
        self, first: Attempt, on_over: Callable[[Attempt, LegFailure | None], None]
    ) -> None:
        """`on_over`: takes the attempt that ended while the other one goes on, and its failure;
        None: it was slower.
        """
        self.attempt = self._first = first
        self._on_over = on_over
        self._second: Attempt | None = None
        self._beside: asyncio.Task[web.StreamResponse] | None = None
        """Task of the second attempt; None: there is none that can answer."""
        self._has_both = False
        """Both attempts are under way."""
        self._timer: asyncio.TimerHandle

    async def run(
        self,
        decode: Callable[[Attempt], Coroutine[Any, Any, web.StreamResponse]],
        after_s: float,
        second: Callable[[], Attempt | None],
    ) -> web.StreamResponse:
        """The answer, wholly sent. `decode`: runs an attempt. `second`: asked for another attempt
        after `after_s`, and again later while it returns None. Raises as `decode` of the attempt
        that was left.
        """
        loop = asyncio.get_running_loop()

        def late(after_s: float) -> None:
            if self._first.has_answered:
                return
            self._second = second()
            if self._second is None:  # the others may be free then
                self._timer = loop.call_later(2 * after_s, late, 2 * after_s)
                return
            self._has_both = True
            self._beside = asyncio.create_task(decode(self._second))
            self._beside.add_done_callback(self._second_ended)

        self._timer = loop.call_later(after_s, late, after_s)
        try:
            try:
                return await decode(self._first)
            except (LegFailure, Beaten) as error:
                if self._beside is not None:
                    self._second_ended(self._beside)
                if self._has_both:
                    self._over(self._first, error)
                if self._beside is None or self.attempt is self._first:
                    raise
            return await self._beside
        finally:
            self._timer.cancel()
            if self._beside is not None:
                self._beside.cancel()
                await asyncio.gather(self._beside, return_exceptions=True)

    def _over(self, attempt: Attempt, error: BaseException | None) -> None:
        """An attempt ended with this error, or was slower (None): the other one goes on alone."""
        assert self._second is not None
        self._has_both = False
        self.attempt = self._second if attempt is self._first else self._first
        self._on_over(attempt, error if isinstance(error, LegFailure) else None)

    def _second_ended(self, task: asyncio.Task[web.StreamResponse]) -> None:
        if not (self._has_both and task.done()) or task.cancelled():
            return
        assert self._second is not None
        self._beside = None
        error = task.exception()
        self._over(self._second, error)
        if not isinstance(error, LegFailure | Beaten):  # an error of ours
            self._first.end(RuntimeError(f"the second attempt has ended: {error!r}"))

    def claim(self, attempt: Attempt) -> None:
        """The attempt has the first piece of an answer, which it may send. Raises Beaten if it may
        not.
        """
        if self._beside is not None:
            self._second_ended(self._beside)  # said before the claim, which begins an answer
        if not self._has_both:
            if attempt is not self.attempt:
                raise Beaten
        elif attempt is self._first:
            assert self._second is not None
            assert self._beside is not None
            self._beside.cancel()
            self._over(self._second, None)
        elif attempt.status >= 400:
            self._over(attempt, None)
            raise Beaten  # a word about the request is that of the worker that was chosen first
        else:
            self._first.end(Beaten())
            self._over(self._first, None)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Run work as a task of its own, which is cancelled at the end of the context."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def refuse_if(is_too_late: asyncio.Event, _: Attempt) -> None:
    """A `claim`: refuses the first piece of a decode leg that is being ended because its prefill
    failed. Raises Beaten.
    """
    if is_too_late.is_set():
        raise Beaten
