"""Answers that are no success: their headers, texts and receipts; bodies that name no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from tests.kit.router_thread import ASK
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until


def core_of(policy: dict[str, Any]) -> RouterCore:
    return RouterCore(parse(policy), seed=1)


def message(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


def receipts(log: Path, count: int) -> list[dict[str, Any]]:
    until(lambda: log.exists() and log.read_bytes().count(b"\n") == count)
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("is_down", [True, False])
def test_an_answer_that_is_an_error_names_who_was_tried_and_its_receipt(
    worker: VirtualWorker, tmp_path: Path, *, is_down: bool
) -> None:
    log = tmp_path / "receipts"
    if is_down:
        worker.port.kill()
    else:
        worker.script("fail")
    with VirtualRouter([worker.flag], core=core_of({}), receipts=str(log)) as router:
        until(lambda: router.router.workers["a"].state == ("down" if is_down else "up"))
        status, headers, body = router.ask()
        [receipt] = receipts(log, 1)
    assert headers["x-kvstore-worker"] == receipt["chosen"] == "a"
    assert headers["x-request-id"] == receipt["request_id"]
    if is_down:  # it was tried
        assert status == 503
        assert receipt["outcome"]["rejected"] == headers["x-kvstore-dropped-reason"]
        assert "last-resort" in receipt["degraded"]
    else:  # the engine's own error
        assert (status, json.loads(body)) == (500, {"error": "scripted"})
        assert receipt["outcome"]["rejected"] == "rejected-attempts"


def test_a_dry_run_of_an_unknown_model_gets_the_answer_of_the_request(
    worker: VirtualWorker,
) -> None:
    body = ASK | {"model": "other"}
    with VirtualRouter([worker.flag], core=core_of({"models": {"m": {}}})) as router:
        (status, _, answer), dry = (
            router.ask(body),
            router.ask(body, "/kvstore/explain/v1/completions"),
        )
    assert (dry[0], dry[2]) == (status, answer)
    assert (status, b"no such model; there are m" in answer) == (404, True)


@pytest.mark.parametrize(
    ("expected", "asked"),
    [
        (404, {"body": ASK | {"model": "other"}}),
        (400, {"body": b"no json"}),
        (401, {"headers": {"Authorization": "Bearer key-of-nobody-00001"}}),
        (405, {"method": "GET"}),
        (413, {"body": b"x" * 2000}),
    ],
)
def test_every_error_has_an_id_of_its_own(
    worker: VirtualWorker, tmp_path: Path, expected: int, asked: dict[str, Any]
) -> None:
    keys, log = tmp_path / "keys.yaml", tmp_path / "receipts"
    keys.write_text("team: key-of-team-0000001\n")
    own = {"Authorization": "Bearer key-of-team-0000001", "X-Request-Id": "mine"}
    given: dict[str, Any] = asked | {"headers": own | asked.get("headers", {})}
    with VirtualRouter(
        [worker.flag],
        core=core_of({"models": {"m": {}}}),
        api_keys=str(keys),
        receipts=str(log),
        body_max="1KiB",
    ) as router:
        answers = [router.ask(**given) for _ in range(2)]
    assert {status for status, _, _ in answers} == {expected}
    ids = {headers["x-request-id"] for _, headers, _ in answers}
    assert len(ids) == 2
    assert all(each.startswith("mine-") for each in ids)
    assert not log.exists(), "no decision was made"


def test_a_body_without_a_model_is_400_where_there_are_several(
    workers: list[VirtualWorker],
) -> None:
    workers[1].script("ok", models=["b", "a"])
    with VirtualRouter([each.flag for each in workers], core=core_of({})) as router:
        until(lambda: router.router.workers["a"].models == ("m",))
        until(lambda: router.router.workers["b"].models == ("a", "b"))
        status, headers, body = router.ask({"prompt": "hello"})
    assert (status, message(body)) == (400, "the body names no model; there are a, b, m")
    assert headers["x-kvstore-dropped-reason"] == "rejected-model-missing"
