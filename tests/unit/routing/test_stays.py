"""Sessions stay where they were for a while after their last request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.routing import ahead as stays_module
from kvstore.routing.core import RouterCore
from kvstore.routing.decide import replay
from kvstore.routing.events import Ending, Failure, Joined, RequestEnded, Routed, WorkerLeft
from kvstore.routing.policy import RoutingPolicy, parse
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    S,
    arrive,
    comes_back,
    core_of,
    fail,
    goes_down,
    request,
    routed,
    spec,
    turn,
)

TTL_S = 300
"""Of the policy."""


def ask(core: RouterCore, name: str, now_ns: int = S, **more: Any) -> Routed:
    """A request from its arrival to its end."""
    sent = routed(arrive(core, request(name, 160, **{"session": "s", **more}), now_ns=now_ns))
    core.step(RequestEnded(name, Ending.DONE), now_ns)
    check(core)
    return sent


def sticky(workers: int = 6, policy: str = "session") -> RouterCore:
    return core_of(*(spec(n) for n in range(workers)), policy=parse({"policy": policy}))


def test_a_session_keeps_its_worker_when_others_leave_and_join() -> None:
    """Rows of others change, and with them the hashes."""
    core = sticky()
    worker = ask(core, "first").worker
    others = [name for name in core.fleet.row_of if name != worker]
    for number, name in enumerate(others):
        core.step(WorkerLeft(name), S)
        core.step(Joined(spec(10 + number)), S)
        sent = ask(core, f"r{number}")
        assert sent.worker == worker
        assert replay(sent.draft.receipt(), core.policy).chosen == worker


def test_after_a_silence_it_goes_by_its_hash_again() -> None:
    core = sticky(4)
    by_hash = ask(core, "first").worker
    goes_down(core, by_hash)
    other = ask(core, "second").worker
    comes_back(core, by_hash)
    times = [(1 + n * (TTL_S - 1)) * S for n in range(4)]
    assert {ask(core, f"r{at}", now_ns=at).worker for at in times} == {other}
    assert ask(core, "late", now_ns=times[-1] + TTL_S * S).worker == by_hash


def test_a_long_answer_is_no_silence() -> None:
    core = sticky(4)
    by_hash = ask(core, "first").worker
    goes_down(core, by_hash)
    other = routed(arrive(core, request("long", 160, session="s"))).worker
    comes_back(core, by_hash)
    core.step(RequestEnded("long", Ending.DONE), (TTL_S - 1) * S)
    assert ask(core, "next", now_ns=(TTL_S + 5) * S).worker == other


def test_a_session_comes_back_to_a_worker_that_was_only_busy() -> None:
    core = sticky(2)
    home = ask(core, "first").worker
    names = []
    for number in range(30):
        names.append(f"busy{number}")
        if routed(arrive(core, request(names[-1], 160, session="s"))).worker != home:
            break
    assert len(names) < 30
    for name in names:
        core.step(RequestEnded(name, Ending.DONE), S)
    assert ask(core, "last").worker == home


def test_a_session_leaves_a_worker_that_failed_at_it_though_its_probes_are_answered() -> None:
    core = sticky(4)
    home = ask(core, "first").worker
    routed(arrive(core, request("second", 160, session="s")))
    other = routed(turn(core, fail("second", Failure.CONNECT))[0]).worker
    core.step(RequestEnded("second", Ending.DONE), S)
    assert core.fleet.workers[core.fleet.row_of[home]].is_up
    assert ask(core, "third").worker == other != home


@pytest.mark.parametrize(
    ("second", "third"),
    [({"ends_session": True}, {}), ({"tenant": "a"}, {"tenant": "b"})],
    ids=["it ends", "of another tenant"],
)
def test_no_other_session_and_none_that_has_ended_is_remembered(
    second: dict[str, Any], third: dict[str, Any]
) -> None:
    core = sticky(4)
    home = ask(core, "first").worker
    goes_down(core, home)
    ask(core, "second", **second)
    comes_back(core, home)
    assert ask(core, "third", **third).worker == home


def sides(stable: int, canary: int) -> RoutingPolicy:
    pools = [{"pool": "stable", "weight": stable}, {"pool": "canary", "weight": canary}]
    return parse({"models": {"m": {"pools": pools}}})


def test_a_session_keeps_its_pool_when_weights_change_and_leaves_one_without() -> None:
    core = core_of(spec(0, pool="stable"), spec(1, pool="canary"), policy=sides(90, 10))
    before = {f"s{n}": ask(core, f"r{n}", session=f"s{n}").draft.plain.pool for n in range(50)}
    assert set(before.values()) == {"stable", "canary"}
    core.adopt(sides(10, 90), S)
    after = {name: ask(core, f"{name} 2", session=name).draft.plain.pool for name in before}
    assert after == before
    new = [ask(core, f"n{n}", session=f"new{n}").draft.plain.pool for n in range(50)]
    assert new.count("canary") > 30
    core.adopt(sides(1, 0), S)
    assert {ask(core, f"{name} 3", session=name).draft.plain.pool for name in before} == {"stable"}


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stays_module, "STAYS_MAX", 3)
    core = sticky(2)
    for number in range(10):
        ask(core, f"r{number}", session=f"s{number}")
    ask(core, "none", session="")
    assert len(core.stays) == 3
    kept = [core.stays.find(request("r", session=f"s{number}"), S) for number in range(10)]
    assert [found is not None for found in kept] == [False] * 7 + [True] * 3


def test_receipts_of_a_version_without_sessions_are_replayed() -> None:
    sent = ask(sticky(2), "r")
    columns = {
        name: column for name, column in sent.draft.receipt().features.items() if name != "stays"
    }
    older = msgspec.structs.replace(sent.draft.receipt(), features=columns)
    assert replay(older, parse({"policy": "session"})).chosen == sent.worker
