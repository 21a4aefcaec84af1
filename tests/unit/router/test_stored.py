"""Requests about stored responses, and those of browsers, through a router in virtual time; ids by
which every router finds the worker that keeps a response."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import Worker
from kvstore.router.front.answers import (
    PREFIX,
    RESPONSES,
    TAG_DIGITS,
    id_for,
    is_of,
    new_id,
    tag,
    worker_of,
)
from kvstore.router.front.intake import BODY_STALL_S, peek
from kvstore.router.front.paths import STORED
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from tests.kit.router_thread import STEADY, Answer
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

UNKNOWN = "/v1/responses/resp_unknown"
ASK = b'{"model":"m","input":"hello"}'
PREFLIGHT = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
ORIGIN = {"Origin": PREFLIGHT["Origin"]}


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
@pytest.mark.parametrize("names", [[], ["Origin"], ["Access-Control-Request-Method"]])
def test_other_methods_reach_no_engine(
    worker: VirtualWorker, method: str, names: list[str]
) -> None:
    """With one of both headers, `OPTIONS` is no question of a browser."""
    headers = {name: PREFLIGHT[name] for name in names}
    with routed(worker) as router:
        status, _, body = router.ask(path=UNKNOWN, method=method, headers=headers)
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


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────


PLACES = [("http://10.0.0.1:8000", 0), ("http://10.0.0.2:8000", 0), ("http://10.0.0.2:8000", 1)]


def workers(names: str, **more: Any) -> list[Worker]:
    return [
        Worker(WorkerAddress(name=name, url=url, rank=rank, **more))
        for name, (url, rank) in zip(names, PLACES, strict=True)
    ]


def test_routers_that_name_and_order_engines_otherwise_agree() -> None:
    ours, theirs = workers("abc"), workers("xyz", pool="other", node="n", engine="e")[::-1]
    for worker in ours:
        made = new_id(worker, "")
        assert worker_of(made, ours) is worker
        found = worker_of(made, theirs)
        assert found is not None
        assert (found.url, found.address.rank) == (worker.url, worker.address.rank)


def test_ids_are_new_each_time_and_fit_into_a_path() -> None:
    [worker, *_] = workers("abc")
    made = {new_id(worker, "") for _ in range(100)}
    assert len(made) == 100
    assert {len(each) for each in made} == {len(PREFIX) + 32}, "as long as those of vLLM"
    assert all(STORED.fullmatch(f"/v1/responses/{each}") for each in made)


TAGS = [tag(each) for each in workers("abc")]
IDS = st.one_of(
    st.text(),
    st.binary(max_size=64).map(lambda raw: PREFIX + raw.decode("latin-1")),
    st.tuples(
        st.sampled_from(["", PREFIX, "resp", "resp-", "RESP_", " " + PREFIX]),
        st.sampled_from([*TAGS, *map(str.upper, TAGS), TAGS[0][:-1], "0" * TAG_DIGITS]),
        st.sampled_from(["", "00", "0" * 24]),
    ).map("".join),
)


@given(IDS, st.integers(0, 3))
def test_an_id_is_of_the_worker_whose_tag_it_has_as_it_is_written(given_id: str, left: int) -> None:
    ours = workers("abc")[left:]
    wanted = given_id[len(PREFIX) :][:TAG_DIGITS] if given_id.startswith(PREFIX) else ""
    assert worker_of(given_id, ours) is next((w for w in ours if tag(w) == wanted), None)


def test_a_response_is_that_of_its_tenant() -> None:
    ours = workers("abc")
    made = new_id(ours[0], "a")
    assert is_of(made, "a", ours)
    assert not is_of(made, "b", ours)
    assert is_of(made, "", ours), "without API keys there is one tenant"
    assert is_of("resp_made_by_an_engine", "b", ours)


def test_an_id_of_the_clients_choice_would_say_no_tenant() -> None:
    worker, chosen = workers("abc")[0], peek(b'{"request_id": "mine"}')
    assert id_for(worker, RESPONSES, chosen, "") == {}
    assert is_of(id_for(worker, RESPONSES, chosen, "a")["request_id"], "a", [worker])
    knows_no_id = workers("abc", kind="openai")[0]
    assert id_for(knows_no_id, RESPONSES, peek(b"{}"), "a") == {}


# ── several engines and two routers: each follow-up goes where it has to ─────────────────────────


PATH = "/v1/responses"


@contextmanager
def routers(engines: list[VirtualWorker]) -> Iterator[list[VirtualRouter]]:
    """Two of them, which name and order the engines otherwise."""
    flags = [each.flag for each in engines]
    others = [f"other-{flag}" for flag in reversed(flags)]
    with ExitStack() as stack:
        found = [
            VirtualRouter(each, core=RouterCore(parse(STEADY), seed=1)) for each in (flags, others)
        ]
        for router in found:
            stack.enter_context(router)
        until(lambda: all(each.models for router in found for each in router.router.workers))
        yield found


def counts(engines: list[VirtualWorker]) -> list[int]:
    return [each.seen()["requests"] for each in engines]


def all_about(engines: list[VirtualWorker]) -> list[str]:
    return [asked for each in engines for asked in about(each)]


class Conversation:
    """Turns that go on from each other. `session`: given in a header; empty: none."""

    def __init__(self, number: int, session: str) -> None:
        self.number, self.headers = number, {"X-Session-Id": session} if session else {}
        self.before, self.keeper, self.turn = "", "", 0

    def go_on(self, router: VirtualRouter) -> int:
        """The status of its next turn; every third one is streamed."""
        self.turn += 1
        body: dict[str, Any] = {"model": "m", "input": f"{self.number}: turn {self.turn}"}
        if self.before:
            body["previous_response_id"] = self.before
        is_streamed = self.turn % 3 == 0
        status, headers, answer = router.ask(
            body | {"stream": is_streamed}, PATH, headers=self.headers
        )
        if status == 200:
            last = answer.rpartition(b"data: ")[2] if is_streamed else answer
            made = json.loads(last)
            self.before = made["response"]["id"] if is_streamed else made["id"]
            self.keeper = headers["x-kvstore-worker"].removeprefix("other-")
        return status


@pytest.mark.parametrize("session", ["", "conversation"])
def test_follow_ups_at_either_router_are_served_by_the_engine_that_has_the_response(
    engines: list[VirtualWorker], session: str
) -> None:
    del engines[3:]
    with routers(engines) as pair:
        talks = [Conversation(n, session and f"{session}-{n}") for n in range(12)]
        assert [talk.go_on(pair[talk.number % 2]) for talk in talks] == [200] * 12
        homes = [talk.keeper for talk in talks]
        assert set(homes) == {"a", "b", "c"}, "cold ones spread"
        found = [talk.go_on(pair[(talk.number + turn) % 2]) for turn in range(3) for talk in talks]
        assert found == [200] * 36
        assert [talk.keeper for talk in talks] == homes
        assert sum(counts(engines)) == 12 + 36, "each at the first try"
        asked = len(all_about(engines))
        for number, talk in enumerate(talks):
            for router in pair:
                status, headers, body = router.ask(path=f"{PATH}/{talk.before}", method="GET")
                assert (status, json.loads(body)["id"]) == (200, talk.before)
                assert headers["x-kvstore-worker"].removeprefix("other-") == talk.keeper
                path = f"{PATH}/{talk.before}/cancel"
                status, _, body = router.ask(path=path)
                assert (status, b"Cannot cancel a synchronous response" in body) == (400, True)
                status, headers, _ = router.ask(path=f"{PATH}/{talk.before}", method="DELETE")
                assert status == 405, "the engine's own word: vLLM deletes none"
                assert headers["x-kvstore-worker"].removeprefix("other-") == talk.keeper
            assert len(all_about(engines)) == asked + 4 * (number + 1), "nobody else was asked"


HOSTILE: list[Any] = [
    *("resp_unknown", "resp_", "x", "../../models", "a\x00b", "é\ud83d\ude00", "%2e%2e"),
    *("resp_" + "0" * 200, "x" * 20_000, "resp_\r\nX-Injected: 1"),
    *(7, -1, True, 1e300, [], ["resp_x"], {}, {"id": "resp_x"}),
]


def test_an_id_that_no_engine_has_gets_the_word_of_the_engines_and_harms_nobody(
    engines: list[VirtualWorker],
) -> None:
    del engines[4:]
    with routers(engines) as (router, _):
        tagged = [PREFIX + tag(worker) for worker in router.router.workers]
        for given in [*HOSTILE, *tagged]:
            before = sum(counts(engines))
            body = {"model": "m", "input": "x", "previous_response_id": given}
            status, headers, answer = router.ask(body, PATH)
            tried = sum(counts(engines)) - before
            if isinstance(given, str):
                assert (status, b"not found" in answer) == (404, True), given
                assert tried == (1 if given in tagged else 4), given
            else:
                assert (status, tried) == (400, 1), given
            assert "x-injected" not in headers
        for name in ("resp_unknown", tagged[0], "x" * 256):
            status, _, answer = router.ask(path=f"{PATH}/{name}", method="GET")
            assert (status, b"not found" in answer) == (404, True)
        asked = all_about(engines)
        for name in ("..%2f..%2fmetrics", "a%00b", "a%0d%0aX:1", "x" * 257, "a/b", "%ff", ""):
            status, _, answer = router.ask(path=f"{PATH}/{name}", method="GET")
            assert (status, "error" in json.loads(answer)) == (404, True), name
        assert all_about(engines) == asked
        assert router.ask()[0] == 200
        assert router.words() == dict.fromkeys("abcd", "up")
