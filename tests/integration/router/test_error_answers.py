"""Answers that are no success: their headers, texts and receipts; bodies that name no model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.route import route
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from kvstore.units import format_us
from tests.integration.router.test_proxy import until
from tests.kit.router_thread import ASK, RouterThread
from tests.kit.scripted_worker import ScriptedWorker

SLOW = {"costs": {"prefill_tokens_per_s": 1000}, "models": {"m": {"pools": [{"pool": "default"}]}}}
LONG = ASK | {"prompt": "hello " * 4000}
INLINE = {"X-Kvstore-Class": "inline", "X-Request-Id": "mine"}


def core_of(policy: dict[str, Any]) -> RouterCore:
    return RouterCore(parse(policy), seed=1)


def message(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


def receipts(log: Path, count: int) -> list[dict[str, Any]]:
    until(lambda: log.exists() and log.read_bytes().count(b"\n") == count)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_request_whose_objective_cannot_be_met(worker: ScriptedWorker, tmp_path: Path) -> None:
    """The text has both times, the receipt the reason; a dry run says the same beforehand."""
    log, body = tmp_path / "receipts", tmp_path / "body.json"
    body.write_text(json.dumps(LONG))
    with RouterThread(
        [worker.flag], core=core_of(SLOW | {"default_class": "inline"}), receipts=str(log)
    ) as router:
        until(lambda: router.ask()[0] == 200)
        url = f"http://127.0.0.1:{router.port}"
        dry = CliRunner().invoke(route, ["explain", "--dry-run", str(body), "--router", url])
        assert dry.exit_code == 0
        assert dry.stdout.splitlines()[0].endswith(": rejected")
        assert "rejected: rejected-objective" in dry.stdout.splitlines()
        status, headers, answer = router.ask(LONG, headers=INLINE)
        assert (status, headers["x-kvstore-dropped-reason"]) == (429, "rejected-objective")
        assert int(headers["retry-after"]) >= 1
        predicted_ms, objective_ms = map(int, re.findall(r"\d+", message(answer)))
        assert message(answer) == (
            f"the predicted TTFT of {predicted_ms} ms is above the class's objective of"
            f" {objective_ms} ms"
        )
        assert predicted_ms > objective_ms == 1e3 * parse(SLOW).classes["inline"].ttft_s
        predicted, objective = (format_us(1000 * ms) for ms in (predicted_ms, objective_ms))
        assert f"predicted {predicted}, objective {objective}" in dry.stdout.splitlines()
        assert headers["x-request-id"].startswith("mine-")
        assert "x-kvstore-worker" not in headers
        until(lambda: log.exists() and headers["x-request-id"] in log.read_text())
    *sent, receipt = [json.loads(line) for line in log.read_text().splitlines()]
    assert receipt["request_id"] == headers["x-request-id"]
    assert receipt["outcome"]["rejected"] == "rejected-objective"
    shown = CliRunner().invoke(route, ["explain", "mine", "--receipts", str(log)]).stdout
    assert f"request {receipt['request_id']}: rejected" in shown
    (tmp_path / "policy.yaml").write_text("policy: round-robin\n")
    replay = ["replay", "--receipts", str(log), "--policy", str(tmp_path / "policy.yaml"), "--json"]
    assert json.loads(CliRunner().invoke(route, replay).stdout)["requests"] == len(sent) > 0


def test_only_a_worker_that_is_down_is_tried_and_a_receipt_says_so(tmp_path: Path) -> None:
    log = tmp_path / "receipts"
    with ScriptedWorker.start(tmp_path, "a") as gone:
        flag = gone.flag
    with RouterThread([flag], core=core_of({}), receipts=str(log)) as router:
        until(lambda: router.router.workers["a"].state == "down")
        status, headers, _ = router.ask()
        [receipt] = receipts(log, 1)
    assert (status, headers["x-kvstore-worker"]) == (503, "a")
    assert receipt["request_id"] == headers["x-request-id"]
    assert receipt["outcome"]["rejected"] == headers["x-kvstore-dropped-reason"]
    assert (receipt["chosen"], "last-resort" in receipt["degraded"]) == ("a", True), "it was tried"


def test_an_error_of_an_engine_that_is_passed_on_names_it_and_the_request(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    log = tmp_path / "receipts"
    worker.script("fail")
    with RouterThread([worker.flag], core=core_of({}), receipts=str(log)) as router:
        status, headers, body = router.ask()
        [receipt] = receipts(log, 1)
    assert (status, json.loads(body)) == (500, {"error": "scripted"})
    assert headers["x-kvstore-worker"] == receipt["chosen"] == "a"
    assert headers["x-request-id"] == receipt["request_id"]
    assert receipt["outcome"]["rejected"] == "rejected-attempts"


def test_a_dry_run_of_an_unknown_model_gets_the_answer_of_the_request(
    worker: ScriptedWorker,
) -> None:
    body = ASK | {"model": "other"}
    with RouterThread([worker.flag], core=core_of({"models": {"m": {}}})) as router:
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
    worker: ScriptedWorker, tmp_path: Path, expected: int, asked: dict[str, Any]
) -> None:
    keys, log = tmp_path / "keys.yaml", tmp_path / "receipts"
    keys.write_text("team: key-of-team-0000001\n")
    own = {"Authorization": "Bearer key-of-team-0000001", "X-Request-Id": "mine"}
    given: dict[str, Any] = asked | {"headers": own | asked.get("headers", {})}
    with RouterThread(
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
    workers: list[ScriptedWorker],
) -> None:
    workers[1].script("ok", models=["b", "a"])
    with RouterThread([each.flag for each in workers], core=core_of({})) as router:
        until(lambda: router.router.workers["a"].models == ("m",))
        until(lambda: router.router.workers["b"].models == ("a", "b"))
        status, headers, body = router.ask({"prompt": "hello"})
    assert (status, message(body)) == (400, "the body names no model; there are a, b, m")
    assert headers["x-kvstore-dropped-reason"] == "rejected-model-missing"
