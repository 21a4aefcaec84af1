"""Engines of one model that differ: in the longest context, in what they serve by now, and in the
long requests that they have."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Blocked, RouteCommand
from kvstore.routing.policy import RoutingPolicy, parse
from kvstore.routing.requests import OpenRequest
from tests.kit.router_thread import ASK, STEADY
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

SMALL, LARGE = 3000, 100_000
PER_TOKEN = 1
"""Bytes: the router expects four, and is wrong about what fits until engines report."""


def routed(engines: Sequence[VirtualWorker], policy: str = "cost") -> VirtualRouter:
    core = RouterCore(parse(STEADY | {"policy": policy}), seed=1)
    router = VirtualRouter([each.flag for each in engines], core=core)
    until(lambda: all(worker.models for worker in router.router.workers))
    return router


def requests(engine: VirtualWorker) -> int:
    return int(engine.seen()["requests"])


# ── contexts ─────────────────────────────────────────────────────────────────────────────────────


def with_contexts(engines: Sequence[VirtualWorker], *contexts: int, is_listed: bool = True) -> None:
    for each, context in zip(engines, contexts, strict=True):
        each.script(
            "ok", context=context, bytes_per_token=PER_TOKEN, reports=False, lists=is_listed
        )


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_only_engine_in_which_it_fits_is_found(
    engines: list[VirtualWorker], *, is_listed: bool
) -> None:
    contexts = [SMALL] * 4 + [LARGE] if is_listed else [SMALL] * 2 + [LARGE]
    crew = engines[: len(contexts)]
    with_contexts(crew, *contexts, is_listed=is_listed)
    with routed(crew) as router:
        for number in range(10):
            before = sum(map(requests, crew))
            body = ASK | {"prompt": f"{number} " + "x" * 6000}
            status, headers, answer = router.ask(body)
            assert (status, headers["x-kvstore-worker"]) == (200, crew[-1].name), answer
            if is_listed:
                assert sum(map(requests, crew)) - before <= 2, "no other one is as small"


def test_where_it_fits_nowhere_the_client_gets_an_engines_own_word(
    engines: list[VirtualWorker],
) -> None:
    with_contexts(engines, *[SMALL] * 5)
    with routed(engines) as router:
        status, headers, answer = router.ask(ASK | {"prompt": "x" * 6000})
        assert status == 400
        assert "maximum context length is 3000 tokens" in json.loads(answer)["error"]["message"]
        assert headers["x-kvstore-worker"] in "abcde"
        assert sum(map(requests, engines)) == 1
        status, _, answer = router.ask(ASK | {"prompt": "x" * 400_000})
        assert (status, b"maximum context length is 3000 tokens" in answer) == (400, True)
        assert set(router.words().values()) == {"up"}
        assert router.ask(ASK)[0] == 200


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_serves_another_model_now_costs_no_request(
    engines: list[VirtualWorker],
) -> None:
    changed, other = engines[:2]
    with routed((changed, other)) as router:
        for number in range(20):
            assert router.ask(ASK | {"prompt": f"{number}"})[0] == 200
        reads, before = changed.seen()["models_read"], requests(changed)
        changed.script("ok", models=["new"])
        asks = [ASK | {"prompt": f"{number}"} for number in range(60)]
        for first in range(0, 60, 6):  # one by one, all might go to the other
            asked = [router.begin(body) for body in asks[first : first + 6]]
            assert [each.result()[0] for each in asked] == [200] * 6
        assert changed.seen()["models_read"] > reads
        assert requests(changed) - before <= 12, "its list is read at the first 404"
        until(lambda: router.ask(ASK | {"model": "new"})[0] == 200)
        assert requests(other) >= 60
        assert router.words() == {"a": "up", "b": "up"}
        assert router.ask(ASK | {"model": "none"})[0] == 404


# ── long requests ────────────────────────────────────────────────────────────────────────────────


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
