"""Requests that cost others nothing: long ones, urgent ones, those that lose their connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Blocked, RouteCommand
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.requests import OpenRequest
from tests.kit.router_thread import ASK
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

LONG = [{"model": "m", "prompt": f"{n} " + "once more " * 200_000} for n in range(4)]
"""Texts of 2 MB: 500,000 tokens each by their bytes."""


def running(engines: Sequence[VirtualWorker]) -> list[int]:
    return [each.seen()["running"] for each in engines]


class CountingCore(RouterCore):
    """The decision core with its defaults; `held_count`: requests that were held, however long."""

    def __init__(self) -> None:
        super().__init__(RoutingPolicy(), seed=1)
        self.held_count = 0

    def _hold(self, opened: OpenRequest, why: Blocked, now_ns: int) -> list[RouteCommand]:
        self.held_count += 1
        return super()._hold(opened, why, now_ns)


@pytest.mark.parametrize("count", [2, 4])
def test_long_requests_hold_nobody(engines: list[VirtualWorker], count: int) -> None:
    """At some engines while others are idle, and at all of them."""
    del engines[4:]
    for each in engines:
        each.script("held", from_bytes=1 << 20)
    with VirtualRouter([each.flag for each in engines], core=CountingCore()) as router:
        long = [router.begin(each) for each in LONG[:count]]
        until(lambda: sorted(running(engines)) == [0] * (4 - count) + [1] * count)
        asked = [router.begin(ASK | {"prompt": f"{n}"}) for n in range(40)]
        assert [each.result()[0] for each in asked] == [200] * 40
        assert router.core.held_count == 0
        assert sum(running(engines)) == count, "they are still there"
        assert not any(each.done() for each in long)
        for each in engines:
            each.script("ok")
        assert [each.result()[0] for each in long] == [200] * count
