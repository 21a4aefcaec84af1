"""Races in front of scripted engines: one answer, whole, and nothing left of the other attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from kvstore.router.pages import _metrics
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import PolicyChoice, PolicyLearning, PolicyRaces, RoutingPolicy
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
