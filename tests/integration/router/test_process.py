"""`kvstore router` as a process, with its own decision core: policies, receipts, pages, the CLI."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from kvstore.cli.route import route
from kvstore.proto import router_pb2 as pb
from kvstore.proto.router_pb2_grpc import RouterStub
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from kvstore.testing.process import Lab, RouterProcess
from kvstore.units import format_us
from tests.kit.processes import route_address
from tests.kit.router_thread import ASK, RouterThread, ask, until
from tests.kit.scripted_worker import ScriptedWorker


def start(directory: Path, workers: list[ScriptedWorker], *flags: str) -> RouterProcess:
    named = [text for each in workers for text in ("--worker", each.flag)]
    return RouterProcess.start(directory, [*named, *flags])


def port_of(router: RouterProcess) -> int:
    return int(router.address.rpartition(":")[2])


def page(router: RouterProcess, name: str) -> str:
    url = router.metrics_url.replace("/metrics", f"/{name}")
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def cli(*arguments: str) -> str:
    return kvstore("route", *arguments)


def kvstore(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvstore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_top_shows_the_page_of_a_router(workers: list[ScriptedWorker], tmp_path: Path) -> None:
    with start(tmp_path, workers, "--worker", "c=http://127.0.0.1:1") as router:
        until(lambda: 'kvstore_router_workers{state="down"} 1.0' in page(router, "metrics"))
        for _ in range(3):
            assert ask(port_of(router), ASK | {"stream": True})[0] == 200
        until(lambda: '_ttft_seconds_count{kind="achieved"} 3.0' in page(router, "metrics"))
        lines = kvstore("top", "--once", "--page", router.metrics_url).splitlines()
    rows = [line.split() for line in lines]
    assert lines[0] == f"kvstore router at {router.metrics_url.split('/')[2]}"
    assert lines[1] == "ok, but worker c is down (connection refused)"
    assert ["requests", "0/s", "3"] in rows
    assert [row[:4] for row in rows if row[:1] == ["c"]] == [["c", "down", "0", "0"]]
    (header,) = (row for row in rows if row[:3] == ["prompt", "tokens", "cached"])
    assert " ".join(header) == "prompt tokens cached predicted TTFT predicted TTFT"


def test_receipts_are_written_explained_and_replayed(
    workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    log = tmp_path / "receipts"
    before = sum(each.seen()["requests"] for each in workers)
    with start(tmp_path, workers, "--receipts", f"{log}:1MiB") as router:
        port = port_of(router)
        ids = [ask(port, headers={"X-Request-Id": f"r{n}"})[1]["x-request-id"] for n in range(30)]
        until(lambda: log.exists() and log.read_bytes().count(b"\n") == 30)
        text = log.read_text()
        assert "hello" not in text, "no text of a prompt"
        shown = cli("explain", ids[7], "--receipts", str(log))
        assert f"request {ids[7]}: " in shown
        assert "policy cost" in shown
        (tmp_path / "p.yaml").write_text("policy: round-robin\n")
        replayed = json.loads(
            cli("replay", "--receipts", str(log), "--policy", str(tmp_path / "p.yaml"), "--json")
        )
        assert replayed["requests"] == 30
        assert sum(replayed["workers"].values()) == 30
        (tmp_path / "body").write_text(json.dumps(ASK))
        dry = cli("explain", "--dry-run", str(tmp_path / "body"), "--router", router.url, "--json")
        (receipt,) = json.loads(dry)["receipts"]
        assert receipt["chosen"] in ("a", "b")
        sent = sum(each.seen()["requests"] for each in workers) - before
        assert sent == _requests(router) == 30, "not sent"


def test_a_dry_run_over_tls(workers: list[ScriptedWorker], tmp_path: Path) -> None:
    files = Lab(tmp_path / "pki").files("client", "router")
    ca, cert, key = (("--ca", files.ca), ("--cert", files.cert), ("--key", files.key))
    name = ("--server-name", "router.client.kvstore")
    (tmp_path / "body").write_text(json.dumps(ASK))

    def dry(url: str, *flags: tuple[str, object]) -> tuple[str, str]:
        """(what is printed, the error)."""
        more = [str(each) for pair in flags for each in pair]
        asked = ["explain", "--dry-run", str(tmp_path / "body"), "--router", url, "--json", *more]
        done = CliRunner().invoke(route, asked)
        return done.stdout, done.stderr or str(done.exception or "")

    tls = [str(each) for pair in (ca, cert, key) for each in pair]
    with start(tmp_path, workers, *tls) as router:
        url = router.url.replace("http:", "https:")
        (receipt,) = json.loads(dry(url, ca, cert, key, name)[0])["receipts"]
        assert receipt["chosen"] in ("a", "b")
        assert "give its own name with --server-name" in dry(url, ca, cert, key)[1]
        assert "give its CA with --ca" in dry(url, cert, key, name)[1]
        assert "it demands a certificate: give --cert and --key" in dry(url, ca, name)[1]
        assert "give both" in dry(url, ca, cert, name)[1]
        assert "are for https://" in dry(url.replace("https:", "http:"), ca)[1]
        assert "cannot be used" in dry(url, ("--ca", tmp_path / "none"))[1]
        assert "must be a URL" in dry("127.0.0.1:8080")[1]
    with start(tmp_path, workers) as router:
        pages = router.metrics_url.removesuffix("/metrics")
        assert "is no kvstore router: give the address of its --listen" in dry(pages)[1]
        assert "answered 404: there is no /v1/x here" in dry(router.url, ("--path", "/v1/x"))[1]


def _requests(router: RouterProcess) -> float:
    rows = page(router, "metrics").splitlines()
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if "router_requests_total{" in row)


def test_a_policy_is_read_again_and_a_wrong_one_refused(
    workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("models: {served: {aliases: [alias], pools: [{pool: default, served: m}]}}\n")
    with start(tmp_path, workers, "--policy", str(path)) as router:
        port = port_of(router)
        until(lambda: ask(port, ASK | {"model": "alias"})[0] == 200)
        served = "ab".index(ask(port, ASK | {"model": "alias"})[1]["x-kvstore-worker"])
        assert json.loads(workers[served].seen()["body"])["model"] == "m"
        path.write_text("policy: nonsense\n")
        router.process.send_signal(signal.SIGHUP)
        until(lambda: "the policy stays as it was" in router.log)
        assert ask(port, ASK | {"model": "alias"})[0] == 200
        path.write_text("models: {served: {aliases: [other], pools: [{pool: default}]}}\n")
        router.process.send_signal(signal.SIGHUP)
        until(lambda: ask(port, ASK | {"model": "alias"})[0] == 404)


def test_route_over_grpc(workers: list[ScriptedWorker], tmp_path: Path) -> None:
    with (
        start(tmp_path, workers, "--route-listen", "127.0.0.1:0") as router,
        grpc.insecure_channel(route_address(router)) as channel,
    ):
        stub = RouterStub(channel)
        words = Words()
        answers = stub.Route(words)
        words.say(ask=pb.Ask(model="m", keys=bytes(64), prompt_tokens=300))
        first = next(answers)
        assert first.worker in ("a", "b")
        assert first.address in [each.url for each in workers]
        words.say(failed=pb.WorkerFailed())
        second = next(answers)
        assert {first.worker, second.worker} == {"a", "b"}
        words.say(first=pb.FirstPiece())
        words.say(done=pb.Done(cached_tokens=3))
        assert list(answers) == []
        words.end()
        until(lambda: 'worker_in_flight{worker="a"} 0.0' in page(router, "metrics"))
        wrong = stub.Route(iter([pb.RouteWord(ask=pb.Ask(model="m", keys=bytes(33)))]))
        with pytest.raises(grpc.RpcError, match="32 bytes"):
            next(wrong)
        until(lambda: b'"id":"m"' in ask(port_of(router), None, "/v1/models", method="GET")[2])
        refused = next(stub.Route(iter([pb.RouteWord(ask=pb.Ask(model="zz"))])))
        assert (refused.worker, refused.status) == ("", 404)


class Words:
    """The messages of a stream, as they are said."""

    def __init__(self) -> None:
        self._queue = queue.Queue[pb.RouteWord | None]()

    def say(self, **word: Any) -> None:
        self._queue.put(pb.RouteWord(**word))

    def end(self) -> None:
        """No more: the thread of gRPC that waits for them ends."""
        self._queue.put(None)

    def __iter__(self) -> Words:
        return self

    def __next__(self) -> pb.RouteWord:
        if (word := self._queue.get(timeout=30)) is None:
            raise StopIteration
        return word


def test_every_metric_of_the_table_is_there(workers: list[ScriptedWorker], tmp_path: Path) -> None:
    from kvstore.obs.metrics import ROUTER_METRICS

    flags = ("--index", "127.0.0.1:1", "--insecure")
    with start(tmp_path, workers, *flags) as router:
        found = page(router, "metrics")
        missing = {row.name for row in ROUTER_METRICS if f"# TYPE {row.name} " not in found}
        assert missing == set()


# ── a request that is refused, its receipt and a dry run say the same ────────────────────────────


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
