"""The way of one request through the modules of the router: how often a reader turns a page.

A stay is one visit of control in a module of `kvstore/router` while a plain request is served: a
completion with a stream, one worker, no remote prefill, over connections that are open already. A
return to a module is another stay. Calls into other packages are none, and neither is what a
coroutine does to be suspended and resumed. An engine that reports cached tokens costs two more:
they are compared with those that were predicted.
"""

from __future__ import annotations

import asyncio
import dis
import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, Final

from aiohttp import web

import kvstore.router
from kvstore.config.router import load_router_config
from kvstore.router.process import Router
from tests.kit.virtual_loop import VirtualLoop

STAYS_MAX: Final = 15
HERE: Final = str(Path(kvstore.router.__file__).parent) + "/"
BODY: Final = b'{"model":"m","prompt":"hello","max_tokens":3,"stream":true}'
ASK: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
MECHANICAL: Final = frozenset(
    {
        *("RESUME", "SEND", "YIELD_VALUE", "RETURN_GENERATOR", "JUMP_BACKWARD_NO_INTERRUPT"),
        *("MAKE_CELL", "COPY_FREE_VARS"),
    }
)
"""Operations by which coroutines are made, suspended and resumed."""


class Walk:
    """Notes the module in which each operation is done, by tasks that are not `others`."""

    def __init__(self, others: set[asyncio.Task[Any]]) -> None:
        self.others = others
        self.modules: list[str] = []

    def enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, _arg: object) -> Any:
        code = frame.f_code
        is_done = event == "opcode" and dis.opname[code.co_code[frame.f_lasti]] not in MECHANICAL
        if is_done and asyncio.current_task() not in self.others:
            self.modules.append(code.co_filename.removeprefix(HERE).removesuffix(".py"))
        return self._inside

    @property
    def stays(self) -> list[str]:
        return [module for module, _ in groupby(self.modules)]


class Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.got, self.done = b"", asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.got += data
        if b"[DONE]" in self.got:
            self.done.set()


async def engine(request: web.BaseRequest) -> web.StreamResponse:
    """Pages of an idle engine, and answers as a stream of pieces."""
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "m"}]})
    if request.method == "GET":
        return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
    await request.read()
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(request)
    for piece in (b"{}", b"{}", b"[DONE]"):
        await out.write(b"data: %b\n\n" % piece)
    return out


def walk() -> list[str]:
    """Modules of the router in the order in which the second request on a connection is there."""
    loop = VirtualLoop()

    async def running() -> list[str]:
        host, port = loop.serve(web.Server(engine, access_log=None)).port
        given = {"listen": "127.0.0.1:0", "metrics": "off", "worker": [f"a=http://{host}:{port}"]}
        router = Router(load_router_config(None, given), clock=loop.clock_ns)
        await router.begin()
        try:
            while {each.word.value for each in router.workers} != {"up"}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            walked = Walk(asyncio.all_tasks())
            transport, client = await loop.create_connection(Client, *loop.serve(router.door).port)
            for is_walked in (False, True):
                client.got = b""
                client.done.clear()
                before = sys.gettrace()
                if is_walked:
                    sys.settrace(walked.enter)
                try:
                    transport.write(ASK)
                    await client.done.wait()
                    for _ in range(50):  # what is behind the last byte
                        await asyncio.sleep(0)
                finally:
                    sys.settrace(before)
                assert client.got.startswith(b"HTTP/1.1 200 OK"), client.got
            transport.close()
            return walked.stays
        finally:
            await router.close()

    return loop.run(running())


def test_a_request_is_read_in_a_few_stays() -> None:
    stays = walk()
    assert len(stays) <= STAYS_MAX, f"{len(stays)} stays: {' '.join(stays)}"
