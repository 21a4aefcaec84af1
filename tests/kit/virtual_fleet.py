"""A router and its engines in virtual time: the shell as it is, engines slow, sick or gone.

    clients ─▶ router (its own code, default settings) ─▶ VirtualEngine × n
    clients ─▶ the same engines in turn: what round robin serves

An engine behaves like vLLM seen from outside: /metrics, /health, /v1/models, completions; it admits
`slots` requests at a time in the order in which they came, and answers the first token `ttft_s`
after that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web
from yarl import URL

from kvstore.config.router import load_router_config
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.connections import EngineConnection, request_head
from kvstore.router.engines.failures import NoConnection
from kvstore.router.process import Router
from tests.kit.virtual_loop import VirtualLoop

CLIENT_S = 7200.0
"""Patience of a client."""
MODEL = "m"


class VirtualEngine:
    """One engine. Attributes may be changed at any time."""

    def __init__(self, loop: VirtualLoop, name: str, **behaviour: Any) -> None:
        self.name, self._loop = name, loop
        self.ttft_s = 0.01
        self.pieces, self.pause_s = 3, 0.0
        self.whole_s = 0.01
        """Time of an answer that is not streamed."""
        self.slots: int | None = None
        self.probe_s = 0.0
        """Until its pages answer."""
        self.status = 200
        self.fails: Callable[[dict[str, Any]], int] = lambda _: 0
        """Status for a request; −1: its connection is cut; 0: it is served."""
        self.context_tokens = 1 << 20
        self.memory_blocks = 1_000_000
        self.running = self.waiting = self.served = self.seen = 0
        self.most_running = 0
        self._admission = asyncio.Condition()
        self._thawed = asyncio.Event()
        self._thawed.set()
        for key, value in behaviour.items():
            assert hasattr(self, key), key
            setattr(self, key, value)
        self._server = web.Server(self._answer, access_log=None)
        self.port = loop.serve(self._server)

    def freeze(self) -> None:
        """As a stopped process: its port takes connections, and nothing goes on."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    @property
    def url(self) -> str:
        host, port = self.port.port
        return f"http://{host}:{port}"

    @property
    def flag(self) -> str:
        return f"{self.name}={self.url}"

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        await self._thawed.wait()
        if request.method == "GET":
            await asyncio.sleep(self.probe_s)
            return self._page(request.path)
        return await self._complete(request)

    def _page(self, path: str) -> web.Response:
        if path == "/v1/models":
            row = {"id": MODEL, "max_model_len": self.context_tokens}
            return web.json_response({"data": [row]})
        if path == "/health":
            return web.Response()
        return web.Response(
            text=f"vllm:num_requests_running {self.running}\n"
            f"vllm:num_requests_waiting {self.waiting}\n"
            f"vllm:kv_cache_usage_perc {min(1.0, self.running * 16 / self.memory_blocks)}\n"
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{self.memory_blocks}"}} 1\n'
        )

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = json.loads(await request.content.read())
        self.seen += 1
        if fault := self.fails(asked):
            if fault < 0:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            return web.json_response({"error": {"message": "scripted"}}, status=fault)
        self.waiting += 1
        try:
            async with self._admission:
                await self._admission.wait_for(
                    lambda: self.slots is None or self.running < self.slots
                )
        finally:
            self.waiting -= 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._make(request, asked)
        finally:
            self.running -= 1
            async with self._admission:
                self._admission.notify(1)

    async def _make(self, request: web.BaseRequest, asked: dict[str, Any]) -> web.StreamResponse:
        prompt_tokens = len(json.dumps(asked)) // 4
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.pieces}
        if not asked.get("stream"):
            await asyncio.sleep(self.whole_s)
            self.served += 1
            return web.json_response({"choices": [{"text": "abc"}], "usage": usage})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await asyncio.sleep(self.ttft_s)
        await self._thawed.wait()
        await out.prepare(request)
        for number in range(self.pieces):
            await out.write(f'data: {{"n": {number}}}\n\n'.encode())
            await asyncio.sleep(self.pause_s)
        await out.write(b"data: [DONE]\n\n")
        self.served += 1
        return out


class Result(NamedTuple):
    """What a client got. Status 0: its connection broke."""

    status: int
    ttft_s: float
    whole_s: float
    worker: str
    body: bytes


class _Reader:
    """One answer, as an AnswerTaker."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._begin_s = loop, loop.time()
        self.first_s = self.whole_s = 0.0
        self.pieces: list[bytes] = []
        self.done: asyncio.Future[bool] = loop.create_future()

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        now_s = self._loop.time() - self._begin_s
        self.first_s = self.first_s or now_s
        self.pieces.append(piece)
        if is_over and not self.done.done():
            self.whole_s = now_s
            self.done.set_result(True)

    def broke(self, why: str, *, is_stale: bool) -> None:
        if not self.done.done():
            self.done.set_result(False)


async def ask(
    loop: VirtualLoop,
    url: str,
    body: Any = None,
    *,
    path: str = "/v1/completions",
    headers: Sequence[tuple[str, str]] = (),
) -> Result:
    """One request on a connection of its own."""
    content = body if isinstance(body, bytes) else json.dumps(body or {"model": MODEL}).encode()
    place = EngineHttp(None).place(URL(url))
    try:
        connection: EngineConnection = await place.connected()
    except NoConnection:
        return Result(0, 0.0, 0.0, "", b"")
    reader = _Reader(loop)
    more = [("Content-Type", "application/json"), *headers]
    connection.ask(request_head("POST", path, place.host, more, len(content)), content, reader)
    try:
        async with asyncio.timeout(CLIENT_S):
            is_whole = await reader.done
    except TimeoutError:
        is_whole = False
    named = {name.decode().lower(): value.decode() for name, value in connection.headers}
    status = connection.status if is_whole else 0
    connection.abort()
    worker = named.get("x-kvstore-worker", "")
    return Result(status, reader.first_s, reader.whole_s, worker, b"".join(reader.pieces))


class VirtualFleet:
    """Engines, a router before them, and a client of both."""

    def __init__(self, loop: VirtualLoop, engines: Sequence[VirtualEngine], router: Router) -> None:
        self.loop, self.engines, self.router = loop, engines, router
        self._turns = itertools.cycle(engines)
        self._door = loop.serve(router.door)
        self.url = "http://{}:{}".format(*self._door.port)

    async def through_router(self, body: Any = None, **more: Any) -> Result:
        return await ask(self.loop, self.url, body, **more)

    async def in_turn(self, body: Any = None, **more: Any) -> Result:
        """By round robin, without a router."""
        return await ask(self.loop, next(self._turns).url, body, **more)


@asynccontextmanager
async def fleet(
    count: int,
    *,
    behaviour: dict[str, Any] | None = None,
    policy: Any = None,
    **settings: Any,
) -> AsyncIterator[VirtualFleet]:
    """A fleet whose engines have answered their first probes."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    engines = [VirtualEngine(loop, "abcdefgh"[n], **(behaviour or {})) for n in range(count)]
    flags = [each.flag for each in engines]
    config = load_router_config(
        None, {"listen": "127.0.0.1:0", "metrics": "off", "worker": flags, **settings}
    )
    router = Router(config, clock=loop.clock_ns)
    if policy is not None:
        router.dispatcher.adopt(policy)
    try:
        await router.begin()
        probe_s = max((each.probe_s for each in engines), default=0.0)
        await asyncio.sleep(2 * probe_s + 0.5)
        yield VirtualFleet(loop, engines, router)
    finally:
        await router.close()


def run(work: Callable[[], Any]) -> Any:
    """A test in virtual time."""
    return VirtualLoop().run(work())
