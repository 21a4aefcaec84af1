"""Requests about stored responses, and those of browsers, through a router in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from yarl import URL

from kvstore.config.router import load_router_config
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.front.answers import PREFIX, new_id, tag
from kvstore.router.front.intake import BODY_STALL_S
from kvstore.router.process import Router
from tests.kit.coroutines import driven
from tests.kit.virtual_loop import VirtualLoop

UNKNOWN = "/v1/responses/resp_unknown"
ASK = b'{"model":"m","input":"hello"}'
PREFLIGHT = ["Origin: https://chat.example", "Access-Control-Request-Method: POST"]


class Got(NamedTuple):
    """Status 0: the connection broke."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Whole:
    """One answer, as an AnswerTaker."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        self.pieces.append(piece)
        if is_over:
            self.done.set_result(True)

    def broke(self, why: str, *, is_stale: bool) -> None:
        self.done.set_result(False)


class Keeper:
    """An engine that stores responses. `cuts`: its answers break off."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name, self.has, self.cuts = name, set[str](), False
        self.seen: list[tuple[str, str, bytes]] = []
        """(method, path, body), probes left out."""
        self.made: list[dict[str, Any]] = []
        self.port = loop.serve(web.Server(self._answer, access_log=None))
        self.flag = "{}=http://{}:{}".format(name, *self.port.port)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in ("/metrics", "/health", "/v1/models"):
            return web.json_response({"data": [{"id": "m"}]})
        body = await request.read()
        self.seen.append((request.method, request.path, body))
        if request.path == "/v1/responses":
            self.made.append(json.loads(body))
            return web.json_response({"id": self.made[-1].get("request_id")})
        if not self.has & set(request.path.split("/")):
            return web.json_response({"error": "not found"}, status=404)
        if not self.cuts:
            return web.json_response({"of": self.name})
        out = web.StreamResponse()
        await out.prepare(request)
        await out.write(b"half of ")
        await asyncio.sleep(1)
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError


class Site:
    def __init__(self, loop: VirtualLoop, router: Router, engines: list[Keeper]) -> None:
        self.loop, self.router, self.engines = loop, router, engines
        self.url = URL("http://{}:{}".format(*loop.serve(router.door).port))

    async def ask(self, method: str, path: str, *more: str, body: bytes = b"") -> Got:
        head = [f"{method} {path} HTTP/1.1", "Host: router", *more]
        head += [f"Content-Length: {len(body)}"] * bool(body)
        connection = await EngineHttp(None).place(self.url).connected()
        whole = _Whole()
        connection.ask("\r\n".join([*head, "", ""]).encode(), body, whole)
        async with asyncio.timeout(1000):
            is_whole = await whole.done
        headers = {name.decode().lower(): value.decode() for name, value in connection.headers}
        connection.abort()
        return Got(connection.status * is_whole, headers, b"".join(whole.pieces))

    async def words(self, word: str) -> None:
        """Until all workers have it."""
        async with asyncio.timeout(60):
            while {w.word.value for w in self.router.workers} != {word}:  # noqa: ASYNC110 - of the core
                await asyncio.sleep(0.1)


@asynccontextmanager
async def site(count: int, **settings: Any) -> AsyncIterator[Site]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    engines = [Keeper(loop, "abc"[number]) for number in range(count)]
    flags = [each.flag for each in engines]
    given = {"listen": "127.0.0.1:0", "metrics": "off", "worker": flags, **settings}
    router = Router(load_router_config(None, given), clock=loop.clock_ns)
    try:
        await router.begin()
        yield Site(loop, router, engines)
    finally:
        await router.close()


def run(test: Callable[[Site], Awaitable[None]], count: int = 3, **settings: Any) -> None:
    async def running() -> None:
        async with site(count, **settings) as its:
            await its.words("up")
            await test(its)

    VirtualLoop().run(running())


@driven(run)
async def test_a_response_is_found_by_the_id_that_its_engine_got(its: Site) -> None:
    made = json.loads((await its.ask("POST", "/v1/responses", body=ASK)).body)["id"]
    [keeper] = [each for each in its.engines if each.made]
    assert made.startswith(PREFIX + tag(its.router.workers[keeper.name]))
    keeper.has.add(made)
    for method, rest in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
        got = await its.ask(method, f"/v1/responses/{made}{rest}")
        assert (got.status, json.loads(got.body)) == (200, {"of": keeper.name})
        assert got.headers["x-kvstore-worker"] == keeper.name
    others = [each for each in its.engines if each is not keeper]
    assert not any(each.seen for each in others)


@driven(run)
async def test_an_id_that_no_router_made_is_looked_for_at_all_engines(its: Site) -> None:
    its.engines[2].has.add("resp_unknown")
    got = await its.ask("GET", UNKNOWN)
    assert (got.status, json.loads(got.body)) == (200, {"of": "c"})
    its.engines[2].has.clear()
    for each in its.engines:
        each.seen.clear()
    assert (await its.ask("GET", UNKNOWN)).status == 404
    assert [len(each.seen) for each in its.engines] == [1, 1, 1]


def test_engines_that_answer_no_probe_are_asked_where_there_are_no_others() -> None:
    async def running() -> None:
        async with site(1) as its:  # not probed yet
            its.engines[0].has.add("resp_unknown")
            assert (await its.ask("GET", UNKNOWN)).status == 200
            await its.words("up")
            its.engines[0].port.kill()
            await its.words("down")
            assert (await its.ask("GET", UNKNOWN)).status == 502
            its.engines[0].port.listen()
            assert (await its.ask("GET", UNKNOWN)).status == 200

    VirtualLoop().run(running())


