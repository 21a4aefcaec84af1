"""Held requests: classes, tenants, displacement, time to live, early rejection."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    FirstToken,
    Joined,
    Rejected,
    RequestEnded,
    RequestHeld,
    Routed,
    RouteTick,
)
from kvstore.routing.policy import RoutingPolicy, parse
from tests.unit.routing.fleets import MS, S, arrive, core_of, rejected, request, routed, spec

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
        commands = core.step(FirstToken(name), now_ns)
        commands += core.step(RequestEnded(name, Ending.DONE), now_ns)
        core.check()
        order += [c.request_id for c in commands if isinstance(c, Routed)]
    return order[1:]


def test_urgent_classes_first_then_priority_then_arrival() -> None:
    core = full()
    for name, service, priority in (
        ("b1", "batch", 0),
        ("i1", "inline", 0),
        ("i2", "inline", 5),
        ("b2", "batch", 9),
    ):
        held = arrive(core, request(name, service=service, priority=priority))
        assert isinstance(held, RequestHeld)
    assert drain(core, 4) == ["i2", "i1", "b2", "b1"]


def test_a_newcomer_does_not_pass_those_that_wait() -> None:
    core = core_of(spec(0), policy=parse(ONE_AT_A_TIME))
    routed(arrive(core, request("first")))
    arrive(core, request("a"))
    core.step(Joined(spec(1)), S)  # room again, not yet noticed by the room
    held = core.step(Arrived(request("b")), S)
    assert [type(c) for c in held] in ([RequestHeld], [Routed, RequestHeld])


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
        commands = core.step(FirstToken(last), 3 * S)
        commands += core.step(RequestEnded(last, Ending.DONE), 3 * S)
        last = next(c.request_id for c in commands if isinstance(c, Routed))
        names.append(last[:4])
    assert Counter(names) == {"busy": 3, "back": 3}


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
    commands = core.step(Arrived(request("i")), S)
    core.check()
    assert [(c.request_id, type(c)) for c in commands] == [("b2", Rejected), ("i", RequestHeld)]
    assert rejected(commands[0]).reason == "evicted-priority"
    refused = rejected(arrive(core, request("b9", service="batch")))
    assert refused.reason == "rejected-saturated"
    assert drain(core, 3) == ["i", "b0", "b1"]


def test_a_held_request_expires() -> None:
    core = full(classes={"inline": {"rank": 0, "ttl_s": 2}})
    arrive(core, request("r"))
    assert core.step(RouteTick(), 2 * S) == []
    [expired] = core.step(RouteTick(), 3 * S + 1)
    assert rejected(expired).reason == "rejected-ttl-expired"
    assert "r" not in core.open


def test_tenants_and_aborted_requests_leave_nothing_behind() -> None:
    core = full()
    for n in range(5000):
        core.step(Arrived(request(f"r{n}", 16, tenant=f"t{n}")), S)
        core.step(RequestEnded(f"r{n}", Ending.ABORTED), S)
        core.room.taken(f"t{n}", 1.0, S, was_held=False)
    core.check()
    assert len(core.room._expiry) < 1100


def test_an_aborted_request_leaves_the_room() -> None:
    core = full()
    arrive(core, request("r"))
    assert core.step(RequestEnded("r", Ending.ABORTED), S) == []
    core.check()
    assert not core.room.entries


def test_an_objective_that_will_break_is_429_at_once() -> None:
    core = core_of(spec(0), policy=parse({"costs": {"prefill_tokens_per_s": 1000}}))
    answer = rejected(arrive(core, request("r", 16_000, service="inline")))
    assert (answer.status, answer.reason) == (429, "rejected-objective")
    assert answer.retry_after_s is not None
    assert answer.retry_after_s > 10
    assert not core.open
    routed(arrive(core, request("own", 16_000, service="inline", ttft_s=60.0)))


def test_others_yield_while_an_urgent_class_is_there() -> None:
    core = core_of(spec(0))
    for n in range(4):
        routed(arrive(core, request(f"r{n}", 8000)))
    routed(arrive(core, request("inline", 160, service="inline", ttft_s=60.0)))
    assert isinstance(arrive(core, request("later")), RequestHeld)
    assert core.step(RouteTick(), S + 500 * MS) == []
    sent = core.step(RouteTick(), 12 * S)  # nothing urgent came for ten seconds
    assert [c.request_id for c in sent] == ["later"]


def test_low_classes_wait_for_a_short_queue() -> None:
    core = core_of(spec(0))
    for n in range(8):
        routed(arrive(core, request(f"r{n}", 16_000)))
    held = arrive(core, request("b", service="batch"))
    assert isinstance(held, RequestHeld)
    assert held.likely_worker == "w0"
    routed(arrive(core, request("t", service="interactive")))
    assert core.gauges.saturation("p", S).cause == "queue"


def test_another_policy_keeps_those_that_wait() -> None:
    core = full()
    arrive(core, request("b", service="batch"))
    commands = core.adopt(RoutingPolicy(), 2 * S)
    core.check()
    assert [c.request_id for c in commands] == ["b"]


def test_scale_from_zero_holds_requests() -> None:
    policy = {
        "limits": {"holds_without_workers": True},
        "models": {"m": {"pools": [{"pool": "p"}]}},
    }
    core = core_of(policy=parse(policy))
    assert isinstance(arrive(core, request("r")), RequestHeld)
    assert core.desired_replicas("p", spec(0).role, S) == 1
    commands = core.step(Joined(spec(0)), 2 * S)
    core.check()
    assert [type(c) for c in commands] == [Routed]


def test_a_policy_with_less_room_answers_those_that_have_none() -> None:
    core = full()
    for n in range(3):
        arrive(core, request(f"b{n}", service="batch"))
    smaller = msgspec.structs.replace(
        core.policy, limits=msgspec.structs.replace(core.policy.limits, held_max=1)
    )
    commands = core.adopt(smaller, 2 * S)
    core.check()
    assert [rejected(c).reason for c in commands] == ["evicted-priority"] * 2
    assert len(core.room) == 1
