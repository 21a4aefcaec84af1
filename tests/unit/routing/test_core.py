"""Attempts of a request: retries, budgets, other routers, readings, and errors of this code: one
request is rejected then, and commands for others are kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvstore.index.feed import Holder
from kvstore.index.index import Match
from kvstore.routing import core as core_module
from kvstore.routing.core import SLOW_NS, RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    FirstToken,
    RequestEnded,
    Routed,
    RouteTick,
    Shared,
    WorkerLeft,
)
from kvstore.routing.models import ModelMap
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole
from kvstore.wire.load import EngineLoad
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    core_of,
    explain,
    fail,
    hbm,
    rejected,
    request,
    routed,
    spec,
    turn,
)


def test_a_worker_that_was_silent_is_better_than_an_error_for_two_minutes() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r")))
    second = routed(turn(core, fail("r", Failure.SILENT))[0])
    assert second.worker != first.worker
    again = routed(turn(core, fail("r"))[0])
    assert (again.worker, again.attempt) == (first.worker, 3)
    once_more = routed(turn(core, fail("r", Failure.SILENT), SLOW_NS)[0])
    assert (once_more.worker, once_more.attempt) == (first.worker, 4)
    [last] = turn(core, fail("r", Failure.SILENT), S + SLOW_NS)
    assert (rejected(last).status, rejected(last).reason) == (502, "rejected-attempts")


def test_attempts_after_faults_of_workers_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "RETRY_SHARE", 0.0)
    core = core_of(*(spec(n) for n in range(4)))
    core._retries_left = 2.0
    statuses = []
    for n in range(4):
        routed(arrive(core, request(f"r{n}")))
        statuses.append(type(turn(core, fail(f"r{n}"))[0]))
    assert [each.__name__ for each in statuses] == ["Routed", "Routed", "Rejected", "Rejected"]
    # Nothing was computed, or the request may be the cause: these attempts are bounded otherwise.
    for failure in (f for f in Failure if f is not Failure.STATUS):
        name = f"{failure} spent"
        routed(arrive(core, request(name)))
        assert isinstance(turn(core, fail(name, failure))[0], Routed), failure


def test_the_budget_of_attempts_grows_with_requests() -> None:
    core = core_of(spec(0), spec(1))
    core._retries_left = 0.0
    for n in range(5):
        routed(arrive(core, request(f"a{n}")))
    assert isinstance(turn(core, fail("a0"))[0], Routed), "a fifth of the requests"
    rejected(turn(core, fail("a1"))[0])


def test_other_routers_count() -> None:
    core = core_of(spec(0), spec(1))
    core.step(Shared("other", (EngineLoad("w0", 0, 200_000, 30), EngineLoad("gone", 0, 1, 1))), S)
    for n in range(5):
        assert routed(arrive(core, request(f"r{n}", 160))).worker == "w1"
    assert explain(core, request("x"), None, S).features["streams"][0] == 30
    core.step(Shared("other", ()), S)
    assert explain(core, request("x"), None, S).features["queue_s"][0] == 0


def test_what_is_in_flight_is_told_to_other_routers() -> None:
    core, other = core_of(spec(0), spec(1)), core_of(spec(0), spec(1))
    assert core.loads() == ()
    worker = routed(arrive(core, request("r", 1600))).worker
    assert core.loads() == (EngineLoad(worker, 0, 1600, 0),)
    other.step(Shared("core", core.loads()), S)
    assert routed(arrive(other, request("x", 160))).worker != worker
    core.step(FirstToken("r"), S)
    assert core.loads() == (EngineLoad(worker, 0, 0, 1),)
    core.step(RequestEnded("r", Ending.DONE), S)
    assert core.loads() == ()


def test_receipts_say_what_followed() -> None:
    core = core_of(spec(0))
    arrive(core, request("r"), answer(hbm(0, 100)))
    core.step(FirstToken("r"), S + 250 * MS)
    core.step(RequestEnded("r", Ending.DONE, 1600, 40), 3 * S)
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    assert receipt.outcome.ttft_s == pytest.approx(0.25)
    assert (receipt.outcome.cached_tokens, receipt.outcome.output_tokens) == (1600, 40)
    assert receipt.outcome.end == "done"
    assert receipt.predicted_s > 0.2
    assert core.take_drafts() == []


def test_a_receipt_is_bounded() -> None:
    core = core_of(*(spec(n) for n in range(20)), policy=parse({"receipt_workers_max": 5}))
    draft = routed(arrive(core, request("r"), answer(hbm(7, 100)))).draft
    arrays = [draft.columns, draft.weights, draft.scores, *draft.terms.values()]
    assert {each.shape[-1] for each in arrays} == {5}
    whole = [each if each.base is None else each.base for each in arrays]
    assert [each.nbytes for each in whole] == [each.nbytes for each in arrays], "nor is more held"
    receipt = draft.receipt()
    assert len(receipt.workers) == len(receipt.scores) == 5
    assert receipt.chosen == "w7"
    assert "w7" in receipt.workers


def test_observed_hits_lower_a_worker_that_is_believed_too_much() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(60):
        now_ns = S + n * S
        arrive(core, request(f"r{n}", subset=("w0",)), answer(hbm(0, 200)), now_ns)
        core.step(FirstToken(f"r{n}"), now_ns + 600 * MS)
        core.step(RequestEnded(f"r{n}", Ending.DONE, 0, 1), now_ns + 700 * MS)
    receipt = explain(core, request("x"), answer(hbm(0, 200), hbm(1, 100)), 100 * S)
    assert receipt.features["hit_ratio"][0] < 0.1
    assert receipt.chosen == "w1"


def test_hits_are_learned_apart_for_what_only_another_node_has() -> None:
    core = core_of(spec(0), spec(1))
    near, far = Match(Holder("n0"), 0, 100), Match(Holder("n1"), 0, 200)

    def served(name: str, cached_tokens: int) -> list[float]:
        for n in range(150):
            now_ns = S + n * S
            its = request(f"{name}{n}", 6400, prefix=name, subset=("w0",))
            arrive(core, its, answer(near, far), now_ns)
            core.step(FirstToken(its.request_id), now_ns + 600 * MS)
            done = RequestEnded(its.request_id, Ending.DONE, cached_tokens, 1)
            core.step(done, now_ns + 700 * MS)
            core.tree.forget("w0")
        features = explain(core, request("x"), None, 900 * S).features
        return [round(features[ratio][0], 2) for ratio in ("hit_ratio", "fetch_ratio")]

    # Its own dram has 1,600 tokens, that of another node 1,600 more.
    assert served("a", 1600) == [1, 0]
    assert served("b", 2400) == [1, 0.5]
    assert served("c", 400) == [0.25, 0]
    check(core)


def test_explain_changes_nothing() -> None:
    core = core_of(spec(0), spec(1))
    its = request("r")
    before = explain(core, its, None, S)
    assert explain(core, its, None, S) == before
    assert not core.open
    assert not core.fleet.flights
    assert routed(arrive(core, its)).draft.receipt() == before
    core.adopt(parse({"draining": ["w0", "w1"]}), S)
    refused = explain(core, request("x"), None, S)
    assert (refused.outcome.rejected, refused.chosen) == ("rejected-no-endpoints", "")
    assert (len(core.take_drafts()), len(core.open)) == (0, 1), "nor is it kept"


def test_replicas_follow_work_and_queue() -> None:
    policy = parse({"learning": {"is_frozen": True}})
    core = core_of(*(spec(n) for n in range(4)), policy=policy)
    assert core.desired_replicas("p", WorkerRole.BOTH, S) == 1
    for n in range(120):
        now_ns = S + n * 250 * MS
        core.step(Arrived(request(f"r{n}", 8000)), now_ns)
        core.step(FirstToken(f"r{n}"), now_ns + 10 * MS)
        core.step(RequestEnded(f"r{n}", Ending.DONE), now_ns + 20 * MS)
    # A second of prefill four times a second keeps four busy: five at 80 %.
    assert core.desired_replicas("p", WorkerRole.BOTH, 31 * S) in (3, 4, 5, 6)
    for n in range(60):
        core.step(Arrived(request(f"q{n}", 30_000)), 31 * S)
    assert core.gauges.saturation("p", 31 * S).value == 1
    assert core.desired_replicas("p", WorkerRole.BOTH, 31 * S) >= 5


def test_a_thousand_workers_that_join_are_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of them, the router would stand still for seconds."""
    made = Counter[str]()

    class CountedMap(ModelMap):
        def __init__(self, *given: Any) -> None:
            made["maps"] += 1
            super().__init__(*given)

    monkeypatch.setattr(core_module, "ModelMap", CountedMap)
    core = core_of(*(spec(number) for number in range(1000)))
    first = routed(arrive(core, request("r")))
    core.step(WorkerLeft(first.worker), S)
    assert routed(arrive(core, request("s"))).worker != first.worker
    assert made["maps"] == 2


