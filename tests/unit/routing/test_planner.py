"""Roles that change: when, which worker, and what a change leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    FirstToken,
    Joined,
    PrefillDone,
    RequestEnded,
    RouteTick,
    WorkerLeft,
)
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    arrive,
    core_of,
    fail,
    goes_down,
    request,
    routed,
    spec,
    turn,
)

ANY, PREFILL, BOTH = WorkerRole.ANY, WorkerRole.PREFILL, WorkerRole.BOTH
Roles = dict[str, WorkerRole]


def planned(*roles: WorkerRole, prefill_min: int = 1, **settings: Any) -> RouterCore:
    mapping = {"is_on": True, "pools": {"p": {"prefill_min": prefill_min}}, **settings}
    policy = parse({"planner": mapping, "split": {"is_learned": False}})
    return core_of(*(spec(n, role=role) for n, role in enumerate(roles)), policy=policy)


def roles_of(core: RouterCore) -> Roles:
    return {state.spec.worker: state.role for state in core.fleet.workers}


def prefillers(core: RouterCore) -> list[str]:
    return sorted(name for name, role in roles_of(core).items() if role is PREFILL)


class Traffic:
    """A core and the time; requests that take as long as the test says."""

    def __init__(self, core: RouterCore) -> None:
        self.core = core
        self.now_ns = S
        self.number = 0
        self.streams: list[str] = []
        self.changed_s: list[float] = []

    def go(self, seconds: float, *, prompts: bool = False, streams: bool = False) -> None:
        """`prompts`: more than prefillers can do; `streams`: too slow for their objective."""
        for _ in range(int(seconds * 10)):
            self.now_ns += 100 * MS
            before = roles_of(self.core)
            self.core.step(RouteTick(), self.now_ns)
            if before != roles_of(self.core):
                self.changed_s.append(self.now_ns / S)
            if prompts:
                self.core.step(Arrived(self._request(16_000)), self.now_ns)
            if streams:
                its = self._request(100)
                self.streams.append(its.request_id)
                routed(self.core.step(Arrived(its), self.now_ns)[0])
                self.core.step(FirstToken(its.request_id), self.now_ns)
            if streams and len(self.streams) > 30:  # 3 s for 31 tokens
                done = RequestEnded(self.streams.pop(0), Ending.DONE, None, 31)
                self.core.step(done, self.now_ns)
        check(self.core)

    def _request(self, tokens: int) -> Any:
        self.number += 1
        return request(f"r{self.number}", tokens, keys=b"")

    def calm(self) -> None:
        """All requests end."""
        self.streams.clear()
        for name in list(self.core.open):
            self.core.step(RequestEnded(name, Ending.ABORTED), self.now_ns)


def test_a_pool_gets_its_least_number_of_prefillers_and_no_other_change_without_need() -> None:
    core = planned(ANY, ANY, ANY)
    Traffic(core).go(60)
    assert prefillers(core) == ["w0"]
    assert sum(core.planner.changes.values()) == 1


def test_prompts_that_wait_take_workers_one_by_one() -> None:
    core = planned(ANY, ANY, ANY, ANY, cooldown_s=10)
    traffic = Traffic(core)
    traffic.go(60, prompts=True)
    assert prefillers(core) == ["w0", "w1", "w2"], "one is left to decode"
    gaps = [b - a for a, b in zip(traffic.changed_s, traffic.changed_s[1:], strict=False)]
    assert len(gaps) == 2
    assert min(gaps) >= 10


def test_streams_that_are_slow_get_a_worker_back() -> None:
    core = planned(ANY, ANY, ANY, ANY)
    traffic = Traffic(core)
    traffic.go(40, prompts=True)
    assert prefillers(core) == ["w0", "w1", "w2"]
    traffic.calm()
    traffic.go(60, streams=True)
    assert prefillers(core) == ["w0"], "the least number stays"


def test_a_need_that_does_not_last_changes_nothing() -> None:
    core = planned(ANY, ANY, ANY, dwell_s=3)
    traffic = Traffic(core)
    traffic.go(15)
    for _ in range(6):
        traffic.go(1, prompts=True)
        assert core.planner._pools["p"].starved is PREFILL
        traffic.calm()
        traffic.go(15)
    assert sum(core.planner.changes.values()) == 1


def test_to_and_fro_gets_rarer() -> None:
    core = planned(ANY, ANY, ANY, dwell_s=1, window_s=1, cooldown_s=5)
    traffic = Traffic(core)
    for _ in range(12):
        traffic.go(6, prompts=True)
        traffic.calm()
        traffic.go(8, streams=True)
        traffic.calm()
    assert 4 <= sum(core.planner.changes.values()) <= 12
    assert core.planner._pools["p"].doublings > 0


def test_a_cool_down_is_at_most_eight_times_as_long() -> None:
    core = planned(ANY, ANY)
    with_prefiller = core.policy
    both = {"p": {"prefill_min": 0, "decode_min": 2}}
    without = parse({"planner": {"is_on": True, "pools": both}})
    doublings = []
    for n in range(8):
        core.adopt(without if n % 2 else with_prefiller, (n + 1) * S)
        core.step(RouteTick(), (n + 1) * S)
        assert prefillers(core) == ([] if n % 2 else ["w0"])
        doublings.append(core.planner._pools["p"].doublings)
    assert doublings == [0, 1, 2, 3, 3, 3, 3, 3]


def test_requests_of_before_a_change_say_nothing_about_the_roles_after_it() -> None:
    core = planned(ANY, ANY)
    routed(arrive(core, request("before", 100), now_ns=S // 4))
    core.step(RouteTick(), S)
    assert prefillers(core) == ["w0"]
    routed(arrive(core, request("after", 100), now_ns=S + MS))
    plan = core.planner._pools["p"]
    core.step(FirstToken("before"), S + 2 * MS)
    assert plan.late_first.tolist() == [0, 0]
    core.step(FirstToken("after"), S + 3 * MS)
    assert plan.late_first.tolist() == [0, 1]


def test_requests_that_missed_an_objective_fade() -> None:
    core = planned(ANY, ANY, ttft_s=0.001, itl_s=0.001, window_s=1.0)
    core.step(RouteTick(), S)
    core.step(RouteTick(), 2 * S)
    plan = core.planner._pools["p"]
    routed(arrive(core, request("r", 100), now_ns=2 * S))
    core.step(FirstToken("r"), 2 * S + 2 * MS)
    core.step(RequestEnded("r", Ending.DONE, output_tokens=2), 2 * S + 4 * MS)
    assert plan.late_first.tolist() == plan.slow_tokens.tolist() == [1, 1]
    core.step(RouteTick(), 3 * S)
    for missed, seen in (plan.late_first, plan.slow_tokens):
        assert missed == seen < 0.5


def test_roles_that_an_operator_fixed_never_change() -> None:
    core = planned(PREFILL, WorkerRole.DECODE, BOTH, ANY)
    traffic = Traffic(core)
    traffic.go(40, prompts=True)
    traffic.calm()
    traffic.go(40, streams=True)
    fixed = list(roles_of(core).items())[:3]
    assert fixed == [("w0", PREFILL), ("w1", WorkerRole.DECODE), ("w2", BOTH)]
    assert core.planner.changes["p", PREFILL] >= 1
    with pytest.raises(AssertionError, match="operator"):
        core.fleet.assign("w0", BOTH)


def test_off_is_off() -> None:
    core = planned(ANY, ANY, is_on=False)
    traffic = Traffic(core)
    traffic.go(40, prompts=True)
    assert set(roles_of(core).values()) == {BOTH}
    core.adopt(planned(ANY).policy, traffic.now_ns)
    traffic.go(1)
    assert prefillers(core) == ["w0"]
    core.adopt(planned(ANY, is_on=False).policy, traffic.now_ns)
    traffic.calm()
    traffic.go(40, streams=True)
    assert prefillers(core) == ["w0"], "frozen as they are"


def test_no_worker_leaves_a_role_that_cannot_spare_it() -> None:
    core = planned(ANY, ANY, ANY, streams_max=10)
    traffic = Traffic(core)
    for n in range(14):  # seven at each of two; one alone would have more than it can do
        its = request(f"s{n}", 100)
        routed(core.step(Arrived(its), S)[0])
        core.step(FirstToken(its.request_id), S)
    traffic.go(40, prompts=True)
    assert prefillers(core) == ["w0"]


def test_a_change_leaves_requests_under_way_where_they_are() -> None:
    core = planned(ANY, ANY, ANY, is_on=False)
    core.fleet.assign("w0", PREFILL)
    remote = routed(arrive(core, request("a", 4096)))
    whole = routed(arrive(core, request("b", 100)))
    assert remote.prefill_worker == "w0"
    core.fleet.assign("w0", BOTH)
    core.fleet.assign(whole.worker, PREFILL)
    core.step(PrefillDone("a"), 2 * S)
    for name in "ab":
        core.step(FirstToken(name), 2 * S)
        core.step(RequestEnded(name, Ending.DONE), 3 * S)
    check(core)
    assert not core.fleet.flights
    assert {draft.plain.role for draft in core.take_drafts()} == {"both"}


def test_a_planned_prefiller_serves_when_nobody_else_can() -> None:
    core = planned(ANY, ANY, is_on=False)
    core.fleet.assign("w0", PREFILL)
    routed(arrive(core, request("a", 4096)))
    again = turn(core, fail("a", Failure.CONNECT))[0]
    assert (routed(again).worker, routed(again).prefill_worker) == ("w0", None)
    assert routed(again).draft.plain.role == "prefill"
    goes_down(core, "w1")
    sent = routed(arrive(core, request("b", 4096)))
    assert (sent.worker, "last-resort" in sent.draft.plain.degraded) == ("w0", False)
    goes_down(core, "w0")
    sent = routed(arrive(core, request("c", 4096)))
    assert "last-resort" in sent.draft.plain.degraded
    fixed = planned(PREFILL, ANY, is_on=False)
    goes_down(fixed, "w1")
    whole = routed(arrive(fixed, request("b", 4096)))
    assert (whole.worker, whole.prefill_worker) == ("w1", "w0"), "one that is down before that one"


def test_of_workers_that_are_all_down_the_one_for_whole_requests_is_tried() -> None:
    core = planned(ANY, ANY, is_on=False)
    core.fleet.assign("w0", PREFILL)
    for worker in ("w0", "w1"):
        goes_down(core, worker)
    sent = routed(arrive(core, request("r", 4096, must_be_local=True)))
    assert (sent.worker, "last-resort" in sent.draft.plain.degraded) == ("w1", True)


def test_another_number_of_prefillers_has_another_threshold() -> None:
    core = planned(ANY, ANY, ANY, cooldown_s=10)
    traffic = Traffic(core)
    traffic.go(1)
    split = core.placer.split_of("p")
    split.uncached_min = 1000.0  # learned, say
    traffic.go(8, prompts=True)
    assert core.placer.split_of("p") is split, "nothing has changed so far"
    traffic.go(20, prompts=True)
    assert prefillers(core) == ["w0", "w1"]
    assert core.placer.split_of("p").uncached_min == 256.0


def test_a_role_without_workers_is_filled_at_once() -> None:
    core = planned(ANY, ANY, ANY)
    traffic = Traffic(core)
    traffic.go(1)
    assert prefillers(core) == ["w0"]
    core.step(WorkerLeft("w1"), traffic.now_ns)
    goes_down(core, "w2", traffic.now_ns)
    traffic.go(1)
    assert roles_of(core)["w0"] is BOTH


def test_a_new_description_leaves_the_role() -> None:
    core = planned(ANY, ANY)
    Traffic(core).go(1)
    core.step(Joined(spec(0, role=ANY, models=("m",))), 3 * S)
    assert prefillers(core) == ["w0"]
    core.step(Joined(spec(0, role=WorkerRole.DECODE)), 3 * S)
    assert roles_of(core)["w0"] is WorkerRole.DECODE
    core.step(Joined(spec(0, role=ANY)), 3 * S)
    assert roles_of(core)["w0"] is BOTH
