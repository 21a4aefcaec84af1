"""Claims of two attempts whose first pieces are there in the same turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from aiohttp import web

from kvstore.router.engines.connections import Attempt
from kvstore.router.engines.failures import Beaten, LegFailure
from kvstore.router.front.legs import Race
from kvstore.routing.events import Failure
from tests.kit.coroutines import on_loop

Decode = Callable[[Attempt], Coroutine[Any, Any, web.StreamResponse]]


class Silent:
    has_answered = False

    def __init__(self, status: int) -> None:
        self.status = status
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def end(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


class Played:
    """A race of two attempts that do as the test says; `written` by whom."""

    def __init__(self, *, statuses: tuple[int, int] = (200, 200)) -> None:
        self.pair = [cast("Attempt", Silent(status)) for status in statuses]
        self.piece = asyncio.Event()
        self.written: list[int] = []
        self.over: list[tuple[int, bool]] = []
        self.fails: set[int] = set()
        self.cancelled: list[int] = []
        self.race = Race(self.pair[0], self._is_over)

    def _is_over(self, each: Attempt, error: LegFailure | None) -> None:
        self.over.append((self.pair.index(each), error is not None))

    async def decode(self, each: Attempt) -> web.StreamResponse:
        place = self.pair.index(each)
        try:
            await self.piece.wait()
            if (ended := cast("Silent", each).error) is not None:
                raise ended
            if place in self.fails:
                raise LegFailure(Failure.BROKEN, f"attempt {place}")
            self.race.claim(each)
            self.written.append(place)
            await asyncio.sleep(0)
            self.written.append(place)
        except asyncio.CancelledError:
            self.cancelled.append(place)
            raise
        return cast("web.StreamResponse", place)

    async def both_wait(self, decode: Decode | None = None) -> asyncio.Task[Any]:
        """Both attempts have begun and wait for their pieces."""
        run = self.race.run(decode or self.decode, 0.0, lambda: self.pair[1])
        running = asyncio.create_task(run)
        for _ in range(10):
            await asyncio.sleep(0)
        assert self.race._has_both
        return running

    async def run(self, decode: Decode | None = None) -> Any:
        """What the race comes to when the pieces of both are there in one turn."""
        running = await self.both_wait(decode)
        self.piece.set()
        return await running


@on_loop
async def test_an_attempt_that_has_answered_in_time_has_no_rival() -> None:
    asked = list[int]()

    def second() -> None:
        asked.append(1)

    played = Played()
    cast("Any", played.pair[0]).has_answered = True
    running = asyncio.create_task(played.race.run(played.decode, 0.0, second))
    await asyncio.sleep(0.01)
    played.piece.set()
    assert cast("int", await running) == 0
    assert not asked


@on_loop
async def test_pieces_in_the_same_turn_are_one_answer() -> None:
    played = Played()
    assert await played.run() == 0
    assert played.written == [0, 0]
    assert (played.over, played.cancelled) == ([(1, False)], [1])
    assert played.race.attempt is played.pair[0]
    with pytest.raises(Beaten):
        played.race.claim(played.pair[1])


@pytest.mark.parametrize("loser", [0, 1])
@on_loop
async def test_a_failure_and_a_piece_in_the_same_turn(loser: int) -> None:
    played = Played()
    played.fails = {loser}
    assert await played.run() == 1 - loser
    assert played.written == [1 - loser] * 2
    assert [place for place, _ in played.over] == [loser]


@on_loop
async def test_two_failures_in_the_same_turn_are_the_failure_of_the_last() -> None:
    played = Played()
    played.fails = {0, 1}
    with pytest.raises(LegFailure, match="attempt 1"):
        await played.run()
    assert (played.written, played.over) == ([], [(0, True)])
    assert played.race.attempt is played.pair[1]


def test_a_refusal_loses_to_an_attempt_that_runs_and_not_to_one_that_failed() -> None:
    async def both(*, fails: bool) -> Played:
        played = Played(statuses=(429 if fails else 200, 429))
        played.fails = {0} if fails else set()
        assert await played.run() == (1 if fails else 0)
        return played

    assert asyncio.run(both(fails=True)).written == [1, 1]
    assert asyncio.run(both(fails=False)).written == [0, 0]


@on_loop
async def test_a_client_that_leaves_ends_both() -> None:
    played = Played()
    running = await played.both_wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(played.cancelled) == [0, 1]


@on_loop
async def test_a_failure_that_nobody_has_seen_yet_is_over_before_the_claim() -> None:
    """Else the first token would be counted at the worker that failed."""

    played = Played()
    at_claim: list[tuple[int, bool]] = []

    async def decode(each: Attempt) -> web.StreamResponse:
        if each is played.pair[0]:
            await played.piece.wait()
            raise LegFailure(Failure.BROKEN, "attempt 0")
        await played.piece.wait()
        await asyncio.sleep(0)  # a callback of a connection between the end and the race's turn
        played.race.claim(each)
        at_claim.extend(played.over)
        return cast("web.StreamResponse", 1)

    assert await played.run(decode) == 1
    assert at_claim == played.over == [(0, True)]
    assert played.race.attempt is played.pair[1]


@on_loop
async def test_a_beaten_refusal_and_the_failure_of_the_other_are_that_failure() -> None:
    played = Played(statuses=(200, 429))
    played.fails = {0}

    async def decode(each: Attempt) -> web.StreamResponse:
        if each is played.pair[1]:
            await played.piece.wait()
            played.race.claim(each)
        await played.piece.wait()
        await asyncio.sleep(0)
        raise LegFailure(Failure.BROKEN, "attempt 0")

    with pytest.raises(LegFailure, match="attempt 0"):
        await played.run(decode)
    assert played.over == [(1, False)]
    assert played.race.attempt is played.pair[0]


@on_loop
async def test_the_first_ends_where_the_second_answers() -> None:
    played = Played()

    async def decode(each: Attempt) -> web.StreamResponse:
        if each is played.pair[1]:
            return await played.decode(each)
        silent = cast("Silent", each)
        await silent.ended.wait()
        assert silent.error is not None
        played.cancelled.append(0)
        raise silent.error

    running = asyncio.create_task(played.race.run(decode, 0.0, lambda: played.pair[1]))
    played.piece.set()
    assert cast("int", await running) == 1
    assert (played.written, played.over, played.cancelled) == ([1, 1], [(0, False)], [0])
    with pytest.raises(Beaten):
        played.race.claim(played.pair[0])


@on_loop
async def test_an_error_of_ours_in_the_second_attempt_is_not_lost() -> None:
    played = Played()

    async def decode(each: Attempt) -> web.StreamResponse:
        if each is played.pair[1]:
            raise ZeroDivisionError
        silent = cast("Silent", each)
        await silent.ended.wait()
        assert silent.error is not None
        raise silent.error

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        await played.race.run(decode, 0.0, lambda: played.pair[1])


@on_loop
async def test_a_refused_second_whose_task_has_not_ended_is_no_answer_of_the_race() -> None:
    """The first fails in the turn in which the second is refused."""
    played = Played(statuses=(200, 422))
    played.fails = {0}

    async def decode(each: Attempt) -> web.StreamResponse:
        if each is played.pair[0]:
            await played.piece.wait()
            raise LegFailure(Failure.ERROR, "attempt 0")
        try:
            await played.piece.wait()
        finally:
            assert played.race.attempt is played.pair[0]
        raise AssertionError("the claim below came first")

    running = await played.both_wait(decode)
    with pytest.raises(Beaten):  # as its connection does, from the loop
        played.race.claim(played.pair[1])
    played.piece.set()
    with pytest.raises(LegFailure, match="attempt 0"):
        await running
    assert played.over == [(1, False)]
