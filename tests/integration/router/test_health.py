"""Liveness and readiness of a router, and a lost index on its pages."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.net.http import Page
from kvstore.router.pages import health_of
from tests.kit.router_thread import RouterThread, until
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
