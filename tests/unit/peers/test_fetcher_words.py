"""What a fetching node says of whom it cannot ask, and when it asks who is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client.index import Members
from kvstore.index.feed import Trust
from kvstore.node.node import MonotonicClock
from kvstore.peers.fetcher import MEMBERS_EVERY_S, Fetcher
from kvstore.types import Incarnation
from kvstore.units import NS_PER_S
from kvstore.wire.peers import PeerHello
from tests.sim.world.loop import SimLoop


def test_an_index_finds_blocks_and_a_node_serves_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fetcher = cast("Fetcher", SimpleNamespace(_told={}))
    for name in ("the index", "node n2"):
        for trouble in ("it is away", "it is away", ""):
            Fetcher._note(fetcher, name, trouble)
    assert [record.getMessage() for record in caplog.records] == [
        "where blocks are cannot be asked: it is away",
        "where blocks are can be asked again",
        "blocks are not fetched from node n2: it is away",
        "blocks are fetched from node n2 again",
    ]


def test_fetchers_do_not_ask_who_is_there_in_step() -> None:
    now_ns = 0
    loop = SimLoop(lambda: now_ns)
    asked_ns: list[int] = []

    class Index:
        def nodes(self, *, timeout_s: float | None = None) -> Members:
            asked_ns.append(now_ns)
            return Members(Trust.EXACT, [])

    jitters = iter([0.0, 0.25, 0.75, 0.5])
    fetcher = Fetcher(
        cast("Any", None),
        who=PeerHello("n1", Incarnation(1)),
        transfer_worker=cast("Any", None),
        memory=cast("Any", None),
        clock=MonotonicClock(),
        credentials=None,
        jitter=lambda: next(jitters),
    )
    fetcher.index = cast("Any", Index())
    loop.call_soon(fetcher.start)
    step_ns = int(MEMBERS_EVERY_S * NS_PER_S) // 4
    for _ in range(12):
        loop.go_on()
        now_ns += step_ns
    loop.end()
    assert [at_ns // step_ns for at_ns in asked_ns] == [0, 2, 5, 10]
