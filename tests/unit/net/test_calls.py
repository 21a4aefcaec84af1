"""Calls of one message each: which one gives way where too many are silent.

Does not cover: calls over a socket (`tests/unit/node/test_inspect.py`).
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvstore.net import server
from kvstore.net.server import Calls

READ_TIMEOUT_S = 0.01


class Call:
    """A call; its message comes when `message` is set."""

    def __init__(self) -> None:
        self.message = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        return await self.message

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise ConnectionAbortedError(text)


def test_a_silent_call_whose_time_is_over_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_MAX", 1)
    monkeypatch.setattr(server, "READ_TIMEOUT_S", READ_TIMEOUT_S)

    async def answered(pool: ThreadPoolExecutor) -> object:
        loop, calls = asyncio.get_running_loop(), Calls(pool, count_max=1)

        async def own(_details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, _: request)

        handler = await calls.intercept_service(own, SimpleNamespace(method="/any"))
        silent = asyncio.create_task(handler.stream_unary(None, Call()))
        await asyncio.sleep(0)
        threading.Event().wait(2 * READ_TIMEOUT_S)
        # The next turn of the loop ends the silent call's time, and only the one after that wakes
        # it; the new call is before it then.
        new, begun = Call(), loop.create_future()
        new.message.set_result("a question")
        loop.call_soon(lambda: begun.set_result(loop.create_task(handler.stream_unary(None, new))))
        found = await (await begun)
        with pytest.raises(ConnectionAbortedError, match="no message came in time"):
            await silent
        return found

    with ThreadPoolExecutor(1) as pool:
        assert asyncio.run(answered(pool)) == "a question"
