"""From a request's arrival to its end: what the shell does beside asking the core."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.dispatch import Dispatcher, RoutedLife
from kvstore.router.engines.workers import WorkerAdapter
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Ending, Rejected, Routed
from kvstore.routing.policy import RoutingPolicy, parse
from tests.kit.virtual_loop import VirtualLoop
from tests.unit.routing.fleets import request

NAMED = {"models": {"m": {"pools": [{"pool": ""}]}}}


class Site:
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

    async def enter(self, model: str) -> tuple[RoutedLife, Routed | Rejected]:
        life = RoutedLife(self.dispatcher)
        return life, await life.enter(request("r", model=model))


@pytest.mark.parametrize(
    ("policy", "model", "reads", "is_routed"),
    [
        ({}, "fresh", 1, True),
        ({}, "other", 1, False),
        ({}, "m", 0, True),
        (NAMED, "fresh", 0, False),
    ],
)
def test_models_are_read_again_where_one_is_missing_that_engines_name(
    policy: dict[str, Any], model: str, reads: int, *, is_routed: bool
) -> None:
    loop = VirtualLoop()

    async def running() -> None:
        site = Site(loop, parse(policy))
        _, found = await site.enter(model)
        assert (site.reads, isinstance(found, Routed)) == (reads, is_routed)

    loop.run(running())


@pytest.mark.parametrize(
    ("model", "reads", "worker"),
    [("fresh", 1, "a"), ("other", 1, "b"), ("m", 0, "a"), ("", 0, "a")],
)
def test_an_engine_that_takes_any_name_gets_none_before_it_is_looked_for(
    model: str, reads: int, worker: str
) -> None:
    loop = VirtualLoop()

    async def running() -> None:
        takes_any = WorkerAddress(name="b", url="http://b:1", kind="openai")
        site = Site(loop, parse({}), takes_any)
        _, found = await site.enter(model)
        assert isinstance(found, Routed)
        assert (site.reads, found.worker) == (reads, worker if model else found.worker)

    loop.run(running())


@pytest.mark.parametrize("ending", list(Ending))
def test_an_engine_has_served_when_a_request_has_ended_there(ending: Ending) -> None:
    """Before that some metrics may not be there."""
    loop = VirtualLoop()

    async def running() -> None:
        site = Site(loop, RoutingPolicy())
        life, _ = await site.enter("m")
        assert not site.workers["a"].has_served
        life.end(ending)
        assert site.workers["a"].has_served

    loop.run(running())
