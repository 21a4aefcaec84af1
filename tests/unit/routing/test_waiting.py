"""Held requests: classes, tenants, displacement, time to live, early rejection and its receipts."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec
import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    FirstToken,
    Joined,
    RequestEnded,
    Routed,
    RouteTick,
)
from kvstore.routing.policy import PolicyName, parse
from kvstore.routing.receipts import Receipt
from kvstore.routing.values import RouteRequest, WorkerRole
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    arrive,
    core_of,
    explain,
    fail,
    rejected,
    request,
    routed,
    spec,
    turn,
)

ONE_AT_A_TIME = {
    "limits": {"queue_max": 1},
    "classes": {
        "inline": {"rank": 0, "queue_max": 100},
        "batch": {"rank": 3, "queue_max": 4},
    },
    "default_class": "inline",
}


def full(**more: object) -> RouterCore:
    """A worker that takes one request at a time, and has one."""
    core = core_of(spec(0), policy=parse({**ONE_AT_A_TIME, **more}))
    routed(arrive(core, request("first")))
    return core


def drain(core: RouterCore, count: int, now_ns: int = 2 * S) -> list[str]:
    """Requests in the order in which they are routed, each of them done at once."""
    order = ["first"]
    while len(order) <= count:
        now_ns += 10 * MS
        name = order[-1]
        commands = turn(core, FirstToken(name), now_ns)
        commands += turn(core, RequestEnded(name, Ending.DONE), now_ns)
        order += [c.request_id for c in commands if isinstance(c, Routed)]
    return order[1:]


def test_urgent_classes_first_then_priority_then_arrival() -> None:
    core = full()
    for name, service, priority in (
        ("b1", "batch", 0),
        ("i1", "inline", 0),
        ("i2", "inline", -5),
        ("i3", "inline", 5),
        ("i4", "inline", 0),
        ("b2", "batch", -9),
    ):
        assert arrive(core, request(name, service=service, priority=priority)) is None
    # The lower number is the more urgent one, as in vLLM.
    assert drain(core, 6) == ["i2", "i1", "i4", "i3", "b2", "b1"]


def test_a_newcomer_does_not_pass_those_that_wait() -> None:
    core = core_of(spec(0), policy=parse(ONE_AT_A_TIME))
    routed(arrive(core, request("first")))
    assert arrive(core, request("a")) is None
    core.fleet.ended(next(iter(core.fleet.flights)), S)  # the room has not noticed it yet
    assert arrive(core, request("b"), now_ns=2 * S) is None
    [first] = turn(core, RouteTick(), 2 * S)
    assert routed(first).request_id == "a"
    assert core.room.entries.keys() == {"b"}


def test_tenants_share_by_uncached_tokens_not_by_requests() -> None:
    core = full(tenants={"big": 1.0, "small": 1.0, "paid": 2.0})
    for n in range(60):
        arrive(core, request(f"big{n}", 8000, tenant="big"))
        arrive(core, request(f"small{n}", 800, tenant="small"))
    order = drain(core, 44)
    counts = Counter(name.rstrip("0123456789") for name in order)
    assert counts["small"] >= 8 * counts["big"]
    assert counts["big"] >= 3


def test_a_share_is_a_weight() -> None:
    core = full(tenants={"paid": 3.0})
    for n in range(40):
        arrive(core, request(f"paid{n}", tenant="paid"))
        arrive(core, request(f"free{n}", tenant="free"))
    counts = Counter(name[:4] for name in drain(core, 40))
    assert counts["paid"] == pytest.approx(30, abs=2)


def test_a_pause_saves_up_nothing() -> None:
    core = full()
    for n in range(10):
        arrive(core, request(f"busy{n}", tenant="busy"))
    order = drain(core, 5)
    for n in range(10):
        arrive(core, request(f"back{n}", tenant="back"), now_ns=3 * S)
    last = order[-1]
    names = []
    for _ in range(6):
        commands = turn(core, FirstToken(last), 3 * S)
        commands += turn(core, RequestEnded(last, Ending.DONE), 3 * S)
        last = next(c.request_id for c in commands if isinstance(c, Routed))
        names.append(last[:4])
    assert Counter(names) == {"busy": 3, "back": 3}


def test_what_a_tenant_owes_is_remembered_over_a_pause() -> None:
    core = full()
    core.room.taken("greedy", 100_000.0, S, was_held=False)
    for n in range(2):  # meanwhile the others had little
        arrive(core, request(f"modest{n}", tenant="modest"))
        arrive(core, request(f"greedy{n}", tenant="greedy"))
    assert drain(core, 4) == ["modest0", "modest1", "greedy0", "greedy1"]


def test_a_tenant_does_not_wait_for_a_worker_that_only_another_one_needs() -> None:
    core = core_of(spec(0), spec(1), policy=parse(ONE_AT_A_TIME))
    for n in range(2):
        routed(arrive(core, request(f"busy{n}", subset=(f"w{n}",))))
    assert arrive(core, request("first", tenant="a", subset=("w0",))) is None
    assert arrive(core, request("second", tenant="b", subset=("w1",))) is None
    [sent] = turn(core, RequestEnded("busy1", Ending.DONE))
    assert routed(sent).request_id == "second"
    assert core.room.entries.keys() == {"first"}


def test_a_full_class_is_429_with_a_time_to_come_back() -> None:
    core = full()
    for n in range(4):
        arrive(core, request(f"b{n}", service="batch"))
    answer = rejected(arrive(core, request("b5", service="batch")))
    assert (answer.status, answer.reason) == (429, "rejected-saturated")
    assert answer.retry_after_s is not None
    assert 1 <= answer.retry_after_s <= 60


def test_the_time_to_come_back_is_of_the_drain_rate() -> None:
    core = full(classes={"inline": {"rank": 0, "queue_max": 50, "ttl_s": 600}})
    for n in range(50):
        arrive(core, request(f"r{n}"))
    drain(core, 20, now_ns=2 * S)  # 100 a second
    for n in range(20):
        arrive(core, request(f"m{n}"), now_ns=2 * S + 200 * MS)
    fast = rejected(arrive(core, request("x"), now_ns=2 * S + 200 * MS)).retry_after_s
    slow = rejected(arrive(core, request("y"), now_ns=62 * S)).retry_after_s
    assert fast == 1
    assert slow == 60


def test_a_full_room_displaces_the_newest_of_the_lowest_class() -> None:
    core = full(limits={"queue_max": 1, "held_max": 3})
    for n in range(3):
        arrive(core, request(f"b{n}", service="batch"))
    [evicted] = turn(core, Arrived(request("i")))
    assert (rejected(evicted).request_id, rejected(evicted).reason) == ("b2", "evicted-priority")
    assert core.room.entries.keys() == {"b0", "b1", "i"}
    refused = rejected(arrive(core, request("b9", service="batch")))
    assert refused.reason == "rejected-saturated"
    assert drain(core, 3) == ["i", "b0", "b1"]


def test_the_default_class_waits_without_end_and_without_a_bound() -> None:
    core = core_of(spec(0), policy=parse({"limits": {"queue_max": 1}}))
    routed(arrive(core, request("first")))
    for n in range(200):
        core.step(Arrived(request(f"r{n}", 16)), S)
    assert len(core.room.entries) == 200
    assert turn(core, RouteTick(), 86_400 * S) == []
    [sent] = turn(core, RequestEnded("first", Ending.DONE), 86_400 * S)
    assert routed(sent).request_id == "r0"


def test_those_that_expire_are_found_among_those_that_never_do() -> None:
    classes = {"inline": {"rank": 0}, "batch": {"rank": 3, "ttl_s": 2}}
    core = full(classes=classes)
    for n in range(1500):
        core.step(Arrived(request(f"r{n}", 16, service="batch")), S)
        if n % 1000:
            core.step(RequestEnded(f"r{n}", Ending.ABORTED), S)
        if n % 100 == 0:
            core.step(Arrived(request(f"i{n}", 16)), S)
    assert len(core.room._expiry) == 2
    expired = turn(core, RouteTick(), 3 * S)
    assert {rejected(each).request_id for each in expired} == {"r0", "r1000"}
    assert len(core.room.entries) == 15


def test_tenants_and_aborted_requests_leave_nothing_behind_one_that_waits_on() -> None:
    core = full()
    core.step(Arrived(request("waits", 16, priority=-1)), S)
    for n in range(2000):
        for tenant in ("", f"t{n}"):
            core.step(Arrived(request(f"r{n}", 16, tenant=tenant)), S)
            core.step(RequestEnded(f"r{n}", Ending.ABORTED), S)
        core.room.taken(f"t{n}", 1.0, S, was_held=False)
    check(core)
    assert core.room.entries.keys() == {"waits"}
    assert sum(map(len, core.room._queues.values())) == 1
    assert not core.room._expiry


def test_scale_from_zero_holds_requests() -> None:
    policy = {
        "limits": {"holds_without_workers": True},
        "models": {"m": {"pools": [{"pool": "p"}]}},
    }
    core = core_of(policy=parse(policy))
    assert arrive(core, request("r")) is None
    assert core.desired_replicas("p", spec(0).role, S) == 1
    [sent] = turn(core, Joined(spec(0)), 2 * S)
    assert routed(sent).request_id == "r"


def test_nobody_waits_for_workers_where_a_planned_prefiller_is() -> None:
    policy = {"limits": {"holds_without_workers": True}}
    core = core_of(spec(0, role=WorkerRole.ANY), policy=parse(policy))
    core.fleet.assign("w0", WorkerRole.PREFILL)
    assert routed(arrive(core, request("r"))).worker == "w0"
    [ended] = turn(core, fail("r"))
    assert rejected(ended).reason == "rejected-attempts"
    assert not core.room.entries, "it would be in the way of all others"


def test_a_policy_with_less_room_answers_those_that_have_none() -> None:
    core = full()
    for n in range(3):
        arrive(core, request(f"b{n}", service="batch"))
    smaller = msgspec.structs.replace(
        core.policy, limits=msgspec.structs.replace(core.policy.limits, held_max=1)
    )
    commands = core.adopt(smaller, 2 * S)
    check(core)
    assert [rejected(c).reason for c in commands] == ["evicted-priority"] * 2
    assert len(core.room.entries) == 1


# ── receipts of requests that the core rejects, and dry runs of them ─────────────────────────────


CLASSES = {"inline": {"rank": 0, "ttft_s": 1.0, "tenants": ["*"]}, "interactive": {"rank": 1}}
SLOW = parse({"costs": {"prefill_tokens_per_s": 1000}, "classes": CLASSES, "draining": ["w1"]})
"""16,000 tokens take 20 s, far more than an inline request may."""


def only_receipt(core: RouterCore) -> Receipt:
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    assert msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt) == receipt
    return receipt


def too_long(name: str) -> RouteRequest:
    return request(name, 16_000, service="inline")


def test_an_objective_that_cannot_be_met_leaves_a_receipt_with_both_times() -> None:
    core = core_of(spec(0), spec(1), policy=SLOW)
    answer = rejected(arrive(core, too_long("r")))
    assert (answer.status, answer.reason) == (429, "rejected-objective")
    assert (answer.retry_after_s or 0) > 10
    assert not core.open
    receipt = only_receipt(core)
    assert (receipt.request_id, receipt.chosen, receipt.role) == ("r", "", "")
    assert (receipt.outcome.rejected, receipt.outcome.attempts) == ("rejected-objective", 0)
    assert receipt.predicted_s == answer.predicted_s == pytest.approx(20, rel=0.1)
    assert receipt.objective_s == answer.objective_s == SLOW.classes["inline"].ttft_s
    assert (receipt.workers, receipt.filtered) == (("w0", "w1"), {"w1": "draining"})
    assert receipt.scores[0] > 15, "what it would have cost"
    routed(arrive(core, request("own", 16_000)))  # the default class has no objective


def test_workers_that_are_left_out_are_in_the_receipt_with_the_reason() -> None:
    policy = parse({"draining": ["w1"]})
    core = core_of(spec(0, models=("other",)), spec(1), spec(2), policy=policy)
    assert rejected(arrive(core, request("r", subset=("w0", "w1")))).status == 503
    receipt = only_receipt(core)
    assert receipt.outcome.rejected == "rejected-no-endpoints"
    assert receipt.filtered == {"w0": "model", "w1": "draining", "w2": "subset"}


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_pool_without_workers_leaves_a_receipt_too(policy: str) -> None:
    core = core_of(policy=parse({"policy": policy, "models": {"m": {}}}))
    assert rejected(arrive(core, request("r"))).status == 503
    receipt = only_receipt(core)
    assert (receipt.workers, receipt.pool) == ((), "m")
    assert receipt.outcome.rejected == "rejected-no-endpoints"


def test_requests_that_waited_in_vain_leave_a_receipt_with_the_time() -> None:
    limits = {"queue_max": 1, "running_max": 1}
    classes = {"short": {"rank": 2, "ttl_s": 2}, "interactive": {"rank": 1}}
    core = core_of(spec(0), policy=parse({"limits": limits, "classes": classes}))
    routed(arrive(core, request("first")))
    assert arrive(core, request("r", service="short")) is None
    [over] = turn(core, RouteTick(), 4 * S)
    assert rejected(over).reason == "rejected-ttl-expired"
    receipt = only_receipt(core)
    assert (receipt.outcome.rejected, receipt.held_s) == ("rejected-ttl-expired", 3.0)
    assert receipt.filtered == {"w0": "queue"}


@pytest.mark.parametrize(
    "more", [{"limits": {"held_max": 1}}, {"classes": {"interactive": {"rank": 1, "queue_max": 1}}}]
)
def test_a_full_queue_rejects_and_a_dry_run_says_so(more: dict[str, dict[str, object]]) -> None:
    limits = {"queue_max": 1, "running_max": 1, **more.get("limits", {})}
    core = core_of(spec(0), policy=parse({**more, "limits": limits}))
    routed(arrive(core, request("first")))
    with pytest.raises(LookupError, match="wait"):
        explain(core, request("x"), None, S)
    assert arrive(core, request("held")) is None
    assert explain(core, request("x"), None, S).outcome.rejected == "rejected-saturated"
    assert rejected(arrive(core, request("r"))).reason == "rejected-saturated"
    assert only_receipt(core).outcome.rejected == "rejected-saturated"


def test_a_request_that_every_attempt_failed_has_one_receipt_with_its_last_worker() -> None:
    core = core_of(spec(0))
    routed(arrive(core, request("r")))
    turn(core, fail("r"))
    receipt = only_receipt(core)
    assert (receipt.chosen, receipt.outcome.rejected) == ("w0", "rejected-attempts")
    assert receipt.outcome.attempts == 1
