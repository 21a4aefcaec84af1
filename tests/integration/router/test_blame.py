"""Requests that cost others nothing: long ones, urgent ones, those that lose their connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Blocked, RouteCommand
from kvstore.routing.policy import RoutingPolicy, parse
from kvstore.routing.requests import OpenRequest
from tests.integration.router.test_proxy import until
from tests.kit.router_thread import ASK, RouterThread
from tests.kit.scripted_worker import ScriptedWorker
from tests.kit.turns_core import TurnsCore

LONG = [{"model": "m", "prompt": f"{n} " + "once more " * 200_000} for n in range(4)]
"""Texts of 2 MB: 500,000 tokens each by their bytes."""
KEYS = {name: f"key-of-{name}-of-sixteen" for name in ("greedy", "modest")}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ScriptedWorker]]:
    directory = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        yield [stack.enter_context(ScriptedWorker.start(directory, name)) for name in "abcd"]


@pytest.fixture
def engines(crew: list[ScriptedWorker]) -> list[ScriptedWorker]:
    for each in crew:
        each.script("ok")
    return list(crew)


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(100) as pool:
        yield pool


def running(engines: Sequence[ScriptedWorker]) -> list[int]:
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
def test_long_requests_hold_nobody(
    engines: list[ScriptedWorker], clients: ThreadPoolExecutor, count: int
) -> None:
    """At some engines while others are idle, and at all of them."""
    for each in engines:
        each.script("held", from_bytes=1 << 20)
    with RouterThread([each.flag for each in engines], core=CountingCore()) as router:
        long = [clients.submit(router.ask, each) for each in LONG[:count]]
        until(lambda: sorted(running(engines)) == [0] * (4 - count) + [1] * count)
        asked = [clients.submit(router.ask, ASK | {"prompt": f"{n}"}) for n in range(40)]
        assert [each.result()[0] for each in asked] == [200] * 40
        assert router.core.held_count == 0
        assert sum(running(engines)) == count, "they are still there"
        assert not any(each.done() for each in long)
        for each in engines:
            each.script("ok")
        assert [each.result()[0] for each in long] == [200] * count


def test_a_class_that_a_tenant_may_not_name_delays_no_other_tenant(
    engines: list[ScriptedWorker], clients: ThreadPoolExecutor, tmp_path: Path
) -> None:
    [engine, *_] = engines
    engine.script("held")
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    greedy, modest = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    with RouterThread([engine.flag], core=CountingCore(), api_keys=str(keys)) as router:
        until(lambda: bool(router.router.workers["a"].models))

        def ask(number: int, headers: dict[str, str]) -> int:
            return router.ask(ASK | {"prompt": f"{number} {'x' * 4000}"}, headers=headers)[0]

        urgent = greedy | {"X-Kvstore-Class": "inline"}
        asked = [clients.submit(ask, number, urgent) for number in range(48)]
        until(lambda: running([engine]) == [48])
        asked += [clients.submit(ask, 100 + number, modest) for number in range(24)]
        until(lambda: running([engine]) == [72])
        assert router.core.held_count == 0
        opened = router.on_loop(lambda: list(router.core.open.values()))
        assert {each.service for each in opened} == {"interactive"}
        engine.script("ok")
        assert [each.result() for each in asked] == [200] * 72


@pytest.mark.parametrize(("cuts", "status", "tries", "failures"), [(1, 200, 2, 0), (2, 502, 2, 1)])
def test_a_kept_connection_that_breaks_before_the_first_byte_is_tried_once_anew(
    engines: list[ScriptedWorker], cuts: int, status: int, tries: int, failures: int
) -> None:
    [engine, *_] = engines
    rarely = TurnsCore(parse({"policy": "round-robin", "probes": {"period_s": 3600}}))
    with RouterThread([engine.flag], core=rarely) as router:
        until(lambda: bool(router.router.workers["a"].models))
        assert router.ask()[0] == 200, "its connection is kept"
        before = engine.seen()["requests"]
        engine.script("ok", cuts=cuts)
        assert router.ask()[0] == status
        assert engine.seen()["requests"] - before == tries
        assert router.failure_count("a") == failures
        assert router.ask()[0] == 200
        assert router.words() == {"a": "up"}
