"""An engine without a model, which does what a test tells it to; and a proxy in front of two."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDictProxy

from kvstore.pd.config import Legs, pd_config
from kvstore.pd.proxy import PdProxy

PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-p",
    "kvstore": {"node": "p1", "transfer": "t1"},
}


class FakeEngine:
    """Answers completions; `parameters` makes it a prefill engine."""

    def __init__(self, *, parameters: dict[str, Any] | None = None) -> None:
        self.parameters = parameters
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[CIMultiDictProxy[str]] = []
        self.aborted = 0
        self.begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._models)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/")).rstrip("/")

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.begun.set()
        try:
            await self.may_answer.wait()
            if self.status != 200:
                return web.json_response({"error": "of the engine"}, status=self.status)
            if not self.bodies[-1].get("stream"):
                return web.json_response({"id": "x", "kv_transfer_params": self.parameters})
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Own": "1"})
            await out.prepare(request)
            await out.write(b"data: one\n\n")
            await self.may_go_on.wait()
            await out.write(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return out


class Stage:
    """A proxy in front of fakes, and a client."""

    def __init__(self, p: FakeEngine, d: FakeEngine, proxy: PdProxy, url: str) -> None:
        self.p, self.d, self.proxy, self.url = p, d, proxy, url
        self.client = ClientSession(timeout=ClientTimeout(total=10))

    def post(self, body: object, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url + "/v1/completions", data=data, headers=headers)


@contextlib.asynccontextmanager
async def stage(
    *, legs: Legs = "in-turn", more_decode: tuple[str, ...] = (), prefill_timeout_s: float = 5.0
) -> AsyncIterator[Stage]:
    p, d = FakeEngine(parameters=PARAMETERS), FakeEngine()
    for engine in (p, d):
        await engine.server.start_server()
    config = pd_config(
        listen="127.0.0.1:0",
        prefill=[p.url],
        decode=[*more_decode, d.url],
        legs=legs,
        prefill_timeout_s=prefill_timeout_s,
        cert=None,
        key=None,
        engine_ca=None,
        insecure=False,
    )
    async with ClientSession(skip_auto_headers=("User-Agent",)) as session:
        proxy = PdProxy(config, session)
        server = TestServer(proxy.app())
        await server.start_server()
        found = Stage(p, d, proxy, str(server.make_url("/")).rstrip("/"))
        try:
            yield found
        finally:
            await found.client.close()
            for engine in (p, d):
                engine.may_answer.set()
                engine.may_go_on.set()
            await server.close()
            for engine in (p, d):
                await engine.server.close()
