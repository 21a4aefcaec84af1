"""Odd but valid requests get from the router what vLLM's HTTP server would have answered."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.router.front.door import HEAD_BYTES_MAX
from tests.kit.uvicorn_engine import MANAGED, UvicornEngine
from tests.kit.virtual_loop import VirtualLoop
from tests.kit.virtual_router import VirtualRouter, until, virtual_loop

pytestmark = pytest.mark.usefixtures("virtual")
Pair = tuple[UvicornEngine, UvicornEngine]


@pytest.fixture
def pair(virtual: VirtualLoop) -> Pair:
    return UvicornEngine(), UvicornEngine()


@pytest.fixture
def router(pair: Pair) -> Iterator[VirtualRouter]:
    with routed(pair[0].flag("a"), pair[1].flag("b")) as started:
        yield started


@contextlib.contextmanager
def routed(*flags: str, **settings: Any) -> Iterator[VirtualRouter]:
    """Which has read the models of all."""
    with VirtualRouter(flags, **settings) as started:
        until(lambda: all(worker.models for worker in started.router.workers))
        yield started


# ── heads ────────────────────────────────────────────────────────────────────────────────────────

BODY = b'{"model":"m","prompt":"x"}'
LINE = b"POST /v1/completions HTTP/1.1\r\n"
KINDS = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(BODY)


def head(*lines: bytes, line: bytes = LINE) -> bytes:
    return line + b"Host: x\r\n" + KINDS + b"".join(each + b"\r\n" for each in lines) + b"\r\n"


def status(port: int, text: bytes) -> int:
    """Status of the answer to bytes; 0: there is none."""
    with virtual_loop().connected(("127.0.0.1", port), 20) as client:
        client.sendall(text)
        answer = http.client.HTTPResponse(cast("Any", client), method="POST")
        try:
            answer.begin()
        except (http.client.HTTPException, ConnectionError):
            return 0
        return answer.status


HEADS = {
    "plain": head(),
    "60 KB in one line": head(b"X: " + b"x" * 60_000),
    "3 MB in one line": head(b"X: " + b"x" * 3_000_000),
    "3 MB in many lines": head(*(b"X-%d: %b" % (n, b"x" * 30_000) for n in range(100))),
    "a target of 60 KB": head(line=b"POST /v1/completions?" + b"q" * 60_000 + b" HTTP/1.1\r\n"),
    "5000 headers": head(*(b"X-%d: x" % n for n in range(5000))),
    "another expectation": head(b"Expect: foo"),
    "an empty expectation": head(b"Expect:"),
    "HTTP/1.0 without a host": LINE.replace(b"1.1", b"1.0") + KINDS + b"\r\n",
    "an upgrade that no engine knows": head(b"Connection: Upgrade", b"Upgrade: h2c"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_an_engine_takes_is_taken(router: VirtualRouter, pair: Pair, name: str) -> None:
    for port in (pair[0].port, router.port):
        assert status(port, HEADS[name] + BODY) == 200


def test_long_heads_use_the_memory_of_bodies_and_give_it_back(router: VirtualRouter) -> None:
    left = router.on_loop(lambda: router.router.intake.bodies.left)
    endless = head(b"X: " + b"x" * HEAD_BYTES_MAX)[:-2]
    assert status(router.port, endless) == 400
    with router.connected() as client:
        client.sendall(endless[: 1 << 20])
        until(lambda: left - router.router.intake.bodies.left == (1 << 20) - (32 << 10))
    until(lambda: router.router.intake.bodies.left == left)
    router.on_loop(lambda: router.router.intake.bodies.take(left))
    assert status(router.port, endless) == 503
    assert status(router.port, HEADS["60 KB in one line"] + BODY) == 503
    assert status(router.port, head()[:-2] + b"Content-Length: 0\r\n\r\n") == 400


def test_heads_that_never_end_leave_memory_for_bodies(
    pair: Pair,
) -> None:
    with routed(pair[0].flag("a"), body_max=1 << 20) as router, contextlib.ExitStack() as clients:
        refused = 0
        for _ in range(10):
            client = clients.enter_context(router.connected(timeout_s=0.5))
            client.sendall(head(b"X: " + b"x" * 1_000_000)[:-4])
            with contextlib.suppress(TimeoutError, ConnectionError):
                refused += client.recv(12) == b"HTTP/1.1 503"
        assert refused >= 6
        big = b"Content-Length: 900000\r\n\r\n"
        text = LINE + b"Host: x\r\nContent-Type: application/json\r\n" + big
        assert status(router.port, text + BODY.ljust(900_000)) == 200


# ── paths ────────────────────────────────────────────────────────────────────────────────────────

ASKED: list[tuple[str, str, bytes | None]] = [
    ("GET", "/version", None),
    ("GET", "/load?of=all&x=%20", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/openapi.json", None),
    ("POST", "/invocations", b'{"model": "m", "prompt": "x"}'),
    ("POST", "/invocations", b"no JSON \xff"),
    ("POST", "/inference/v1/generate", b'{"token_ids": [1, 2]}'),
    ("POST", "/v1/completions/render", b'{"model":"m","prompt":"x"}'),
    ("POST", "/v1/models/m/warm", b"[]"),
    ("POST", "/v1/new", b'{"a": "kv_transfer_params", "b": "\\u0041"}'),
    ("PUT", "/v1/files/b%20c", b"\0" * 300_000),
    ("PATCH", "/v1/files/b%20c", b"x"),
    ("DELETE", "/v1/files/b%20c", None),
    ("GET", "/v1/files/b%20c", None),
    ("GET", "/v1/nothing", None),
    ("POST", "/version", b"{}"),
    ("POST", "/v1/models", b"{}"),
    ("POST", "/v2/models/lightweight-lora/versions/1/infer", b"{}"),
]


def ask(port: int, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Its status and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.sock = cast("Any", virtual_loop().connected(("127.0.0.1", port), 20))
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", "X-A": "b"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_path_that_the_router_does_not_know_is_the_engines(
    router: VirtualRouter, pair: Pair
) -> None:
    for method, path, body in ASKED:
        expected = ask(pair[0].port, method, path, body)
        for each in pair:
            each.seen.clear()
        status, content = ask(router.port, method, path, body)
        assert b"path" in content, (method, path, body, content)
        assert (status, json.loads(content)["path"]) == (
            expected[0],
            json.loads(expected[1])["path"],
        )
        seen = [each for engine in pair for each in engine.seen]
        assert {each[:2] + each[3:] for each in seen} == {(method, path, body or b"")}
        assert len(seen) == (2 if status == 404 else 1), "another engine may have it"
        assert (b"x-a", b"b") in seen[0][2]


def test_both_engines_get_their_share_of_such_requests(router: VirtualRouter, pair: Pair) -> None:
    for _ in range(40):
        assert ask(router.port, "GET", "/version", None)[0] == 200
    assert min(len(each.seen) for each in pair) > 5


MORE_MANAGED = (
    *("/metrics", "/metrics/x", "/metricsx", "/prometheus/metrics", "/perf_metrics"),
    *("/steady_clock_offset", "/dumper/configure", "/remove_external_corpus", "/api/signout"),
    *("/get_remote_instance_transfer_engine_info", "/v1/model/load", "/v2/models/m/trace/setting"),
)
"""Those of other engines; vLLM and SGLang answer all that begins with `/metrics`."""


def test_management_of_engines_and_the_routers_own_paths_are_not_passed_on(
    router: VirtualRouter, pair: Pair
) -> None:
    for path in (*MANAGED, *MORE_MANAGED, "/%73leep", "/kvstore/x", "/kvstore/explain/version"):
        for method in ("GET", "POST"):
            assert ask(router.port, method, path, b"{}")[0] == 404, path
    assert ask(router.port, "HEAD", "/version", None)[0] == 405, "as FastAPI"
    assert ask(router.port, "GET", "/ping", None) == (200, b"ok")
    assert [each for engine in pair for each in engine.seen] == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"sampling_params": {"extra_args": [{"kv_transfer_params": {"remote_host": "evil"}}]}}',
        b'{"text": "x", "bootstrap_\\u0068ost": "evil"}',
        '{"text": "x", "bootstrap_host": "evil"}'.encode("utf-16"),
    ],
)
def test_no_such_request_steers_an_engine(router: VirtualRouter, pair: Pair, body: bytes) -> None:
    status, content = ask(router.port, "POST", "/inference/v1/generate", body)
    assert (status, b"a field that no client may set" in content) == (400, True)
    assert [each for engine in pair for each in engine.seen] == []


def test_it_goes_to_an_engine_that_serves_its_model_and_that_works() -> None:
    one, other = UvicornEngine("m"), UvicornEngine("n")
    with routed(one.flag("a"), other.flag("b")) as router:
        for _ in range(20):
            assert ask(router.port, "POST", "/invocations", b'{"model": "n"}')[0] == 200
        assert one.seen == []
    with VirtualRouter(["c=http://127.0.0.1:1", other.flag("b")]) as router:
        for _ in range(10):
            assert ask(router.port, "GET", "/version", None)[0] == 200


def test_what_may_have_had_an_effect_is_not_repeated_elsewhere() -> None:
    one, other = UvicornEngine("m"), UvicornEngine("m")
    with routed(one.flag("a"), other.flag("b")) as router:
        for status, method, times in ((500, "POST", 1), (500, "GET", 2), (429, "POST", 2)):
            one.status = other.status = status
            path = "/load" if method == "GET" else "/invocations"
            assert ask(router.port, method, path, b"{}" if times == 1 else None)[0] == status
            assert len(one.seen) + len(other.seen) == times, (status, method)
            one.seen.clear()
            other.seen.clear()


def test_without_a_worker_such_a_request_may_be_tried_again() -> None:
    with VirtualRouter(["a=http://127.0.0.1:9"]) as router:
        router.on_loop(lambda: router.router.workers.replace([]))
        for path in ("/version", "/v1/models"):
            assert ask(router.port, "GET", path, None)[0] == 503
        assert ask(router.port, "GET", "/v1/responses/resp_1", None)[0] == 404


def test_tenants_reach_only_paths_whose_bodies_get_their_salt(pair: Pair, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("team-a: key-of-team-a-0001\n")
    with routed(pair[0].flag("a"), api_keys=str(keys), insecure=True) as router:
        headers = {"Authorization": "Bearer key-of-team-a-0001"}
        assert router.ask(path="/version", method="GET", headers=headers)[0] == 200
        assert router.ask(path="/version", method="GET")[0] == 401
        for path, method in (("/invocations", "POST"), ("/openapi.json", "GET")):
            assert router.ask(path=path, method=method, headers=headers)[0] == 404
        assert router.ask(path="/ping", method="GET")[0] == 200


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_that_was_just_loaded_is_not_answered_by_an_engine_that_takes_any_name() -> None:
    lists, takes_any = UvicornEngine("m"), UvicornEngine("base")
    with routed(lists.flag("a"), takes_any.flag("b", ",kind=openai")) as router:
        body = {"model": "any", "prompt": "x"}
        for _ in range(5):
            assert router.ask(body)[1]["x-kvstore-worker"] == "b"
        lists.adapters.append("sql")
        for _ in range(5):
            assert router.ask(body | {"model": "sql"})[1]["x-kvstore-worker"] == "a"


def test_a_name_that_is_looked_for_does_not_wait_each_time() -> None:
    lists, takes_any = UvicornEngine("m"), UvicornEngine("base")
    with routed(lists.flag("a"), takes_any.flag("b", ",kind=openai")) as router:
        before = lists.lists_read
        for _ in range(30):
            assert router.ask({"model": "any", "prompt": "x"})[0] == 200
        assert lists.lists_read - before < 10, "a round of reading now and then, not thirty"
