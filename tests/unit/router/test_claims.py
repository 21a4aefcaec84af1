"""Claims of two attempts whose first pieces are there in the same turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from aiohttp import web

from kvstore.router.front.attempt import Attempt, Beaten, LegFailure
from kvstore.router.front.race import Race
from kvstore.routing.events import Failure


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

    async def run(self) -> Any:
        running = asyncio.create_task(self.race.run(self.decode, 0.0, lambda: self.pair[1]))
        for _ in range(10):  # both wait for their pieces
            await asyncio.sleep(0)
        assert self.race._has_both
        self.piece.set()
        return await running


def test_pieces_in_the_same_turn_are_one_answer() -> None:
    async def both() -> Played:
        played = Played()
        assert await played.run() == 0
        return played

    played = asyncio.run(both())
    assert played.written == [0, 0]
    assert (played.over, played.cancelled) == ([(1, False)], [1])
    assert played.race.attempt is played.pair[0]
    with pytest.raises(Beaten):
        played.race.claim(played.pair[1])


@pytest.mark.parametrize("loser", [0, 1])
def test_a_failure_and_a_piece_in_the_same_turn(loser: int) -> None:
    async def both() -> Played:
        played = Played()
        played.fails = {loser}
        assert await played.run() == 1 - loser
        return played

    played = asyncio.run(both())
    assert played.written == [1 - loser] * 2
    assert [place for place, _ in played.over] == [loser]


def test_two_failures_in_the_same_turn_are_the_failure_of_the_last() -> None:
    async def both() -> Played:
        played = Played()
        played.fails = {0, 1}
        with pytest.raises(LegFailure, match="attempt 1"):
            await played.run()
        return played

    played = asyncio.run(both())
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


def test_a_client_that_leaves_ends_both() -> None:
    async def leaving() -> list[int]:
        played = Played()
        running = asyncio.create_task(played.race.run(played.decode, 0.0, lambda: played.pair[1]))
        for _ in range(10):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return played.cancelled

    assert sorted(asyncio.run(leaving())) == [0, 1]


def test_a_failure_that_nobody_has_seen_yet_is_over_before_the_claim() -> None:
    """Else the first token would be counted at the worker that failed."""

    async def both() -> tuple[Played, list[tuple[int, bool]]]:
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

        running = asyncio.create_task(played.race.run(decode, 0.0, lambda: played.pair[1]))
        for _ in range(10):
            await asyncio.sleep(0)
        played.piece.set()
        assert await running == 1
        return played, at_claim

    played, at_claim = asyncio.run(both())
    assert at_claim == played.over == [(0, True)]
    assert played.race.attempt is played.pair[1]


def test_a_beaten_refusal_and_the_failure_of_the_other_are_that_failure() -> None:
    async def both() -> Played:
        played = Played(statuses=(200, 429))
        played.fails = {0}

        async def decode(each: Attempt) -> web.StreamResponse:
            if each is played.pair[1]:
                await played.piece.wait()
                played.race.claim(each)
            await played.piece.wait()
            await asyncio.sleep(0)
            raise LegFailure(Failure.BROKEN, "attempt 0")

        running = asyncio.create_task(played.race.run(decode, 0.0, lambda: played.pair[1]))
        for _ in range(10):
            await asyncio.sleep(0)
        played.piece.set()
        with pytest.raises(LegFailure, match="attempt 0"):
            await running
        return played

    played = asyncio.run(both())
    assert played.over == [(1, False)]
    assert played.race.attempt is played.pair[0]


def test_the_first_ends_where_the_second_answers() -> None:
    async def second() -> Played:
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
        return played

    played = asyncio.run(second())
    assert (played.written, played.over, played.cancelled) == ([1, 1], [(0, False)], [0])
    with pytest.raises(Beaten):
        played.race.claim(played.pair[0])


def test_an_error_of_ours_in_the_second_attempt_is_not_lost() -> None:
    async def second() -> None:
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

    asyncio.run(second())


def test_a_refused_second_whose_task_has_not_ended_is_no_answer_of_the_race() -> None:
    """The first fails in the turn in which the second is refused."""

    async def both() -> Played:
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

        running = asyncio.create_task(played.race.run(decode, 0.0, lambda: played.pair[1]))
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(Beaten):  # as its connection does, from the loop
            played.race.claim(played.pair[1])
        played.piece.set()
        with pytest.raises(LegFailure, match="attempt 0"):
            await running
        return played

    assert asyncio.run(both()).over == [(1, False)]
