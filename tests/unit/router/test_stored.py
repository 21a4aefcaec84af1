"""Requests about stored responses, and those of browsers, through a router in virtual time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.router.front.answers import new_id
from kvstore.router.front.intake import BODY_STALL_S
from tests.kit.router_thread import Answer
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

UNKNOWN = "/v1/responses/resp_unknown"
ASK = b'{"model":"m","input":"hello"}'
PREFLIGHT = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
ORIGIN = {"Origin": PREFLIGHT["Origin"]}


@pytest.fixture
def engines(crew: dict[str, VirtualWorker]) -> list[VirtualWorker]:
    return [crew[name] for name in "abc"]


@contextmanager
def routed(*engines: VirtualWorker, **settings: Any) -> Iterator[VirtualRouter]:
    with VirtualRouter([each.flag for each in engines], **settings) as router:
        until(lambda: set(router.words().values()) == {"up"})
        yield router


def get(router: VirtualRouter, path: str = UNKNOWN, **headers: str) -> Answer:
    return router.ask(path=path, method="GET", headers=headers)


def about(engine: VirtualWorker) -> list[str]:
    """Questions about stored responses that it got."""
    found: list[str] = engine.seen().get("about", [])
    return found


def test_an_id_that_no_router_made_is_looked_for_at_all_engines(
    engines: list[VirtualWorker],
) -> None:
    engines[2].keep("resp_unknown")
    with routed(*engines) as router:
        status, headers, body = get(router)
        assert (status, json.loads(body)) == (200, {"of": "c"})
        assert headers["x-kvstore-worker"] == "c"
        before = [len(about(each)) for each in engines]
        assert get(router, UNKNOWN + "_too")[0] == 404
        assert [len(about(each)) for each in engines] == [count + 1 for count in before]


def test_engines_that_answer_no_probe_are_asked_where_there_are_no_others(
    worker: VirtualWorker,
) -> None:
    worker.keep("resp_unknown")
    with VirtualRouter([worker.flag]) as router:  # not probed yet
        assert get(router)[0] == 200
        until(lambda: router.words() == {"a": "up"})
        worker.port.kill()
        until(lambda: router.words() == {"a": "down"})
        assert get(router)[0] == 502
        worker.port.listen()
        assert get(router)[0] == 200


def test_an_answer_that_breaks_off_is_cut_and_no_other_engine_is_asked(
    engines: list[VirtualWorker],
) -> None:
    for each in engines:
        each.keep("resp_unknown")
        each.script("half")
    with routed(*engines) as router:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)) as broken:
            get(router)
        if isinstance(broken.value, http.client.IncompleteRead):
            assert broken.value.partial == b"half of "
        assert sum(len(about(each)) for each in engines) == 1


@pytest.mark.parametrize("method", ["HEAD", "PUT", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_reach_no_engine(worker: VirtualWorker, method: str) -> None:
    with routed(worker) as router:
        status, _, body = router.ask(path=UNKNOWN, method=method)
    assert status == 405
    assert b"takes GET, POST, DELETE" in body or method == "HEAD", "which has no body"
    assert not about(worker)


def test_a_body_has_the_bounds_of_all_bodies(worker: VirtualWorker) -> None:
    worker.keep("resp_unknown")
    with routed(worker, body_max="1024") as router:

        def post(body: bytes, **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return router.ask(body, UNKNOWN, headers=named)[0]

        assert post(b"x" * 1025) == 413
        assert post(b"", Content_Length="1", Transfer_Encoding="chunked") == 400
        assert post(b"x", Content_Encoding="gzip") == 415
        before_s = router.loop.time()
        assert post(b"", Content_Length="9") == 408
        assert router.loop.time() - before_s == pytest.approx(BODY_STALL_S, abs=1)
        assert not about(worker)
        assert post(b"x" * 1024) == 200
        assert (about(worker), worker.seen()["about_body"]) == ([f"POST {UNKNOWN}"], "x" * 1024)
        fresh = router.on_loop(lambda: type(router.router.intake.bodies)(bytes_max=1024))
        assert router.router.intake.bodies.left == fresh.left


def test_a_body_that_pauses_for_minutes_is_waited_for(worker: VirtualWorker) -> None:
    worker.keep("resp_unknown")
    with routed(worker) as router, router.connected() as client:
        client.sendall(
            f"POST {UNKNOWN} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nla".encode()
        )
        router.pass_time(500)
        client.sendall(b"te")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert (about(worker), worker.seen()["about_body"]) == ([f"POST {UNKNOWN}"], "late")


def test_a_tenant_needs_its_key_for_a_stored_response(
    worker: VirtualWorker, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("team-a: key-of-sixteen-characters\n")
    key = "key-of-sixteen-characters"
    worker.keep("resp_unknown")
    with routed(worker, api_keys=str(tmp_path / "keys")) as router:
        assert get(router)[0] == 401
        assert get(router, **{"X-Api-Key": key})[0] == 200
        assert get(router, Authorization=f"bearer {key}")[0] == 200
    assert len(about(worker)) == 2


def test_a_tag_leads_nowhere_but_to_a_worker(engines: list[VirtualWorker]) -> None:
    with routed(*engines) as router:
        engines[1].keep(made := new_id(router.router.workers["a"], ""))
        path = f"/v1/responses/{made}"
        assert get(router, path)[0] == 404, "its keeper says so"
        engines[0].port.kill()
        assert get(router, path)[0] == 502
    assert not about(engines[1])


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [(None, "*"), (["https://chat.example"], "https://chat.example"), (["https://x"], None)],
)
def test_browsers_ask_first_and_get_no_server_name(
    worker: VirtualWorker, origins: list[str] | None, allowed: str | None
) -> None:
    with routed(worker, **({"allowed_origins": origins} if origins else {})) as router:
        wanted = PREFLIGHT | {"Access-Control-Request-Headers": "authorization, content-type"}
        first = router.ask(method="OPTIONS", headers=wanted)
        assert first[0] == (204 if allowed else 403)
        if allowed:
            named = first[1]["access-control-allow-headers"]
            assert named == "authorization, content-type"
        else:
            assert json.loads(first[2])["error"]["code"] == "origin"
        answers = [
            router.ask(ASK, "/v1/responses", headers=ORIGIN),
            *(get(router, path, **ORIGIN) for path in ("/v1/models", "/livez", "/nowhere")),
        ]
    assert [status for status, *_ in answers] == [200, 200, 200, 404]
    for _, headers, _ in (first, *answers):
        assert headers["server"] == "kvstore"
        assert headers["x-request-id"]
        assert headers.get("access-control-allow-origin") == allowed


def test_options_of_no_browser_are_refused(worker: VirtualWorker) -> None:
    with routed(worker) as router:
        for names in ([], ["Origin"], ["Access-Control-Request-Method"]):
            headers = {name: PREFLIGHT[name] for name in names}
            assert router.ask(method="OPTIONS", headers=headers)[0] == 405
    assert worker.seen()["requests"] == 0
