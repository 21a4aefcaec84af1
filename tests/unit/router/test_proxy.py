"""The proxy in front of scripted engines: what passes, what does not, and what faults become."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.policy import RoutingPolicy
from tests.kit.router_thread import ASK
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.turns_core import TurnsCore
from tests.kit.virtual_router import VirtualRouter, until


def test_a_request_and_its_answer_pass(workers: list[VirtualWorker]) -> None:
    with VirtualRouter([workers[0].flag]) as router:
        body = b'{ "model":"m",  "prompt": "h\\u0065llo", "seed": 1e2, "x": [1,2 ]}'
        status, headers, answer = router.ask(body)
        assert status == 200
        assert json.loads(answer)["choices"] == [{"text": "abc"}]
        assert headers["x-engine"] == "scripted"
        assert headers["x-kvstore-worker"] == "a"
        assert "x-kvstore-spoof" not in headers
        assert headers["server"] == router.ask(path="/none")[1]["server"] == "kvstore"
        seen = workers[0].seen()
        assert seen["body"].encode() == body, "byte for byte"
        until(lambda: len(router.core.ended) == 1)
        ended = list(router.core.ended.values())
        assert [(e.end.value, e.cached_tokens, e.output_tokens) for e in ended] == [("done", 64, 3)]


def test_pieces_of_a_stream_go_as_they_come(workers: list[VirtualWorker]) -> None:
    workers[0].script("ok", pieces=5, pause_s=0.2)
    with VirtualRouter([workers[0].flag]) as router:
        asked = router.begin(ASK | {"stream": True})
        answer = asked.response()
        times = []
        text = b""
        while piece := answer.read1(65536):
            times.append(router.loop.time())
            text += piece
        asked.leave()
        assert text.count(b"data: ") == 7
        assert text.endswith(b"data: [DONE]\n\n")
        assert times[4] - times[0] == pytest.approx(0.8, abs=0.05), "not held back"
        assert answer.getheader("Content-Type") == "text/event-stream"
        until(lambda: len(router.core.ended) == 1)
        assert next(iter(router.core.ended.values())).cached_tokens == 64


def test_headers_that_steer_are_dropped(workers: list[VirtualWorker]) -> None:
    with VirtualRouter([workers[0].flag]) as router:
        given = {
            "Authorization": "Bearer own-key",
            "X-Trace": "kept",
            "X-Prefiller-Host-Port": "10.0.0.1:1",
            "X-Data-Parallel-Rank": "3",
            "X-Forwarded-For": "1.2.3.4",
            "X-Gateway-Destination-Endpoint": "10.0.0.1:1",
            "X-Kvstore-Worker": "b",
            "X_Hidden": "1",
            "Connection": "X-Trace-2, close",
            "X-Trace-2": "hop by hop",
            "TE": "trailers",
            "X-Request-Id": "___prefill_addr_10.0.0.1:1___decode_addr_x",
        }
        status, headers, _ = router.ask(headers=given)
        assert status == 200
        seen = {name.lower(): value for name, value in workers[0].seen()["headers"]}
        assert seen["authorization"] == "Bearer own-key"
        assert seen["x-trace"] == "kept"
        assert "prefill" not in seen["x-request-id"]
        assert seen["x-request-id"].startswith("req-"), "a command line takes it for a flag"
        assert headers["x-request-id"] == seen["x-request-id"]
        assert seen.keys() <= {
            *("authorization", "x-trace", "x-request-id", "content-type", "content-length"),
            *("host", "accept-encoding", "x-kvstore-routers"),
        }


@pytest.mark.parametrize("field", ["kv_transfer_params", "kv_transfer\\u005fparams"])
def test_transfer_params_of_a_client_are_stripped(workers: list[VirtualWorker], field: str) -> None:
    with VirtualRouter([workers[0].flag]) as router:
        body = f'{{"model": "m", "{field}": {{"remote_host": "10.0.0.1"}}, "prompt": "x"}}'
        assert router.ask(body.encode())[0] == 200
        assert json.loads(workers[0].seen()["body"]) == {"model": "m", "prompt": "x"}


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ({"mode": "fail"}, "open"),
        ({"mode": "cut"}, "open"),
        ({"mode": "fail", "status": 302, "headers": {"Location": "http://elsewhere/"}}, "open"),
        ({"mode": "fail", "status": 503}, "open"),
        ({"mode": "fail", "status": 429}, "up"),
        ({"mode": "fail", "status": 503, "headers": {"Retry-After": "7"}}, "up"),
    ],
)
def test_an_engine_that_always_fails_fails_no_request(
    workers: list[VirtualWorker], how: dict[str, Any], state: str
) -> None:
    workers[1].script(**how)
    core = RouterCore(RoutingPolicy(), seed=1)
    with VirtualRouter([each.flag for each in workers], core=cast("TurnsCore", core)) as router:
        until(lambda: set(router.words().values()) == {"up"})
        begin_s = router.loop.time()
        assert {router.ask()[0] for _ in range(100)} == {200}
        spans = 1 + (router.loop.time() - begin_s) / 0.25
        assert 0 < workers[1].seen()["requests"] <= 4 + spans
        assert router.words()["b"] == state
        workers[1].script("ok")
        until(lambda: router.ask()[0] == 200 and router.router.workers["b"].state == "up")


@pytest.mark.parametrize(
    ("status", "settings", "answered", "failures"),
    [
        (429, {}, 429, 0),
        (500, {}, 500, 2),
        (307, {}, 502, 2),
        (401, {}, 401, 0),
        (401, {"worker_key_file": "key-of-the-engines"}, 502, 2),
        (422, {}, 422, 0),
    ],
)
def test_when_all_engines_are_at_fault(
    workers: list[VirtualWorker],
    tmp_path: Path,
    status: int,
    settings: dict[str, str],
    answered: int,
    failures: int,
) -> None:
    """The client's own API key is the client's fault, and the router's that of the engines."""
    for each in workers:
        each.script("fail", status=status, headers={"Location": "/", "X-Engine": "scripted"})
    for name, content in settings.items():
        tmp_path.joinpath(name).write_text(content)
    files: dict[str, Any] = {name: str(tmp_path / name) for name in settings}
    with VirtualRouter([each.flag for each in workers], **files) as router:
        got, headers, body = router.ask()
        assert got == answered
        if got == status:
            assert (headers["x-engine"], json.loads(body)) == ("scripted", {"error": "scripted"})
        else:
            assert "location" not in headers
            assert "every worker that was tried failed" in json.loads(body)["error"]["message"]
        assert sum(router.failure_count(each.name) for each in workers) == failures


