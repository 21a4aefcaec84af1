"""Requests on their way through the core: clients that leave while they wait, names that nobody
has read of so far, and what an end says of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.dispatch import Dispatcher, RoutedLife
from kvstore.router.engines.workers import WorkerAdapter
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, Ending, Rejected, RequestEnded, Routed
from kvstore.routing.policy import RoutingPolicy, parse
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


# ── models and adapters ──────────────────────────────────────────────────────────────────────────

NAMED = {"models": {"m": {"pools": [{"pool": ""}]}}}
TAKES_ANY = WorkerAddress(name="b", url="http://b:1", kind="openai")


class Adapters:
    """A worker whose engine has loaded an adapter that nobody has read of so far."""

    def __init__(self, loop: VirtualLoop, policy: RoutingPolicy, *more: WorkerAddress) -> None:
        self.dispatcher = Dispatcher(RouterCore(policy, seed=1), clock=loop.clock_ns)
        self.workers = self.dispatcher.workers
        self.workers.replace([WorkerAddress(name="a", url="http://a:1", models=("m",)), *more])
        self.workers.read_again = self._read
        self.reads = 0

    async def _read(self, name: str, *, is_taken: bool) -> None:
        assert is_taken is ("b" in {worker.name for worker in self.workers})
        self.reads += 1
        worker = self.workers["a"]
        worker.adapters = {"fresh": WorkerAdapter("m", "path")}
        self.workers.describe(worker)

    def enter(self, loop: VirtualLoop, model: str) -> tuple[RoutedLife, Routed | Rejected]:
        life = RoutedLife(self.dispatcher)
        return life, loop.run(life.enter(request("r", model=model)))


@pytest.mark.parametrize(
    ("policy", "more", "model", "reads", "workers"),
    [
        ({}, [], "fresh", 1, "a"),
        ({}, [], "other", 1, ""),
        ({}, [], "m", 0, "a"),
        (NAMED, [], "fresh", 0, ""),
        # An engine that takes any name gets none before it is looked for.
        ({}, [TAKES_ANY], "fresh", 1, "a"),
        ({}, [TAKES_ANY], "other", 1, "b"),
        ({}, [TAKES_ANY], "m", 0, "a"),
        ({}, [TAKES_ANY], "", 0, "ab"),
    ],
)
def test_models_are_read_again_where_one_is_missing_that_engines_name(
    policy: dict[str, Any], more: list[WorkerAddress], model: str, reads: int, workers: str
) -> None:
    loop = VirtualLoop()
    site = Adapters(loop, parse(policy), *more)
    _, found = site.enter(loop, model)
    assert site.reads == reads
    assert isinstance(found, Routed) == bool(workers)
    assert not isinstance(found, Routed) or found.worker in workers


@pytest.mark.parametrize("ending", list(Ending))
def test_an_engine_has_served_when_a_request_has_ended_there(ending: Ending) -> None:
    """Before that some metrics may not be there."""
    loop = VirtualLoop()
    site = Adapters(loop, RoutingPolicy())
    life, _ = site.enter(loop, "m")
    assert not site.workers["a"].has_served
    life.end(ending)
    assert site.workers["a"].has_served
