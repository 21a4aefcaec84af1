"""Requests that wait for the core: what becomes of them when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.router.dispatch import Dispatcher
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, Ending, Rejected, RequestEnded, Routed
from kvstore.routing.policy import parse
from tests.kit.coroutines import driven
from tests.kit.routing_check import check
from tests.kit.virtual_loop import VirtualLoop
from tests.unit.routing.fleets import core_of, request, spec

Asking = asyncio.Task[Routed | Rejected]


class Site:
    """A worker that takes one request at a time and has one, and another one that waits."""

    def __init__(self, loop: VirtualLoop, ttl_s: float | None) -> None:
        classes = {"only": {"rank": 0, "ttl_s": ttl_s}}
        policy = {"limits": {"queue_max": 1}, "classes": classes, "default_class": "only"}
        self.core: RouterCore = core_of(spec(0), policy=parse(policy))
        self.dispatcher = Dispatcher(self.core, clock=loop.clock_ns)

    async def begin(self) -> Asking:
        sent = await self.dispatcher.ask(Arrived(request("first")))
        assert isinstance(sent, Routed)
        asking = asyncio.create_task(self.dispatcher.ask(Arrived(request("waits"))))
        await asyncio.sleep(0)
        assert len(self.dispatcher.held) == 1
        return asking

    def check_empty(self) -> None:
        check(self.core)
        assert len(self.dispatcher.held) == 0
        assert not self.core.open
        assert not self.core.fleet.flights


def run(test: Callable[[Site], Coroutine[Any, Any, None]], ttl_s: float | None = None) -> None:
    loop = VirtualLoop()

    async def whole() -> None:
        await test(Site(loop, ttl_s))

    loop.run(whole())


async def leave(asking: Asking) -> None:
    """Its client does, before it has read the answer."""
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@driven(run)
async def test_a_request_whose_client_leaves_while_it_waits_is_ended(site: Site) -> None:
    asking = await site.begin()
    await leave(asking)
    site.dispatcher.note(RequestEnded("first", Ending.DONE))
    site.check_empty()


@driven(run)
async def test_a_request_that_is_routed_in_the_turn_in_which_its_client_leaves_is_ended(
    site: Site,
) -> None:
    asking = await site.begin()
    site.dispatcher.note(RequestEnded("first", Ending.DONE))
    assert site.core.open.keys() == {"waits"}
    assert site.core.fleet.in_flight("w0") == 1
    await leave(asking)
    site.check_empty()


@driven(run, ttl_s=1.0)
async def test_one_that_is_rejected_in_that_turn_has_ended_already(site: Site) -> None:
    asking = await site.begin()
    await asyncio.sleep(2)
    site.dispatcher.note(RequestEnded("first", Ending.DONE))
    assert not site.core.open
    await leave(asking)
    site.check_empty()
