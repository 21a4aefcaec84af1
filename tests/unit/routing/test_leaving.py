"""Workers whose pods terminate, and workers that leave.

Requests end where a pod terminates, and new ones go there as the last resort only.
"""

from __future__ import annotations

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Ending,
    FirstToken,
    Joined,
    RequestEnded,
    Routed,
)
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerWord
from tests.unit.routing.fleets import (
    S,
    answer,
    arrive,
    core_of,
    fail,
    goes_down,
    hbm,
    request,
    routed,
    spec,
    turn,
)

ALL = answer(hbm(0, 256))
"""The prompt is in the KV cache of w0."""


def terminates(core: RouterCore, number: int) -> None:
    turn(core, Joined(spec(number, is_terminating=True)))


def goes(core: RouterCore, name: str) -> Routed:
    return routed(arrive(core, request(name), ALL))


@pytest.mark.parametrize("policy", ["cost", "least-load", "session", "round-robin"])
def test_it_gets_nothing_while_another_worker_is_there(policy: str) -> None:
    core = core_of(spec(0), spec(1), policy=parse({"policy": policy}))
    terminates(core, 0)
    assert core.fleet.workers[0].word is WorkerWord.DRAINING
    for n in range(6):
        sent = goes(core, f"r{n}")
        assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": "terminating"})
        assert sent.fallbacks == ()


def test_its_requests_end_there() -> None:
    core = core_of(spec(0), spec(1))
    assert goes(core, "a").worker == "w0"
    terminates(core, 0)
    assert core.fleet.in_flight("w0") == 1
    turn(core, FirstToken("a"))
    turn(core, RequestEnded("a", Ending.DONE, output_tokens=3))
    assert core.fleet.in_flight("w0") == 0
    turn(core, Joined(spec(0)))
    assert goes(core, "b").worker == "w0", "another pod of its name"


def test_conversations_move() -> None:
    core = core_of(spec(0), spec(1), policy=parse({"policy": "session"}))
    home = routed(arrive(core, request("a", session="s"))).worker
    number = int(home[1:])
    terminates(core, number)
    other = routed(arrive(core, request("b", session="s"))).worker
    assert other != home
    for name in "ab":
        turn(core, RequestEnded(name, Ending.DONE))
    turn(core, Joined(spec(number)))
    assert routed(arrive(core, request("c", session="s"))).worker == other, "and stay"


def test_it_is_the_last_resort_before_one_that_is_down() -> None:
    core = core_of(spec(0), spec(1))
    terminates(core, 0)
    for n in range(3):
        assert goes(core, f"a{n}").worker == "w1"
    for n in range(3):
        core.step(fail(f"a{n}"), S)
    assert core.fleet.workers[1].breaker.is_open
    assert goes(core, "b").worker == "w1", "which is there, and has one more try"
    goes_down(core, "w1")
    sent = goes(core, "c")
    assert (sent.worker, sent.draft.plain.degraded) == ("w0", ("last-resort",))
    goes_down(core, "w0")
    assert core.fleet.workers[0].word is WorkerWord.DOWN
    assert goes(core, "d").worker in ("w0", "w1"), "nothing is worse than an error"


def test_what_the_policy_drains_gets_nothing_all_the_same() -> None:
    core = core_of(spec(0), policy=parse({"draining": ["w0"]}))
    terminates(core, 0)
    assert arrive(core, request("a")).reason == "rejected-no-endpoints"  # type: ignore[union-attr]