@driven(run)
async def test_an_answer_that_breaks_off_is_cut_and_no_other_engine_is_asked(its: Site) -> None:
    for each in its.engines:
        each.has.add("resp_unknown")
        each.cuts = True
    got = await its.ask("GET", UNKNOWN)
    assert (got.status, got.body) == (0, b"half of ")
    assert sum(len(each.seen) for each in its.engines) == 1


@pytest.mark.parametrize("method", ["HEAD", "PUT", "PATCH", "OPTIONS", "TRACE"])
@driven(run)
async def test_other_methods_reach_no_engine(its: Site, method: str) -> None:
    got = await its.ask(method, UNKNOWN, "Connection: close")
    if method != "HEAD":  # its answer has no body, which this client waits for
        assert (got.status, b"takes GET, POST, DELETE" in got.body) == (405, True)
    assert not any(each.seen for each in its.engines)


@driven(run, 1, body_max="1024")
async def test_a_body_has_the_bounds_of_all_bodies(its: Site) -> None:
    its.engines[0].has.add("resp_unknown")
    assert (await its.ask("POST", UNKNOWN, body=b"x" * 1025)).status == 413
    both = ("Content-Length: 1", "Transfer-Encoding: chunked")
    assert (await its.ask("POST", UNKNOWN, *both)).status == 400
    assert (await its.ask("POST", UNKNOWN, "Content-Encoding: gzip", body=b"x")).status == 415
    before_s = its.loop.time()
    assert (await its.ask("POST", UNKNOWN, "Content-Length: 9")).status == 408
    assert its.loop.time() - before_s == pytest.approx(BODY_STALL_S, abs=1)
    assert not its.engines[0].seen
    assert (await its.ask("POST", UNKNOWN, body=b"x" * 1024)).status == 200
    assert its.engines[0].seen == [("POST", UNKNOWN, b"x" * 1024)]
    left = its.router.intake.bodies.left
    assert left == type(its.router.intake.bodies)(bytes_max=1024).left


def test_a_body_that_pauses_for_minutes_is_waited_for() -> None:
    async def test(its: Site) -> None:
        its.engines[0].has.add("resp_unknown")
        connection, whole = await EngineHttp(None).place(its.url).connected(), _Whole()
        connection.ask(f"POST {UNKNOWN} HTTP/1.1\r\nHost: x\r\n".encode(), b"", whole)
        assert connection._transport is not None
        connection._transport.write(b"Content-Length: 4\r\n\r\nla")
        await asyncio.sleep(500)
        connection._transport.write(b"te")
        assert await whole.done
        assert connection.status == 200
        assert its.engines[0].seen == [("POST", UNKNOWN, b"late")]
        connection.abort()

    run(test, 1)


def test_a_tenant_needs_its_key_for_a_stored_response(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("team-a: key-of-sixteen-characters\n")

    async def test(its: Site) -> None:
        its.engines[0].has.add("resp_unknown")
        key = "key-of-sixteen-characters"
        assert (await its.ask("GET", UNKNOWN)).status == 401
        assert (await its.ask("GET", UNKNOWN, f"X-Api-Key: {key}")).status == 200
        assert (await its.ask("GET", UNKNOWN, f"Authorization: bearer {key}")).status == 200
        assert len(its.engines[0].seen) == 2

    run(test, 1, api_keys=str(tmp_path / "keys"))


@driven(run)
async def test_a_tag_leads_nowhere_but_to_a_worker(its: Site) -> None:
    its.engines[1].has.add(made := new_id(its.router.workers["a"], ""))
    assert (await its.ask("GET", f"/v1/responses/{made}")).status == 404, "its keeper says so"
    its.engines[0].port.kill()
    assert (await its.ask("GET", f"/v1/responses/{made}")).status == 502
    assert not its.engines[1].seen


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [(None, "*"), (["https://chat.example"], "https://chat.example"), (["https://x"], None)],
)
def test_browsers_ask_first_and_get_no_server_name(
    origins: list[str] | None, allowed: str | None
) -> None:
    async def test(its: Site) -> None:
        wanted = "Access-Control-Request-Headers: authorization, content-type"
        first = await its.ask("OPTIONS", "/v1/completions", *PREFLIGHT, wanted)
        assert first.status == (204 if allowed else 403)
        assert first.headers.get("access-control-allow-origin") == allowed
        if allowed:
            named = first.headers["access-control-allow-headers"]
            assert named == "authorization, content-type"
        else:
            assert json.loads(first.body)["error"]["code"] == "origin"
        answers = [
            await its.ask("POST", "/v1/responses", PREFLIGHT[0], body=ASK),
            await its.ask("GET", "/v1/models", PREFLIGHT[0]),
            await its.ask("GET", "/livez", PREFLIGHT[0]),
            await its.ask("GET", "/nowhere", PREFLIGHT[0]),
        ]
        assert [each.status for each in answers] == [200, 200, 200, 404]
        for each in (first, *answers):
            assert each.headers["server"] == "kvstore"
            assert each.headers["x-request-id"]
            assert each.headers.get("access-control-allow-origin") == allowed

    run(test, 1, **({"allowed_origins": origins} if origins else {}))


@driven(run, 1)
async def test_options_of_no_browser_are_refused(its: Site) -> None:
    for headers in ([], PREFLIGHT[:1], PREFLIGHT[1:]):
        assert (await its.ask("OPTIONS", "/v1/completions", *headers)).status == 405
    assert not its.engines[0].seen
