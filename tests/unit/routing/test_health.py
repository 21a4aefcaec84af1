"""Probes, breakers and their words: a slow worker is no broken one, and nobody is lost for good."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    AbandonWorker,
    Ending,
    Failure,
    FirstToken,
    Joined,
    Lack,
    Probed,
    RequestEnded,
    Shared,
    WorkerLeft,
)
from kvstore.routing.policy import RoutingPolicy, parse
from kvstore.routing.rows import StateChange
from kvstore.routing.values import ProbeResult, WorkerRole, WorkerSpec, WorkerWord
from kvstore.wire.load import EngineLoad
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    comes_back,
    core_of,
    fail,
    goes_down,
    hbm,
    prefiller,
    rejected,
    request,
    routed,
    spec,
    turn,
)

ANSWERED, LATE = ProbeResult.ANSWERED, ProbeResult.LATE
REFUSED, UNWELL, SILENT = ProbeResult.REFUSED, ProbeResult.UNWELL, ProbeResult.SILENT


def open_breaker(core: RouterCore, worker: str = "w0", now_ns: int = S) -> None:
    """Three faults in a row."""
    for n in range(3):
        name = f"bad{n} {worker} {now_ns}"
        routed(arrive(core, request(name, 160, subset=(worker,)), now_ns=now_ns))
        rejected(turn(core, fail(name, why="status 502"), now_ns)[0])


def opened() -> RouterCore:
    """The breaker of w0 is open, and w1 has so much to do that w0 would get all requests."""
    core = core_of(spec(0), spec(1))
    open_breaker(core)
    core.step(Shared("other", (EngineLoad("w1", 0, 80_000, 0),)), S)
    return core


def goes_to(core: RouterCore, name: str, now_ns: int) -> str:
    return routed(arrive(core, request(name, 160), now_ns=now_ns)).worker


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def changes(core: RouterCore, event: Any, now_ns: int = S) -> list[tuple[str, str, str]]:
    found = core.step(event, now_ns)
    check(core)
    return [(c.worker, c.word.value, c.why) for c in found if isinstance(c, StateChange)]


def test_a_change_of_a_word_or_its_reason_is_said_once() -> None:
    core = RouterCore(RoutingPolicy(), seed=1)
    assert changes(core, Joined(spec(0))) == [], "it begins as new"
    assert changes(core, Probed("w0", LATE, late_s=1.0)) == [], "and was never reached"
    assert changes(core, Probed("w0", ANSWERED, late_s=1.0)) == [("w0", "late", "")]
    assert changes(core, Probed("w0", LATE, late_s=9.0)) == []
    assert changes(core, Probed("w0", ANSWERED)) == [("w0", "up", "")]
    assert changes(core, Probed("w0", ANSWERED)) == []
    assert changes(core, Probed("w0", REFUSED, "refused")) == [("w0", "down", "refused")]
    assert changes(core, Probed("w0", LATE, late_s=9.0)) == [], "not even late any more"
    assert changes(core, Probed("w0", UNWELL, "status 503")) == [("w0", "down", "status 503")]
    assert changes(core, Probed("w0", SILENT, "silent")) == [("w0", "down", "silent")]
    assert changes(core, Probed("w0", ANSWERED)) == [("w0", "up", "")]
    assert changes(core, Probed("gone", REFUSED)) == []


def test_a_worker_that_nobody_has_reached_yet_gets_requests_and_an_answer_reaches_it() -> None:
    core = RouterCore(RoutingPolicy(), seed=1)
    core.step(Joined(spec(0)), 0)
    assert core.fleet.workers[0].word is WorkerWord.NEW
    routed(arrive(core, request("r")))
    assert changes(core, FirstToken("r")) == [("w0", "up", "")]
    assert changes(core, RequestEnded("r", Ending.DONE)) == []


def test_the_words_of_a_breaker() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(3):
        routed(arrive(core, request(f"r{n}", subset=("w0",))))
        found = changes(core, fail(f"r{n}", why="status 502"))
        assert found == [("w0", "open", "status 502")] * (n == 2)
    assert core.step(fail("nobody"), S) == []
    core.step(Shared("other", (EngineLoad("w1", 0, 80_000, 0),)), S)
    assert goes_to(core, "probe", 2 * S) == "w0"
    assert core.fleet.workers[0].word is WorkerWord.HALF_OPEN
    assert changes(core, fail("probe", why="status 503"), 2 * S) == [("w0", "open", "status 503")]
    assert goes_to(core, "again", 4 * S) == "w0"
    assert changes(core, FirstToken("again"), 4 * S) == [("w0", "up", "")]


def test_an_attempt_that_proves_nothing_ends_half_open() -> None:
    core = opened()
    assert goes_to(core, "probe", 2 * S) == "w0"
    found = changes(core, RequestEnded("probe", Ending.FAILED, why="behind a gateway"), 2 * S)
    assert found == [("w0", "open", "status 502")]


# ── breakers ─────────────────────────────────────────────────────────────────────────────────────


def test_an_open_breaker_lets_one_request_through_at_a_time() -> None:
    core = opened()
    assert goes_to(core, "a", 2 * S - 1) == "w1", "the cool-down is a second"
    assert goes_to(core, "b", 2 * S) == "w0"
    assert goes_to(core, "c", 2 * S + MS) == "w1", "one at a time"
    core.step(FirstToken("b"), 2 * S + 2 * MS)
    assert goes_to(core, "d", 2 * S + 3 * MS) == "w0"
    assert goes_to(core, "e", 2 * S + 3 * MS) == "w0"


def test_an_attempt_that_fails_doubles_the_cool_down() -> None:
    core = opened()
    assert goes_to(core, "b", 2 * S) == "w0"
    assert routed(turn(core, fail("b"), 2 * S)[0]).worker == "w1"
    assert goes_to(core, "c", 4 * S - 1) == "w1"
    assert goes_to(core, "d", 4 * S) == "w0"


@pytest.mark.parametrize("end", [Ending.DONE, Ending.REFUSED])
def test_any_answer_closes_a_breaker(end: Ending) -> None:
    core = opened()
    assert goes_to(core, "a", 2 * S) == "w0"
    core.step(RequestEnded("a", end), 2 * S)
    assert not core.fleet.workers[0].breaker.is_open
    assert [goes_to(core, name, 2 * S) for name in "bc"] == ["w0", "w0"]


@pytest.mark.parametrize("failure", [Failure.BUSY, Failure.REFUSED, Failure.CONNECT, None])
def test_an_attempt_without_a_result_makes_room_for_the_next(failure: Failure | None) -> None:
    core = opened()
    assert goes_to(core, "a", 2 * S) == "w0"
    if failure is None:
        core.step(RequestEnded("a", Ending.ABORTED), 2 * S)
    else:
        lack = Lack.CONTEXT if failure is Failure.REFUSED else None
        assert routed(turn(core, fail("a", failure, lack=lack), 2 * S)[0]).worker == "w1"
    later_ns = 2 * S + 250 * MS * (failure is Failure.BUSY)
    assert goes_to(core, "b", later_ns) == "w0"
    assert goes_to(core, "c", later_ns) == "w1", "it is still open"


def test_the_end_of_a_request_that_waits_frees_no_attempt_of_another_one() -> None:
    classes = {"urgent": {"rank": 0, "tenants": ["*"]}, "interactive": {"rank": 1}}
    policy = parse({"limits": {"running_max": 1}, "classes": classes})
    core = core_of(spec(0), spec(1), policy=policy)
    open_breaker(core)
    assert goes_to(core, "full", 2 * S - 1) == "w1"
    assert goes_to(core, "first", 2 * S) == "w0"
    assert turn(core, fail("first", Failure.CONNECT), 2 * S) == [], "it waits for w1"
    urgent = request("urgent", 160, service="urgent")
    assert routed(arrive(core, urgent, now_ns=2 * S)).worker == "w0"
    core.step(RequestEnded("first", Ending.ABORTED), 2 * S)
    assert core.fleet.workers[0].word is WorkerWord.HALF_OPEN


def test_faults_with_answers_between_them_open_no_breaker() -> None:
    core = core_of(spec(0))
    for n in range(10):
        for each in "ab":
            routed(arrive(core, request(f"{each}{n}")))
            rejected(turn(core, fail(f"{each}{n}"))[0])
        routed(arrive(core, request(f"s{n}")))
        core.step(RequestEnded(f"s{n}", Ending.DONE), S)
    assert not core.fleet.workers[0].breaker.is_open


def test_the_first_answered_probe_after_it_was_down_ends_the_cool_down() -> None:
    core = opened()
    for second in (2, 4, 8):  # the cool-down is eight seconds then
        assert goes_to(core, f"r{second}", second * S) == "w0"
        turn(core, fail(f"r{second}"), second * S)
    comes_back(core, "w0", 9 * S)
    assert goes_to(core, "a", 9 * S) == "w1", "a probe of a worker that was up says nothing new"
    goes_down(core, "w0", 9 * S)
    comes_back(core, "w0", 9 * S)
    assert goes_to(core, "b", 9 * S) == "w0"
    assert goes_to(core, "c", 9 * S) == "w1", "one at a time all the same"
    turn(core, fail("b"), 9 * S)
    assert goes_to(core, "d", 11 * S) == "w0", "and cool-downs start small again"


# ── slow is not broken ───────────────────────────────────────────────────────────────────────────


def test_a_late_worker_is_less_preferred_by_its_lateness_and_no_more() -> None:
    core = core_of(spec(0), spec(1))
    core.step(Probed("w0", LATE, late_s=2.0), S)
    for n in range(3):
        receipt = routed(arrive(core, request(f"r{n}"))).draft.receipt()
        assert receipt.chosen == "w1"
        assert (receipt.terms["late"], receipt.filtered) == ([2.0, 0.0], {})
    waits = (EngineLoad("w1", 0, 60_000, 0),)
    core.step(Shared("other", waits), S)
    assert goes_to(core, "late", S) == "w0", "two seconds are better than seven"
    core.step(Shared("other", ()), S)
    comes_back(core, "w0")
    assert "late" not in routed(arrive(core, request("x"))).draft.receipt().terms


# ── requests at a worker that is silent ──────────────────────────────────────────────────────────


def given_up(core: RouterCore, event: Any, now_ns: int = S) -> list[str]:
    return [c.worker for c in core.step(event, now_ns) if isinstance(c, AbandonWorker)]


def test_a_request_that_went_back_to_a_silent_worker_has_the_whole_limit_again() -> None:
    """Probes of a worker that is silent go on, and are late ten times a second."""
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r")))
    other = "w1" if first.worker == "w0" else "w0"
    assert given_up(core, Probed(first.worker, SILENT)) == [first.worker]
    assert routed(turn(core, fail("r", Failure.SILENT))[0]).worker == other
    assert routed(turn(core, fail("r", Failure.CONNECT))[0]).worker == first.worker
    assert given_up(core, Probed(first.worker, LATE, late_s=0.1)) == []
    assert given_up(core, Probed(first.worker, SILENT)) == [first.worker]


@pytest.mark.parametrize(
    ("silent", "other", "can_serve_it"),
    [
        (spec(0), spec(1, pool="other"), False),
        (spec(0, role=WorkerRole.DECODE), prefiller(1), False),
        (spec(0, models=("a",)), spec(1, models=("b",)), False),
        (prefiller(0), spec(1, role=WorkerRole.DECODE), True),
        (prefiller(0), prefiller(1), True),
        (spec(0, models=("a", "b")), spec(1, models=("b",)), True),
        (spec(0, models=("a",)), spec(1), True),
    ],
)
def test_whoever_could_serve_it_is_a_reason_to_give_up(
    silent: WorkerSpec, other: WorkerSpec, *, can_serve_it: bool
) -> None:
    assert given_up(core_of(silent, other), Probed("w0", SILENT)) == ["w0"] * can_serve_it


# ── draining ─────────────────────────────────────────────────────────────────────────────────────


def test_the_policy_says_who_drains() -> None:
    core = core_of(spec(0), spec(1))
    under_way = routed(arrive(core, request("r", subset=("w0",))))
    found = core.adopt(parse({"draining": ["w0", "w2", "nobody"]}), S)
    assert found == [StateChange("w0", WorkerWord.DRAINING, "")]
    assert changes(core, Joined(spec(2))) == [("w2", "draining", "")]
    for n in range(6):
        sent = routed(arrive(core, request(f"r{n}"), answer(hbm(0, 256))))
        assert (sent.worker, sent.draft.plain.filtered) == (
            "w1",
            dict.fromkeys(["w0", "w2"], "draining"),
        )
    core.step(FirstToken(under_way.request_id), S)
    core.step(RequestEnded(under_way.request_id, Ending.DONE), S)
    goes_down(core, "w1")
    assert goes_to(core, "last", S) == "w1", "a worker that drains is no last resort"
    assert changes(core, Probed("w0", UNWELL, "status 503")) == [("w0", "draining", "status 503")]
    comes_back(core, "w0")
    assert core.adopt(RoutingPolicy(), S)[0] == StateChange("w0", WorkerWord.UP, "")
    receipt = routed(arrive(core, request("back"), answer(hbm(0, 256)))).draft.receipt()
    assert (receipt.chosen, receipt.filtered) == ("w0", {"w1": "down"})


def test_a_request_that_was_tried_and_waits_ends_with_its_last_worker() -> None:
    core = core_of(spec(0), spec(1), policy=parse({"limits": {"running_max": 1}}))
    routed(arrive(core, request("busy", subset=("w1",))))
    routed(arrive(core, request("r", subset=("w0", "w1"))))
    assert turn(core, fail("r")) == [], "it waits for the one that is full"
    [gone] = turn(core, WorkerLeft("w1"))
    assert (rejected(gone).request_id, rejected(gone).status) == ("r", 502)


def test_doubts_about_a_worker_end_when_nothing_speaks_against_it() -> None:
    """Else each request would look at it: with a thousand workers that takes milliseconds."""
    core = core_of(spec(0), spec(1))
    goes_down(core, "w0")
    core.step(Joined(spec(1, is_red=True)), S)
    assert core.fleet.doubtful == {"w0", "w1"}
    comes_back(core, "w0")
    core.step(Joined(spec(1)), S)
    assert not core.fleet.doubtful
    open_breaker(core)
    assert core.fleet.doubtful == {"w0"}
    routed(arrive(core, request("r", subset=("w0",)), now_ns=2 * S))
    core.step(FirstToken("r"), 2 * S)
    assert not core.fleet.doubtful
