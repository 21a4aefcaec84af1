"""Races: which request, when, where to, and what is left of both attempts."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    FirstToken,
    Late,
    Leg,
    LegFailed,
    Raced,
    RaceOver,
    RequestEnded,
    Routed,
)
from kvstore.routing.legs.races import Races
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole
from tests.unit.routing.fleets import MS, S, arrive, core_of, prefiller, request, routed, spec


def racing(workers: int = 2, *more: Any, **settings: Any) -> RouterCore:
    policy = parse({"races": {"is_on": True, **settings}, "learning": {"is_frozen": True}})
    return core_of(*(spec(n) for n in range(workers)), *more, policy=policy)


def pure(name: str, tokens: int = 160) -> Any:
    return request(name, tokens, has_side_effects=False)


def raced(core: RouterCore, name: str = "r", after_ns: int = S) -> Raced:
    [command] = core.step(Late(name), S + after_ns)
    core.check()
    assert isinstance(command, Raced)
    return command


def test_a_late_request_gets_a_second_worker_and_the_first_answer_counts() -> None:
    core = racing()
    first = routed(arrive(core, pure("r")))
    assert first.race_after_s == 0.5
    second = raced(core)
    assert {first.worker, second.worker} == {"w0", "w1"}
    assert len(core.fleet.flights) == 2
    core.step(RaceOver("r", first.worker), 2 * S)
    core.check()
    assert [flight.worker for flight in core.fleet.flights.values()] == [second.worker]
    core.step(FirstToken("r"), 2 * S)
    core.step(RequestEnded("r", Ending.DONE), 3 * S)
    core.check()
    assert not core.fleet.flights
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    said = receipt.outcome
    assert (receipt.chosen, said.raced_s) == (first.worker, 1.0)
    assert (said.race_winner, said.race_loser) == (second.worker, first.worker)
    assert said.ttft_s == 1.0


def test_the_first_worker_may_still_win() -> None:
    core = racing()
    first = routed(arrive(core, pure("r")))
    second = raced(core)
    core.step(RaceOver("r", second.worker), 2 * S)
    core.step(FirstToken("r"), 2 * S)
    core.check()
    assert [flight.worker for flight in core.fleet.flights.values()] == [first.worker]
    assert core.step(Late("r"), 2 * S) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_race_outlives_the_failure_of_one(is_first: bool) -> None:
    core = racing(3)
    first, second = routed(arrive(core, pure("r"))), raced(core)
    lost, left = (first, second) if is_first else (second, first)
    core.step(RaceOver("r", lost.worker, Failure.BROKEN), 2 * S)
    core.check()
    assert [flight.worker for flight in core.fleet.flights.values()] == [left.worker]
    third = routed(core.step(LegFailed("r", Leg.DECODE, Failure.BROKEN), 2 * S)[0])
    core.check()
    assert third.worker not in (first.worker, second.worker)
    assert third.race_after_s is None, "one race a request"


def test_an_abort_ends_both() -> None:
    core = racing()
    routed(arrive(core, pure("r")))
    raced(core)
    core.step(RequestEnded("r", Ending.ABORTED), 2 * S)
    core.check()
    assert not core.fleet.flights
    assert core.step(RaceOver("r", "w0"), 2 * S) == []


def test_no_race_with_side_effects_or_without_another_worker_or_by_default() -> None:
    assert routed(arrive(racing(), request("a", 160))).race_after_s is None
    assert routed(arrive(racing(1), pure("a"))).race_after_s is None
    assert routed(arrive(core_of(spec(0), spec(1)), pure("a"))).race_after_s is None
    core = racing(0, *(spec(n, role=WorkerRole.DECODE) for n in range(2)), prefiller(10))
    assert routed(arrive(core, pure("a", 4096))).race_after_s is None
    assert routed(arrive(core, pure("b", 100))).race_after_s == 0.5


def test_no_race_to_a_worker_that_is_not_free() -> None:
    core = racing()
    routed(arrive(core, pure("r")))
    routed(arrive(core, pure("x"), now_ns=S + MS))
    assert core.step(Late("r"), 2 * S) == []
    core.check()
    assert core.open["r"].race is None
    for waited_ns, count in ((500 * MS, 0), (2 * S, 1)):
        quick = racing()
        assert 0.5 < routed(arrive(quick, pure("r", 8000))).receipt.predicted_s < 2
        assert len(quick.step(Late("r"), S + waited_ns)) == count, "no quicker than was waited"


def test_no_race_before_the_token_is_late_again_or_after_it() -> None:
    core = racing()
    routed(arrive(core, pure("r")))
    core.step(FirstToken("r"), S + MS)
    assert core.step(Late("r"), 2 * S) == []
    assert core.step(Late("nobody"), 2 * S) == []


def test_races_have_a_budget() -> None:
    core = racing(burst=2, share=0.01)
    races = 0
    for n in range(100):
        routed(arrive(core, pure(f"r{n}"), now_ns=(3 * n + 1) * S))
        races += len(core.step(Late(f"r{n}"), (3 * n + 2) * S))
        core.step(RequestEnded(f"r{n}", Ending.DONE), (3 * n + 3) * S)
    core.check()
    assert races in (2, 3)


def test_a_busy_class_learns_what_late_is() -> None:
    """One in twenty is late: the quantile is met from above and from below."""
    core = racing(after_s_min=0.001)
    core.races._late_ratios["interactive"] = start = 30.0
    late = 0
    for n in range(2000):
        sent = routed(core.step(Arrived(pure(f"r{n}")), (n + 1) * S)[0])
        ratio = 1 + (n * 7919 % 1000) / 100  # 1 to 11, evenly
        achieved_s = ratio * sent.receipt.predicted_s
        late += n >= 1000 and achieved_s > (sent.race_after_s or 0)
        core.step(FirstToken(f"r{n}"), (n + 1) * S + int(achieved_s * S))
        core.step(RequestEnded(f"r{n}", Ending.DONE), (n + 1) * S + int(achieved_s * S))
    assert core.races._late_ratios["interactive"] < start
    assert 0.03 <= late / 1000 <= 0.07
    assert Races(core.policy)._late_ratio("batch") == 4.0


def test_a_class_that_another_policy_does_not_have_ends_no_request() -> None:
    races = {"is_on": True}
    policy = parse(
        {
            "classes": {"own": {"rank": 1}, "default": {"rank": 2}},
            "default_class": "default",
            "races": races,
        }
    )
    core = core_of(spec(0), spec(1), policy=policy)
    routed(arrive(core, request("r", 160, has_side_effects=False, service="own")))
    routed(arrive(core, request("s", 160, has_side_effects=False, service="own")))
    core.adopt(parse({"races": races}), S)
    core.step(Late("r"), 3 * S)
    routed_again = core.step(LegFailed("s", Leg.DECODE, Failure.BROKEN), 3 * S)
    assert [type(each) for each in routed_again] == [Routed]
    core.check()