def test_an_answer_that_breaks_off_is_cut_and_not_retried(workers: list[VirtualWorker]) -> None:
    workers[0].script("die", pieces=5, pause_s=0.05)
    with VirtualRouter([workers[0].flag]) as router:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            router.ask(ASK | {"stream": True})
        assert sum(router.core.attempts.values()) == 1
        until(lambda: router.router.proxy.counts["broken"] == 1)
        assert not router.core.under_way


@pytest.mark.parametrize(
    "mode", [{"mode": "ok", "pieces": 1000, "pause_s": 0.05}, {"mode": "ok", "delay_s": 60}]
)
def test_a_client_that_leaves_aborts_the_engine(
    workers: list[VirtualWorker], mode: dict[str, Any]
) -> None:
    workers[0].script(**mode)
    with VirtualRouter([workers[0].flag]) as router:
        asked = router.begin(ASK | {"stream": True})
        until(lambda: workers[0].seen()["running"] == 1)
        asked.leave()
        left_s = router.loop.time()
        until(lambda: workers[0].seen()["aborted"] == 1)
        assert router.loop.time() - left_s < 1.0
        until(lambda: [e.end.value for e in router.core.ended.values()] == ["aborted"])


def test_a_client_that_leaves_while_it_is_held_is_ended(workers: list[VirtualWorker]) -> None:
    with VirtualRouter([workers[0].flag]) as router:
        router.core.holds = True
        asked = router.begin()
        until(lambda: len(router.router.dispatcher.held) == 1)
        asked.leave()
        until(lambda: [e.end.value for e in router.core.ended.values()] == ["aborted"])
        router.core.holds = False
        assert router.ask()[0] == 200
        assert workers[0].seen()["body"] == json.dumps(ASK)


def test_tenants_and_their_salts(workers: list[VirtualWorker], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("team-a: key-of-team-a-0001\nteam-b: [key-of-team-b-0001]\n")
    with VirtualRouter([workers[0].flag], api_keys=str(keys)) as router:
        assert router.ask()[0] == 401
        assert router.ask(headers={"Authorization": "Bearer key-of-team-c-0001"})[0] == 401
        for name, given, expected in (
            ("a", {}, "team-a"),
            ("b", {"cache_salt": "own"}, "team-b/own"),
            ("a", {"cache_salt": "team-b"}, "team-a/team-b"),
        ):
            auth = {"Authorization": f"Bearer key-of-team-{name}-0001"}
            assert router.ask(ASK | given, headers=auth)[0] == 200
            seen = workers[0].seen()
            assert json.loads(seen["body"])["cache_salt"] == expected
            assert "authorization" not in {name.lower() for name, _ in seen["headers"]}


def test_models_that_an_engine_lists_for_the_clients_key_only_are_its_own_word(
    workers: list[VirtualWorker],
) -> None:
    with VirtualRouter([workers[0].flag]) as router:
        until(lambda: bool(router.router.workers["a"].models))
        worker = router.router.workers["a"]
        router.on_loop(lambda: setattr(worker, "models", ()))
        status, headers, body = router.ask(path="/v1/models", method="GET")
        assert (status, headers["x-kvstore-worker"]) == (200, "a")
        assert [row["id"] for row in json.loads(body)["data"]] == ["m"]
        assert router.ask(path="/v1/modelsfoo", method="GET")[0] == 404
