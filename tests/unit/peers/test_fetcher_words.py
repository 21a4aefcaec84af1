"""When a fetching node asks who is there."""

from __future__ import annotations

from typing import Any, cast

from kvstore.client.index import Members
from kvstore.index.feed import Trust
from kvstore.node.node import MonotonicClock
from kvstore.peers.fetcher import MEMBERS_EVERY_S, Fetcher
from kvstore.peers.peer_session import PeerContext
from kvstore.peers.pushes import Stages
from kvstore.types import Incarnation
from kvstore.units import NS_PER_S
from kvstore.wire.peers import PeerHello
from tests.sim.world.loop import SimLoop


def test_fetchers_do_not_ask_who_is_there_in_step() -> None:
    now_ns = 0
    loop = SimLoop(lambda: now_ns)
    asked_ns: list[int] = []

    class Index:
        def nodes(self, *, timeout_s: float | None = None) -> Members:
            asked_ns.append(now_ns)
            return Members(Trust.EXACT, [])

    jitters = iter([0.0, 0.25, 0.75, 0.5])
    nothing: Any = None
    clock = MonotonicClock()
    who = PeerHello("n1", Incarnation(1))
    context = PeerContext(nothing, who, nothing, nothing, clock, None, Stages((), clock, slow_s=1))
    fetcher = Fetcher(context, jitter=lambda: next(jitters))
    fetcher.index = cast("Any", Index())
    loop.call_soon(fetcher.start)
    step_ns = int(MEMBERS_EVERY_S * NS_PER_S) // 4
    for _ in range(12):
        loop.go_on()
        now_ns += step_ns
    loop.end()
    assert [at_ns // step_ns for at_ns in asked_ns] == [0, 2, 5, 10]
