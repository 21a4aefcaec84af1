"""Errors of this code at one request: that request is rejected, commands for others are kept."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    RequestEnded,
    RouteTick,
)
from kvstore.routing.policy import parse
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    core_of,
    fail,
    rejected,
    request,
    routed,
    spec,
    turn,
)

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
