"""A request that is refused, its receipt and a dry run of the command line say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner

from kvstore.cli.route import route
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from kvstore.units import format_us
from tests.kit.router_thread import ASK, RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

SLOW = {"costs": {"prefill_tokens_per_s": 1000}, "models": {"m": {"pools": [{"pool": "default"}]}}}
LONG = ASK | {"prompt": "hello " * 4000}
INLINE = {"X-Kvstore-Class": "inline", "X-Request-Id": "mine"}


def test_a_request_whose_objective_cannot_be_met(worker: ScriptedWorker, tmp_path: Path) -> None:
    """The text has both times, the receipt the reason; a dry run says the same beforehand."""
    log, body = tmp_path / "receipts", tmp_path / "body.json"
    body.write_text(json.dumps(LONG))
    core = RouterCore(parse(SLOW | {"default_class": "inline"}), seed=1)
    with RouterThread([worker.flag], core=core, receipts=str(log)) as router:
        until(lambda: router.ask()[0] == 200)
        url = f"http://127.0.0.1:{router.port}"
        dry = CliRunner().invoke(route, ["explain", "--dry-run", str(body), "--router", url])
        assert dry.exit_code == 0
        assert dry.stdout.splitlines()[0].endswith(": rejected")
        assert "rejected: rejected-objective" in dry.stdout.splitlines()
        status, headers, answer = router.ask(LONG, headers=INLINE)
        assert (status, headers["x-kvstore-dropped-reason"]) == (429, "rejected-objective")
        assert int(headers["retry-after"]) >= 1
        message = json.loads(answer)["error"]["message"]
        predicted_ms, objective_ms = map(int, re.findall(r"\d+", message))
        assert message == (
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
