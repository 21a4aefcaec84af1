"""Races: which request, when, where to, and what is left of both attempts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    Fault,
    FirstToken,
    Late,
    Raced,
    RaceOver,
    RequestEnded,
    Routed,
    Shared,
)
from kvstore.routing.policy import parse
from kvstore.routing.rows import WEIGHTS
from kvstore.routing.values import WorkerRole
from kvstore.wire.load import EngineLoad
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    arrive,
    comes_back,
    core_of,
    fail,
    goes_down,
    prefiller,
    request,
    routed,
    spec,
    turn,
)


def racing(workers: int = 2, *more: Any, is_on: bool = True, **settings: Any) -> RouterCore:
    policy = parse({"races": {"is_on": is_on, **settings}, "learning": {"is_frozen": True}})
    return core_of(*(spec(n) for n in range(workers)), *more, policy=policy)


def pure(name: str, tokens: int = 160, **more: Any) -> Any:
    return request(name, tokens, has_side_effects=False, **more)


def raced(core: RouterCore, name: str = "r", after_ns: int = S) -> Raced:
    [command] = turn(core, Late(name), S + after_ns)
    assert isinstance(command, Raced)
    return command


def test_a_late_request_gets_a_second_worker_and_the_first_answer_counts() -> None:
    core = racing()
    first = routed(arrive(core, pure("r")))
    assert (first.may_race, first.late_after_s) == (True, 0.5)
    second = raced(core)
    assert {first.worker, second.worker} == {"w0", "w1"}
    assert len(core.fleet.flights) == 2
    core.step(RaceOver("r", first.worker), 2 * S)
    check(core)
    assert [flight.worker for flight in core.fleet.flights] == [second.worker]
    core.step(FirstToken("r"), 2 * S)
    core.step(RequestEnded("r", Ending.DONE), 3 * S)
    check(core)
    assert not core.fleet.flights
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    said = receipt.outcome
    assert (receipt.chosen, said.raced_s) == (first.worker, 1.0)
    assert (said.race_winner, said.race_loser) == (second.worker, first.worker)
    assert said.ttft_s == 1.0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_race_outlives_the_failure_of_one(is_first: bool) -> None:
    core = racing(3)
    first, second = routed(arrive(core, pure("r"))), raced(core)
    lost, left = (first, second) if is_first else (second, first)
    core.step(RaceOver("r", lost.worker, Fault(Failure.BROKEN)), 2 * S)
    check(core)
    assert [flight.worker for flight in core.fleet.flights] == [left.worker]
    third = routed(turn(core, fail("r"), 2 * S)[0])
    assert third.worker not in (first.worker, second.worker)
    assert not third.may_race, "one race a request"


@pytest.mark.parametrize("end", [RaceOver("r", "w1"), RequestEnded("r", Ending.ABORTED)])
def test_the_end_of_a_race_says_nothing_about_a_worker_that_was_only_tried(
    end: RaceOver | RequestEnded,
) -> None:
    """The race was the one attempt that its open breaker allowed."""
    core = racing()
    for n in range(3):
        routed(arrive(core, request(f"bad{n}", 160, subset=("w1",))))
        turn(core, fail(f"bad{n}"))
    core.step(Shared("other", (EngineLoad("w1", 0, 800, 0),)), 3 * S)
    assert routed(arrive(core, pure("r"), now_ns=3 * S)).worker == "w0"
    [second] = turn(core, Late("r"), 5 * S)
    assert isinstance(second, Raced)
    breaker = core.fleet.workers[1].breaker
    assert not breaker.may_allow(5 * S)
    core.step(end, 5 * S)
    assert breaker.may_allow(5 * S)
    assert breaker.is_open


def test_no_race_with_side_effects_or_without_another_worker_or_with_a_remote_prefill() -> None:
    assert not routed(arrive(racing(), request("a", 160))).may_race
    core = racing()
    goes_down(core, "w0")
    assert not routed(arrive(core, pure("a"))).may_race
    comes_back(core, "w0")
    assert routed(arrive(core, pure("b"))).may_race, "by what is known now"
    core = racing(0, *(spec(n, role=WorkerRole.DECODE) for n in range(2)), prefiller(10))
    assert not routed(arrive(core, pure("a", 4096))).may_race
    local = routed(arrive(core, pure("b", 100)))
    assert (local.may_race, local.late_after_s) == (True, 0.5)


def test_by_default_a_request_is_late_after_the_longest_of_three_times() -> None:
    core = racing(is_on=False)
    short = routed(arrive(core, pure("a")))
    assert (short.may_race, short.late_after_s) == (True, 10.0)
    core.step(Shared("other", (EngineLoad("w0", 0, 80_000, 0), EngineLoad("w1", 0, 80_000, 0))), S)
    long = routed(arrive(core, pure("b")))
    predicted_s = long.draft.plain.predicted_s
    assert predicted_s > 9
    assert long.late_after_s == pytest.approx(5 * predicted_s)
    core.races._late_ratios["interactive"] = 7.0
    longer = routed(arrive(core, pure("c")))
    assert longer.late_after_s == pytest.approx(7 * longer.draft.plain.predicted_s)


def test_a_remote_prefill_is_late_by_itself() -> None:
    core = racing(0, spec(0, role=WorkerRole.DECODE), prefiller(10))
    core.races._late_ratios["interactive"] = 60.0
    assert routed(arrive(core, pure("a", 4096))).late_after_s == 10.0
    core.races._late_ratios["interactive\0prefill"] = 60.0
    remote = routed(arrive(core, pure("b", 4096)))
    assert remote.prefill_worker == "w10"
    assert remote.late_after_s == pytest.approx(60 * remote.draft.plain.predicted_s)
    for name in "ab":
        core.step(FirstToken(name), S)
    assert core.races._late_ratios["interactive"] == 60.0
    assert core.races._late_ratios["interactive\0prefill"] < 60.0


def test_no_race_to_a_worker_that_is_not_free() -> None:
    core = racing()
    routed(arrive(core, pure("r")))
    routed(arrive(core, pure("x"), now_ns=S + MS))
    assert turn(core, Late("r"), 2 * S) == []
    assert core.open["r"].race is None
    for waited_ns, count in ((500 * MS, 0), (2 * S, 1)):
        quick = racing()
        assert 0.5 < routed(arrive(quick, pure("r", 8000))).draft.plain.predicted_s < 2
        assert len(quick.step(Late("r"), S + waited_ns)) == count, "no quicker than was waited"


def test_races_have_a_budget() -> None:
    core = racing(burst=2, share=0.01)
    races = 0
    for n in range(100):
        routed(arrive(core, pure(f"r{n}"), now_ns=(3 * n + 1) * S))
        races += len(core.step(Late(f"r{n}"), (3 * n + 2) * S))
        core.step(RequestEnded(f"r{n}", Ending.DONE), (3 * n + 3) * S)
    check(core)
    assert races in (2, 3)


def test_a_busy_class_learns_what_late_is() -> None:
    """One in twenty is late: the quantile is met from above and from below."""
    core = racing(after_s_min=0.001)
    core.races._late_ratios["interactive"] = start = 30.0
    late = 0
    for n in range(2000):
        sent = routed(core.step(Arrived(pure(f"r{n}")), (n + 1) * S)[0])
        ratio = 1 + (n * 7919 % 1000) / 100  # 1 to 11, evenly
        achieved_s = ratio * sent.draft.plain.predicted_s
        late += n >= 1000 and achieved_s > sent.late_after_s
        core.step(FirstToken(f"r{n}"), (n + 1) * S + int(achieved_s * S))
        core.step(RequestEnded(f"r{n}", Ending.DONE), (n + 1) * S + int(achieved_s * S))
    assert core.races._late_ratios["interactive"] < start
    assert 0.03 <= late / 1000 <= 0.07
    other = routed(core.step(Arrived(pure("other", service="batch")), 3000 * S)[0])
    assert other.late_after_s == pytest.approx(4 * other.draft.plain.predicted_s)


def test_a_request_that_is_late_moves_what_late_is_once() -> None:
    core = racing(after_s_min=0.001)
    first = routed(arrive(core, pure("r")))
    raced(core)
    core.step(RaceOver("r", "w1"), 3 * S)
    core.step(FirstToken("r"), 9 * S)
    core.step(RequestEnded("r", Ending.DONE), 9 * S)
    then = routed(arrive(core, pure("then"), now_ns=10 * S))
    before, after = (each.late_after_s / each.draft.plain.predicted_s for each in (first, then))
    assert after == pytest.approx(before * math.exp(0.1 * 0.95))


def test_the_time_of_a_second_worker_is_counted_from_its_own_beginning() -> None:
    core = core_of(spec(0), spec(1))
    routed(arrive(core, pure("r", 16_000)))
    second = raced(core, after_ns=30 * S)
    placed = core.open["r"].race
    assert placed is not None
    core.step(RaceOver("r", "w0"), 31 * S)
    core.step(FirstToken("r"), 31 * S + int(placed.predicted_s * S))
    learned = core.fleet.columns[WEIGHTS, core.fleet.row_of[second.worker]]
    assert learned == pytest.approx(1.0), "it took as long as was predicted"


def test_an_aborted_race_leaves_no_prefix_at_its_second_worker() -> None:
    core = racing()
    asked = pure("r")
    routed(arrive(core, asked))
    second = raced(core)
    sent = core.tree.match(asked.keys, 2 * S, step=asked.key_step, young_only=False)
    assert second.worker in sent
    core.step(RequestEnded("r", Ending.ABORTED), 2 * S)
    sent = core.tree.match(asked.keys, 2 * S, step=asked.key_step, young_only=False)
    assert second.worker not in sent


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
    routed_again = turn(core, fail("s", Failure.BROKEN), 3 * S)
    assert [type(each) for each in routed_again] == [Routed]