# ── errors of this code at one request ───────────────────────────────────────────────────────────


ONE = {
    "limits": {"running_max": 1, "held_max": 1000},
    "classes": {"inline": {"rank": 0, "ttl_s": 100.0}, "batch": {"rank": 3, "ttl_s": 1.0}},
    "default_class": "inline",
}
HARMFUL: list[dict[str, Any]] = [{"session": "\udcff"}, {"prompt_tokens": 10**400}]
"""None of them gets past `front.intake`: here they are errors that nobody thought of."""


def busy(**limits: int) -> RouterCore:
    """A worker that takes one request at a time, and has one."""
    core = core_of(spec(0), policy=parse(ONE | {"limits": {**ONE["limits"], **limits}}))  # type: ignore[dict-item]
    routed(arrive(core, request("first")))
    return core


@pytest.mark.parametrize("harm", HARMFUL, ids=range(len(HARMFUL)))
def test_a_held_request_that_cannot_be_placed_is_rejected_alone(harm: dict[str, Any]) -> None:
    core = busy()
    for name in ("before", "bad", "after"):
        more = harm if name == "bad" else {}
        assert arrive(core, request(name, **more)) is None
    before, bad = turn(core, RequestEnded("first", Ending.DONE), 2 * S)
    assert routed(before).request_id == "before"
    assert (bad.request_id, rejected(bad).status) == ("bad", 500)
    assert rejected(bad).reason == "rejected-fault"
    assert "Traceback" in rejected(bad).fault
    [after] = turn(core, RequestEnded("before", Ending.DONE), 3 * S)
    assert routed(after).request_id == "after"
    check(core)
    assert core.open.keys() == {"after"}


