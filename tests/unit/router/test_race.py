"""Races, in front of scripted engines and alone: one answer, whole, and nothing left of the other
attempt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from aiohttp import web

from kvstore.router.engines.connections import Attempt
from kvstore.router.engines.failures import Beaten, LegFailure
from kvstore.router.front.legs import Race
from kvstore.router.pages import _metrics
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Failure
from kvstore.routing.policy import PolicyChoice, PolicyLearning, PolicyRaces, RoutingPolicy
from tests.kit.coroutines import on_loop
from tests.kit.router_thread import ASK
from tests.kit.routing_check import check
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

AFTER_S = 0.2
BODY = ASK | {"stream": True}
Engines = dict[str, VirtualWorker]


@pytest.fixture
def engines(workers: list[VirtualWorker]) -> Engines:
    for each in workers:
        each.script("ok", mark=each.name)
    return {each.name: each for each in workers}


@contextmanager
def racing(engines: Engines, after_s: float = AFTER_S) -> Iterator[VirtualRouter]:
    """Nothing is left of any request at its end."""
    policy = RoutingPolicy(
        races=PolicyRaces(is_on=True, after_s_min=after_s, burst=1000),
        learning=PolicyLearning(is_frozen=True),
        choice=PolicyChoice(top_k=1),
    )
    core = RouterCore(policy, seed=7)
    with VirtualRouter([e.flag for e in engines.values()], core=cast("Any", core)) as router:
        yield router
        until(lambda: not core.open)
        router.on_loop(lambda: check(core))
        assert not core.fleet.flights
        assert not any(worker.attempts for worker in router.router.workers)
    until(lambda: not any(each.seen()["running"] for each in engines.values()))


def first_and_second(router: VirtualRouter) -> tuple[str, str]:
    """The worker that the next request goes to, and the other one."""
    status, _, answer = router.ask(BODY, "/kvstore/explain/v1/completions")
    assert status == 200
    chosen = json.loads(answer)["chosen"]
    return chosen, "ab".replace(chosen, "")


def marks(answer: bytes) -> list[str]:
    """Engines that the pieces of a whole answer come from."""
    assert answer.endswith(b"data: [DONE]\n\n")
    assert answer.count(b"[DONE]") == 1
    lines = [line.removeprefix("data: ") for line in answer.decode().split("\n\n")]
    pieces = [json.loads(line) for line in lines if line.startswith("{") and "usage" not in line]
    assert [number for piece in pieces for number in piece.values()] == [0, 1, 2]
    return sorted({name for piece in pieces for name in piece})


@pytest.mark.parametrize("mode", ["stuck", "hang"])
def test_a_second_engine_answers_for_one_that_does_not(engines: Engines, mode: str) -> None:
    with racing(engines) as router:
        first, second = first_and_second(router)
        engines[first].script(mode)
        status, headers, answer = router.ask(BODY)
        assert (status, marks(answer), headers["x-kvstore-worker"]) == (200, [second], second)
        until(lambda: engines[first].seen()["aborted"] == 1)
        assert router.router.proxy.races == {"begun": 1, "slower": 1}
        values: Any = router.on_loop(lambda: _metrics(router.router))
        assert len(values["router_races_total"]) == 2
        core = router.core
        until(lambda: not core.open)
        [receipt] = [draft.receipt() for draft in router.on_loop(core.take_drafts)]
        outcome = receipt.outcome
        assert (receipt.chosen, outcome.race_winner, outcome.race_loser) == (first, second, first)
        assert AFTER_S <= (outcome.raced_s or 0) <= (outcome.ttft_s or 0)
        assert (outcome.attempts, outcome.end, outcome.cached_tokens) == (1, "done", 64)


def test_both_answer_at_the_same_time_and_the_client_gets_one(engines: Engines) -> None:
    with racing(engines) as router:
        for step in range(6):
            first, second = first_and_second(router)
            lead_s = (step - 3) / 1000
            engines[first].script("ok", mark=first, delay_s=2 * AFTER_S, pause_s=0.01)
            engines[second].script("ok", mark=second, delay_s=AFTER_S + lead_s, pause_s=0.01)
            status, headers, answer = router.ask(BODY)
            winner = headers["x-kvstore-worker"]
            assert (status, marks(answer)) == (200, [winner])
        assert router.router.proxy.races["begun"] == 6
        assert router.router.proxy.races["slower"] == 6


@pytest.mark.parametrize(
    ("loser", "how"),
    [(0, {"mode": "cut", "delay_s": 2 * AFTER_S}), (1, {"mode": "fail"})],
    ids=["first-cut", "second-500"],
)
def test_the_other_one_goes_on_when_one_fails(
    engines: Engines, loser: int, how: dict[str, Any]
) -> None:
    with racing(engines) as router:
        pair = first_and_second(router)
        for name in pair:
            engines[name].script("ok", mark=name, delay_s=6 * AFTER_S)
        engines[pair[loser]].script(**how)
        status, headers, answer = router.ask(BODY)
        winner = pair[1 - loser]
        assert (status, marks(answer), headers["x-kvstore-worker"]) == (200, [winner], winner)
        assert router.router.proxy.races == {"begun": 1, "failed": 1}
        until(lambda: router.failure_count(pair[loser]) == 1)  # after the answer
        assert router.failure_count(winner) == 0


def test_a_client_that_leaves_ends_both(engines: Engines) -> None:
    for each in engines.values():
        each.script("stuck")

    def running() -> list[int]:
        return [each.seen()["running"] for each in engines.values()]

    with racing(engines) as router:
        second, core = first_and_second(router)[1], router.router.core

        def half_open() -> None:
            for _ in range(3):
                core.fleet.failed(second, "test", 0)
            state = core.fleet.state(second)
            assert state is not None
            state.breaker.end_cooldown()

        until(lambda: all(worker.models for worker in router.router.workers))
        router.on_loop(half_open)
        asked = router.begin(BODY)
        until(lambda: running() == [1, 1])
        until(lambda: router.words()[second] == "half-open")
        asked.leave()
        until(lambda: router.router.proxy.counts["aborted"] == 1)
        until(lambda: running() == [0, 0])
        assert router.router.proxy.races == {"begun": 1}
        until(lambda: router.words()[second] == "open")  # the trial is free again


# ── claims of two attempts whose first pieces are there in the same turn of the loop ─────────────


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


@pytest.mark.parametrize(
    ("statuses", "fails", "winner"),
    [
        ((200, 200), set(), 0),
        ((200, 200), {0}, 1),
        ((200, 200), {1}, 0),
        ((200, 200), {0, 1}, None),
        ((200, 429), set(), 0),
        ((200, 429), {0}, 1),
    ],
)
@on_loop
async def test_pieces_and_failures_in_the_same_turn_are_one_answer(
    statuses: tuple[int, int], fails: set[int], winner: int | None
) -> None:
    played = Played(statuses=statuses)
    played.fails = fails
    if winner is None:
        with pytest.raises(LegFailure, match="attempt 1"):
            await played.run()
        winner = 1  # the failure of the last
    else:
        assert await played.run() == winner
        assert played.written == [winner] * 2
    loser = 1 - winner
    has_failed = loser == 0 and 0 in fails  # before the other's claim
    assert played.over == [(loser, has_failed)]
    assert played.cancelled == [loser] * (not has_failed)
    assert played.race.attempt is played.pair[winner]
    if not fails:
        with pytest.raises(Beaten):
            played.race.claim(played.pair[loser])


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
