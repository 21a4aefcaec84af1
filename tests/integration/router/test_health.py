"""Liveness and readiness of a router, and a lost index on its pages."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.config.router import load_policy
from kvstore.net.http import Page
from kvstore.router.engines import probes
from kvstore.router.pages import _metrics, _state, health_of
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole, WorkerWord
from tests.integration.router.test_proxy import until
from tests.kit.router_thread import RouterThread
from tests.kit.scripted_worker import ScriptedWorker
from tests.kit.turns_core import TurnsCore

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


def test_the_worst_worker_is_named_first(dead: str) -> None:
    port = dead.rpartition(":")[2]
    flags = [f"{name}=http://127.0.0.{n}:{port}" for n, name in enumerate("abc", start=1)]
    with RouterThread(flags) as router:

        def change() -> list[str]:
            a, b, c = router.router.workers
            a.word = b.word = WorkerWord.UP
            a.parity, c.word = "keys differ", WorkerWord.DOWN
            a.unread = b.unread = "no such metric"
            page = health_of(router.router).body.decode()
            assert "load of a, b is not known (no such metric)" in page
            notes = page.split("worker ")
            return [note[:9] for note in notes if note[0] in "abc"]

        assert router.on_loop(change) == ["c is down", "a is load"]


def test_the_reason_of_a_state_is_that_of_this_state(dead: str) -> None:
    port = dead.rpartition(":")[2]
    flags = [f"{name}=http://127.0.0.{n}:{port}" for n, name in enumerate("abcd", start=1)]
    with RouterThread(flags) as router:

        def change() -> str:
            for worker in router.router.workers:
                worker.parity, worker.why = "keys differ", ""
            words = (WorkerWord.UP, WorkerWord.DRAINING, WorkerWord.DRAINING, WorkerWord.NEW)
            for worker, word in zip(router.router.workers, words, strict=True):
                worker.word = word
            router.router.workers["c"].why = "its pod terminates"
            rows = {row["name"]: row["why"] for row in _state(router.router)["workers"]}
            page = health_of(router.router).body.decode()
            assert all(f"({why})" in page for why in rows.values())
            return " | ".join(rows[name] for name in "abcd")

        said = "keys differ | in the policy file | its pod terminates | never reached yet"
        assert router.on_loop(change) == said


def test_roles_that_the_planner_gave_are_on_the_pages(dead: str) -> None:
    core = RouterCore(parse({}), seed=1)
    with RouterThread([f"a=http://{dead},role=any"], core=core) as router:

        def change() -> tuple[bytes, dict[tuple[str, str], int]]:
            core.fleet.assign("a", WorkerRole.PREFILL)
            router.router.workers["a"].word = WorkerWord.UP
            values: Any = _metrics(router.router)
            return health_of(router.router).body, values["router_worker_role"]

        page, roles = router.on_loop(change)
        assert b"; planned roles: a prefill" in page
        assert roles == {("a", "prefill"): 1}


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


def test_a_router_that_scales_from_zero_is_ready_without_workers(dead: str) -> None:
    core = TurnsCore()
    core.policy = parse({"limits": {"holds_without_workers": True}})
    with RouterThread([f"a=http://{dead}"], core=core) as router:
        until(lambda: b"worker a is down" in health(router).body)
        assert status(router, "/health") == health(router).status == 503, "it would refuse them"
        router.on_loop(lambda: router.router.workers.replace([]))
        assert health(router).body.startswith(b"ok, but no worker takes requests")
        assert status(router, "/health") == health(router).status == 200


CHAT = """
models:
  chat:
    pools: [{pool: stable, weight: 9, served: llama}, {pool: canary, served: llama-tuned}]
"""


def test_a_model_that_no_worker_serves_is_named_and_every_model_is_not_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "MODELS_S", 0.5)
    policy = tmp_path / "policy.yaml"
    policy.write_text(CHAT)
    core = cast("TurnsCore", RouterCore(load_policy(policy), seed=1))
    stable = "workers of pool stable serve m, not llama: correct models.chat of the policy, or"
    canary = "pool canary of model chat has no worker: add pool=canary to its workers"
    with (
        ScriptedWorker.start(tmp_path, "a") as a,
        RouterThread([f"{a.flag},pool=stable"], core=core, policy=str(policy)) as router,
    ):

        def said(note: str) -> int:
            return sum(note in each.message for each in caplog.records)

        ask = {"model": "chat", "prompt": "x"}
        until(lambda: f"no worker takes requests, and {stable}".encode() in health(router).body)
        until(lambda: said(stable) == said(canary) == 1)
        assert canary in health(router).body.decode()
        assert status(router, "/health") == health(router).status == 503
        assert router.ask(ask)[0] == 503
        a.script("ok", models=["llama"])
        until(lambda: health(router).body.startswith(b"ok, but pool canary of model chat has no"))
        assert status(router, "/health") == 200
        scrapes = a.seen()["scrapes"]
        until(lambda: a.seen()["scrapes"] > scrapes + 1)
        assert said(canary) == 1, "once"
        policy.write_text("models: {chat: {pools: [{pool: stable, served: llama}]}}")
        router.on_loop(router.router.adopt_policy)
        until(lambda: health(router).body == b"ok\n")
        assert router.ask(ask)[0] == 200


def test_a_refused_policy_is_on_the_pages_until_another_one_is_read(
    tmp_path: Path, dead: str
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("policy: cost\n")
    with RouterThread([f"a=http://{dead}"], policy=str(policy)) as router:

        def after(text: str) -> tuple[str, float]:
            """(page, gauge) after a reload."""
            policy.write_text(text)
            router.on_loop(router.router.adopt_policy)
            values: Any = router.on_loop(lambda: _metrics(router.router))
            return health(router).body.decode(), values["router_policy_refused"]

        page, gauge = after("policy: best\n")
        assert f"the policy stays as it was: --policy {policy}: " in page
        assert gauge == 1
        page, gauge = after("policy: cost\n")
        assert "the policy stays" not in page
        assert gauge == 0
        policy.unlink()
        os.mkfifo(policy)
        router.on_loop(router.router.adopt_policy)
        assert "is a pipe, which is read once" in health(router).body.decode()


def test_a_tokenizer_that_is_not_used_is_on_the_page(tmp_path: Path, dead: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    flags: dict[str, Any] = {"index": [dead], "insecure": True, "tokenizer": [f"wrong={tmp_path}"]}
    with ScriptedWorker.start(tmp_path, "b") as worker:
        worker.script("ok", models=["right"])
        with RouterThread([worker.flag], **flags) as router:
            assert b"the tokenizer of wrong is not used (not compared with" in health(router).body
            says = b"the tokenizer of wrong is not used (no worker serves that model, but right)"
            until(lambda: says in health(router).body)


def test_a_wrong_name_under_draining_is_said(dead: str) -> None:
    policy = parse({"draining": ["a", "aa"]})
    with RouterThread([f"a=http://{dead}"]) as router:
        router.on_loop(lambda: router.router.dispatcher.adopt(policy))
        assert router.words() == {"a": "draining"}
        assert b"draining in the policy file names no worker: aa" in health(router).body