@pytest.mark.parametrize("harm", HARMFUL, ids=range(len(HARMFUL)))
def test_a_new_request_that_cannot_be_placed_takes_no_commands_along(harm: dict[str, Any]) -> None:
    core = busy()
    assert arrive(core, request("late", service="batch")) is None
    expired, bad = turn(core, Arrived(request("bad", **harm)), 3 * S)
    assert (expired.request_id, rejected(expired).status) == ("late", 503)
    assert (bad.request_id, rejected(bad).status) == ("bad", 500)
    check(core)
    assert core.open.keys() == {"first"}


def test_an_error_at_a_second_attempt_is_the_end_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_of(spec(0), spec(1))
    routed(arrive(core, request("r")))
    monkeypatch.setattr(core.placer, "place", lambda *_: 1 // 0)
    [bad] = turn(core, fail("r"))
    assert rejected(bad).status == 500
    check(core)
    assert not core.open
    assert not core.fleet.flights


def test_an_error_while_a_request_is_sent_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = busy()
    assert arrive(core, request("bad")) is None
    with monkeypatch.context() as patched:
        patched.setattr(core.races, "late_after_s", lambda *_: 1 // 0)  # the last step of all
        [bad] = turn(core, RequestEnded("first", Ending.DONE), 2 * S)
    assert rejected(bad).status == 500
    check(core)
    assert not core.open
    assert not core.fleet.flights
    routed(arrive(core, request("next"), now_ns=3 * S))


def test_nobody_is_displaced_for_a_request_that_fails() -> None:
    core = busy(held_max=2)
    for name, service in (("one", "inline"), ("last", "batch")):
        assert arrive(core, request(name, service=service)) is None
    # It has to queue up, and is judged for what its node could bring meanwhile.
    bad = arrive(core, request("bad", session="\udcff"), answer())
    assert rejected(bad).status == 500
    assert core.open.keys() == {"first", "one", "last"}


def test_a_request_ends_whatever_its_numbers_are() -> None:
    core = core_of(spec(0))
    routed(arrive(core, request("r"), answer()))
    with pytest.raises(OverflowError):
        core.step(RequestEnded("r", Ending.DONE, 10**400), 2 * S)
    check(core)
    assert not core.open
    assert core.step(RouteTick(), 2 * S + MS) == []


def test_the_size_of_the_tree_is_that_of_the_policy_in_effect() -> None:
    core = core_of(spec(0, node="", engine=""))
    for n, blocks in enumerate((1000, 10), 1):
        core.adopt(parse({"tree_blocks_max": blocks}), n * S)
        routed(arrive(core, request(f"r{n}", 1600 * n), now_ns=n * S))
        assert 0 < len(core.tree) <= blocks
