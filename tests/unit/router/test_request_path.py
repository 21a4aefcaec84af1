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

import kvstore.router
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import RoutingPolicy
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

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


def walk(worker: VirtualWorker) -> list[str]:
    """Modules of the router in the order in which the second request on a connection is there."""
    worker.script("ok", reports=False)
    core = RouterCore(RoutingPolicy(), seed=1)
    with VirtualRouter([worker.flag], core=core) as router, router.connected() as client:
        until(lambda: router.words() == {"a": "up"})
        walked = Walk(asyncio.all_tasks(router.loop))
        for is_walked in (False, True):
            client.coming.clear()
            before = sys.gettrace()
            if is_walked:
                sys.settrace(walked.enter)
            try:
                client.sendall(ASK)
                until(lambda: b"[DONE]" in client.coming)
            finally:
                sys.settrace(before)
            assert client.coming.startswith(b"HTTP/1.1 200 OK"), client.coming
        return walked.stays


def test_a_request_is_read_in_a_few_stays(worker: VirtualWorker) -> None:
    stays = walk(worker)
    assert len(stays) <= STAYS_MAX, f"{len(stays)} stays: {' '.join(stays)}"
