"""What the pages of a router say about its workers, models and policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.config.router import WorkerAddress, load_policy
from kvstore.net.http import Page
from kvstore.router.engines.probes import MODELS_S
from kvstore.router.engines.workers import Worker, faults
from kvstore.router.pages import _metrics, _state, health_of
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole, WorkerWord
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.turns_core import TurnsCore
from tests.kit.virtual_router import VirtualRouter, until, virtual_loop

pytestmark = pytest.mark.usefixtures("virtual")


def health(router: VirtualRouter) -> Page:
    return router.on_loop(lambda: health_of(router.router))


def status(router: VirtualRouter, path: str) -> int:
    return router.ask(path=path, method="GET")[0]


def test_the_worst_worker_is_named_first() -> None:
    flags = [f"{name}=http://127.0.0.{n}:1" for n, name in enumerate("abc", start=1)]
    with VirtualRouter(flags) as router:

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


def test_the_reason_of_a_state_is_that_of_this_state() -> None:
    flags = [f"{name}=http://127.0.0.{n}:1" for n, name in enumerate("abcd", start=1)]
    with VirtualRouter(flags) as router:

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


def test_roles_that_the_planner_gave_are_on_the_pages() -> None:
    core = RouterCore(parse({}), seed=1)
    with VirtualRouter(["a=http://127.0.0.1:1,role=any"], core=core) as router:

        def change() -> tuple[bytes, dict[tuple[str, str], int]]:
            core.fleet.assign("a", WorkerRole.PREFILL)
            router.router.workers["a"].word = WorkerWord.UP
            values: Any = _metrics(router.router)
            return health_of(router.router).body, values["router_worker_role"]

        page, roles = router.on_loop(change)
        assert b"; planned roles: a prefill" in page
        assert roles == {("a", "prefill"): 1}


def test_a_router_that_scales_from_zero_is_ready_without_workers() -> None:
    core = TurnsCore()
    core.policy = parse({"limits": {"holds_without_workers": True}})
    with VirtualRouter(["a=http://127.0.0.1:1"], core=core) as router:
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
    worker: VirtualWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(CHAT)
    core = cast("TurnsCore", RouterCore(load_policy(policy), seed=1))
    stable = "workers of pool stable serve m, not llama: correct models.chat of the policy, or"
    canary = "pool canary of model chat has no worker: add pool=canary to its workers"
    a = worker
    with VirtualRouter([f"{a.flag},pool=stable"], core=core, policy=str(policy)) as router:

        def said(note: str) -> int:
            return sum(note in each.message for each in caplog.records)

        ask = {"model": "chat", "prompt": "x"}
        until(lambda: f"no worker takes requests, and {stable}".encode() in health(router).body)
        until(lambda: said(stable) == said(canary) == 1)
        assert canary in health(router).body.decode()
        assert status(router, "/health") == health(router).status == 503
        assert router.ask(ask)[0] == 503
        a.script("ok", models=["llama"])
        virtual_loop().until(lambda: status(router, "/health") == 200, limit_s=MODELS_S + 5)
        until(lambda: health(router).body.startswith(b"ok, but pool canary of model chat has no"))
        scrapes = a.seen()["scrapes"]
        until(lambda: a.seen()["scrapes"] > scrapes + 1)
        assert said(canary) == 1, "once"
        policy.write_text("models: {chat: {pools: [{pool: stable, served: llama}]}}")
        router.on_loop(router.router.adopt_policy)
        until(lambda: health(router).body == b"ok\n")
        assert router.ask(ask)[0] == 200


def test_a_refused_policy_is_on_the_pages_until_another_one_is_read(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("policy: cost\n")
    with VirtualRouter(["a=http://127.0.0.1:1"], policy=str(policy)) as router:

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


def test_a_wrong_name_under_draining_is_said() -> None:
    policy = parse({"draining": ["a", "aa"]})
    with VirtualRouter(["a=http://127.0.0.1:1"]) as router:
        router.on_loop(lambda: router.router.dispatcher.adopt(policy))
        assert router.words() == {"a": "draining"}
        assert b"draining in the policy file names no worker: aa" in health(router).body


# ── models that no worker serves ─────────────────────────────────────────────────────────────────


def worker(pool: str, *models: str, role: str = "both") -> Worker:
    return Worker(
        WorkerAddress(name="w", url="http://h", pool=pool, models=models, role=WorkerRole(role))
    )


def found(rule: dict[str, Any], *workers: Worker, **limits: Any) -> list[str]:
    policy = parse({"models": {"chat": rule}, "limits": limits})
    return [each.partition(":")[0] for each in faults(policy, workers)]


STABLE = {"pools": [{"pool": "stable", "served": "m"}]}
EMPTY = "pool stable of model chat has no worker"


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        ([], EMPTY),
        ([worker("default", "m")], EMPTY),
        ([worker("stable", "m", role="prefill")], EMPTY),
        ([worker("stable", "o", "n")], "workers of pool stable serve n, o, not m"),
        (
            [worker("stable", *"ba"), worker("stable", "c")],
            "workers of pool stable serve a, b, c, not m",
        ),
        ([worker("stable", "n"), worker("stable", "m")], ""),
        ([worker("stable")], ""),  # not known yet
    ],
)
def test_a_pool_is_judged_by_its_workers(workers: list[Worker], says: str) -> None:
    assert found(STABLE, *workers) == [says]


def test_a_pool_that_scales_from_zero_may_be_empty_but_not_wrong() -> None:
    holds = {"holds_without_workers": True}
    assert found(STABLE, **holds) == [""]
    assert found(STABLE, worker("stable", "n"), **holds) == [
        "workers of pool stable serve n, not m"
    ]


def test_a_pool_without_sessions_is_not_judged() -> None:
    pools = [{"pool": "old", "weight": 0}, {"pool": "new"}]
    assert found({"pools": pools}, worker("new", "chat")) == [""]


def test_a_model_without_pools_is_sought_in_all() -> None:
    assert found({}, worker("a", "m"), worker("b", "n")) == ["workers serve m, n, not chat"]
    assert found({}, worker("a", "m"), worker("b", "chat")) == [""]
    assert found({}) == [""], "no worker is said elsewhere"
