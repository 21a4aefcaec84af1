"""Liveness and readiness of a router, and a lost index on its pages."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.config.router import WorkerAddress
from kvstore.net.http import Page
from kvstore.net.site import REQUESTS_SHOWN, ROWS_MAX, STATE_BYTES_MAX
from kvstore.router.pages import health_of, make_router_pages
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerWord
from tests.kit.router_thread import ASK, STEADY, RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

SERVING = health_pb2.HealthCheckResponse.SERVING
NAMES = ("", "liveness", "readiness", "kvstore.v1.Router")


@pytest.fixture
def dead() -> str:
    """HOST:PORT where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def health(router: RouterThread) -> Page:
    return router.on_loop(lambda: health_of(router.router))


def status(router: RouterThread, path: str) -> int:
    return router.ask(path=path, method="GET")[0]


def serving(router: RouterThread) -> set[str]:
    """Names that serve, by gRPC's health."""
    port = router.router.servers["route"].port
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return {
            name
            for name in NAMES
            if check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == SERVING
        }


def test_a_router_without_a_worker_lives_and_is_not_ready(dead: str) -> None:
    with RouterThread([f"a=http://{dead}"], route_listen="127.0.0.1:0") as router:
        assert health(router).body.startswith(b"no worker ")
        assert status(router, "/health") == health(router).status == 503
        until(lambda: b"worker a is down (connection refused)" in health(router).body)
        assert status(router, "/health") == health(router).status == 503
        assert status(router, "/livez") == 200
        assert serving(router) == {"liveness"}


def test_a_router_is_ready_when_a_worker_has_answered(
    dead: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with ScriptedWorker.start(tmp_path, "b") as worker:
        flags = [f"a=http://{dead}", worker.flag]
        with RouterThread(flags, route_listen="127.0.0.1:0") as router:
            until(lambda: status(router, "/health") == 200)
            until(lambda: health(router).body.startswith(b"ok, but worker a is down"))
            until(lambda: serving(router) == set(NAMES))
    said = [text for text in caplog.messages if text.startswith("worker a ")]
    assert said[0].endswith("is new, and not reached yet")
    assert "worker a is up" not in said
    assert "worker b is up" in caplog.messages


def test_a_tokenizer_that_is_not_used_is_on_the_page(tmp_path: Path, dead: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    flags: dict[str, Any] = {"index": [dead], "insecure": True, "tokenizer": [f"wrong={tmp_path}"]}
    with ScriptedWorker.start(tmp_path, "b") as worker:
        worker.script("ok", models=["right"])
        with RouterThread([worker.flag], **flags) as router:
            assert b"the tokenizer of wrong is not used (not compared with" in health(router).body
            says = b"the tokenizer of wrong is not used (no worker serves that model, but right)"
            until(lambda: says in health(router).body)


# ── the page for people ──────────────────────────────────────────────────────────────────────────


WORKER_COUNT = 1000


def page(router: RouterThread, path: str, *query: str) -> Any:
    found = make_router_pages(router.router, router.loop)[path](*query)
    assert found.status == 200, found.body
    return found


def state(router: RouterThread) -> dict[str, Any]:
    found = page(router, "/state.json")
    assert len(found.body) <= STATE_BYTES_MAX
    return cast("dict[str, Any]", json.loads(found.body))


def test_a_thousand_workers_fit_and_the_worst_come_first() -> None:
    found = [
        WorkerAddress(
            name=f"w{n:04}" + "x" * 50,
            url=f"http://127.0.{n // 250}.{1 + n % 250}:9",
            pool=f"p{n % 200}",
        )
        for n in range(WORKER_COUNT)
    ]
    with RouterThread(["old=http://127.0.0.1:9"], core=RouterCore(parse(STEADY), seed=1)) as router:

        def add() -> None:
            for number, worker in enumerate(router.router.workers.replace(found)):
                worker.word = WorkerWord.UP if number % 25 else WorkerWord.DOWN
                worker.why = "" if number % 25 else "connection refused " * 10

        router.on_loop(add)
        shown = state(router)
    assert (shown["totals"]["workers"], shown["totals"]["decisions"]) == (WORKER_COUNT, 0)
    states = [worker["state"] for worker in shown["workers"]]
    assert states == sorted(states)
    assert 40 <= len(states) <= ROWS_MAX
    assert states[:40] == ["down"] * 40
    assert shown["prediction"]["ttft_p50_ms"] == {"predicted": None, "achieved": None}
    assert shown["health"]["text"].endswith(" …")
    assert 25 <= len(shown["pools"]) <= ROWS_MAX


def test_decisions_are_listed_with_what_followed_and_one_with_its_candidates(
    tmp_path: Path,
) -> None:
    core = RouterCore(parse(STEADY), seed=1)
    with (
        ScriptedWorker.start(tmp_path, "a") as worker,
        RouterThread([worker.flag], core=core) as router,
    ):
        until(lambda: router.words() == {"a": "up"})
        for _ in range(REQUESTS_SHOWN + 1):
            assert router.ask(ASK | {"stream": True})[0] == 200
        until(lambda: len(router.router.decided) == REQUESTS_SHOWN)
        found = state(router)
        newest = found["decisions"][0]
        its = json.loads(page(router, "/request.json?", f"id={newest['number']}").body)
        gone = make_router_pages(router.router, router.loop)["/request.json?"]("id=99999")
    assert len(found["decisions"]) == REQUESTS_SHOWN
    numbers = [row["number"] for row in found["decisions"]]
    assert numbers == sorted(numbers, reverse=True)
    assert (newest["chosen"], newest["model"], newest["end"]) == ("a", "m", "done")
    assert newest["ttft_s"] > 0
    assert newest["prompt_is_estimated"] is True
    assert its["outcome"]["ttft_s"] == newest["ttft_s"]
    (candidate,) = its["candidates"]
    assert (candidate["worker"], candidate["filtered"]) == ("a", "")
    assert gone.status == 404
    assert found["flows"]["requests"] > REQUESTS_SHOWN
    assert "hello" not in json.dumps(found) + json.dumps(its), "no prompt is shown"
