"""Classes of service: who may name them, who yields to whom, and what holds a request back."""

from __future__ import annotations

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import FirstToken, RouteTick, Shared
from kvstore.routing.policy import PolicyLimits, RoutingPolicy, parse
from kvstore.routing.pressure import saturation
from kvstore.wire.load import EngineLoad
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    columns,
    core_of,
    hbm,
    rejected,
    request,
    routed,
    spec,
    turn,
)

CLASSES = {
    "inline": {"rank": 0, "ttft_s": 60.0, "tenants": ["ops"]},
    "open": {"rank": 0, "tenants": ["*"]},
    "closed": {"rank": 0},
    "interactive": {"rank": 1, "yield_s": 0.2},
    "other": {"rank": 1},
    "batch": {"rank": 3, "backlog_s": 1.0, "saturation_max": 0.8},
}
POLICY = parse({"classes": CLASSES})


NAMED = [
    ("inline", "ops", "inline"),
    ("inline", "", "interactive"),
    ("inline", "some", "interactive"),
    ("open", "", "open"),
    ("open", "some", "open"),
    ("closed", "ops", "interactive"),
    ("closed", "*", "interactive"),
    ("other", "", "other"),
    ("batch", "some", "batch"),
    ("unknown", "ops", "interactive"),
    ("", "ops", "interactive"),
]


@pytest.mark.parametrize(("named", "tenant", "gets"), NAMED)
def test_a_class_more_urgent_than_the_default_is_for_tenants_that_it_names(
    named: str, tenant: str, gets: str
) -> None:
    core = core_of(spec(0), policy=POLICY)
    sent = routed(arrive(core, request("r", service=named, tenant=tenant)))
    assert sent.draft.plain.service == gets


def test_without_a_policy_nobody_names_an_urgent_class_and_the_default_has_no_bounds() -> None:
    core = core_of(spec(0))
    assert routed(arrive(core, request("r", service="inline"))).draft.plain.service == "interactive"
    default = RoutingPolicy().classes["interactive"]
    bounds = (default.ttl_s, default.queue_max, default.backlog_s, default.saturation_max)
    assert bounds == (None, None, None, None)


def busy(tokens: int = 8000) -> RouterCore:
    """One worker with several seconds of prefill ahead."""
    core = core_of(spec(0), policy=POLICY)
    for n in range(4):
        routed(arrive(core, request(f"r{n}", tokens)))
    return core


def test_others_yield_while_an_urgent_class_is_there() -> None:
    core = busy()
    routed(arrive(core, request("urgent", 160, service="inline", tenant="ops")))
    assert arrive(core, request("later")) is None
    assert turn(core, RouteTick(), S + 500 * MS) == []
    [sent] = turn(core, RouteTick(), 12 * S)  # nothing urgent was sent for ten seconds
    assert routed(sent).request_id == "later"


def test_nobody_yields_to_a_request_that_was_not_sent() -> None:
    core = busy()
    too_long = request("urgent", 1_000_000, service="inline", tenant="ops")
    assert rejected(arrive(core, too_long)).reason == "rejected-objective"
    routed(arrive(core, request("a")))
    core.adopt(parse({"classes": CLASSES, "limits": {"queue_max": 1}}), S)
    assert arrive(core, request("held", service="inline", tenant="ops")) is None
    core.adopt(POLICY, S)  # only now it is sent, and others begin to yield
    assert arrive(core, request("b")) is None


def test_nobody_yields_in_another_pool() -> None:
    specs = [spec(n, pool=f"p{n}", models=(f"m{n}",)) for n in range(2)]
    core = core_of(*specs, policy=POLICY)
    for n in range(4):
        routed(arrive(core, request(f"r{n}", 8000, model="m0")))
    routed(arrive(core, request("urgent", 160, model="m1", service="inline", tenant="ops")))
    assert routed(arrive(core, request("a", model="m0"))).worker == "w0"


def test_low_classes_wait_for_a_short_queue() -> None:
    core = busy(16_000)
    assert arrive(core, request("b", service="batch")) is None
    assert core.open["b"].likely_worker == "w0"
    routed(arrive(core, request("t", service="interactive")))
    assert core.gauges.saturation("p", S).cause == "queue"


@pytest.mark.parametrize("bound", [{"backlog_s": 0.05}, {"saturation_max": 0.1}])
def test_a_worker_without_any_request_is_taken_before_one_is_held(bound: dict[str, float]) -> None:
    classes = {"batch": {"rank": 3, **bound}, "interactive": {"rank": 1}}
    core = core_of(spec(0), spec(1), policy=parse({"classes": classes}))
    likes_w0 = answer(hbm(0, 1000))

    def ask(name: str) -> str | None:
        sent = arrive(core, request(name, 16_000, prefix="x", service="batch"), likes_w0)
        return None if sent is None else routed(sent).worker

    assert ask("a") == "w0"
    routed(arrive(core, request("ahead", 4000, subset=("w0",))))
    sent = routed(arrive(core, request("plain", 16_000, prefix="x"), likes_w0))
    assert sent.worker == "w0", "the cheapest all the same"
    assert ask("b") == "w1"
    assert ask("c") is None, "now both have something to do"


def test_a_class_that_does_not_yield_keeps_its_own_bound_beside_urgent_ones() -> None:
    core = busy()
    assert POLICY.classes["batch"].yield_s is None
    routed(arrive(core, request("urgent", 160, service="inline", tenant="ops")))
    assert arrive(core, request("b", 160, service="batch")) is None
    core.adopt(parse({"classes": {**CLASSES, "batch": {"rank": 3, "yield_s": 0.1}}}), S)
    assert core.open.keys() >= {"b"}
    assert core.room.entries.keys() == {"b"}, "the shorter of both counts"


def test_an_idle_worker_that_may_not_take_a_request_is_not_taken() -> None:
    core = core_of(spec(0), spec(1, models=("other",)), policy=POLICY)
    for n in range(4):
        routed(arrive(core, request(f"r{n}", 8000)))
    assert arrive(core, request("b", service="batch")) is None


def test_requests_of_other_routers_keep_a_worker_from_being_idle() -> None:
    core = core_of(spec(0), spec(1), policy=POLICY)
    core.step(Shared("other", (EngineLoad("w0", 0, 16_000, 0), EngineLoad("w1", 0, 0, 1))), S)
    for n in range(4):
        routed(arrive(core, request(f"r{n}", 8000, subset=("w1",))))
    assert arrive(core, request("b", service="batch")) is None


@pytest.mark.parametrize(("bound", "is_held"), [(0.5, False), (0.49, True)])
def test_a_pool_may_be_as_saturated_as_the_bound_says(bound: float, *, is_held: bool) -> None:
    """Both workers have half of what they may, so that neither is idle."""
    policy = parse(
        {
            "limits": {"running_max": 2},
            "classes": {"bounded": {"rank": 3, "saturation_max": bound}, "other": {"rank": 1}},
            "default_class": "other",
        }
    )
    core = core_of(spec(0), spec(1), policy=policy)
    for n in range(2):
        routed(arrive(core, request(f"r{n}", 16, subset=(f"w{n}",))))
        core.step(FirstToken(f"r{n}"), S)
    assert core.gauges.saturation("p", S).value == 0.5
    assert (arrive(core, request("b", 16, service="bounded")) is None) == is_held


# ── saturation ───────────────────────────────────────────────────────────────────────────────────


def test_a_worker_counts_as_one_however_long_its_queue() -> None:
    found = saturation(columns(queue_s=[1000.0, 0.0, 0.0, 1.0]), PolicyLimits())
    assert found.value == pytest.approx(0.375)
    assert found.cause == "queue"
    core = core_of(*(spec(n) for n in range(4)), policy=POLICY)
    core.step(Shared("other", (EngineLoad("w0", 0, 4_000_000, 50),)), S)
    assert core.gauges.saturation("p", S).value == pytest.approx(0.25)
    routed(arrive(core, request("b", service="batch")))


def test_the_cause_is_what_fills_most_workers() -> None:
    """One with a long queue says less than two that have as many requests as they may."""
    limits = PolicyLimits(running_max=10)
    found = saturation(columns(queue_s=[1000.0, 0, 0], streams=[0, 10, 10]), limits)
    assert (found.value, found.cause) == (1.0, "running")


def test_limits_that_are_off_fill_nothing() -> None:
    many = columns(queued=[1e6], streams=[1e6])
    assert saturation(many, PolicyLimits()).value == 0
    assert saturation(many, PolicyLimits(queue_max=1)).cause == "queue"
    assert saturation(many, PolicyLimits(running_max=1)).cause == "running"
    assert saturation(columns(memory=[0.475, 0]), PolicyLimits()).value == pytest.approx(0.25)
    assert saturation(many[:, :0], PolicyLimits()).cause == "no-workers"
