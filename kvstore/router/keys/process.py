"""The router's end of `child`: orders to processes, answers to those who wait.

    make ─▶ a queue of each tenant ─▶ the one that got least ─▶ child          one order at a time
            bodies of LONG_BYTES and more: a queue and a child of their own

An order waits here and not in the pipe, so that it costs nothing when nobody waits for it any more,
and the orders of one tenant wait for each other. Beyond BYTES_MAX owed, orders are refused at once,
and those of a tenant beyond half of it: routing by bytes is better than waiting. A child that ends
or hangs costs the order that it had, which is answered with None, and is replaced.

Covers: fairness, bounds, faults. Does not cover: tokens and keys (`child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstore.router.keys.child import KeyAnswer, KeyOrder
from kvstore.types import Counts

BYTES_MAX: Final = 64 << 20
"""Most bytes of orders that wait or are under way; their requests hold them, too."""
LONG_BYTES: Final = 256 << 10
ANSWER_TIMEOUT_S: Final = 2.0
"""Longest wait of a request for an answer of a busy child. Loading a tokenizer takes longer, so its
first orders go unanswered.
"""
HANG_S: Final = 30.0
"""Time after which a child that has not answered an order is replaced."""
LOADING_S: Final = 300.0
"""The same limit for a child that has never answered: to import `transformers` takes 5 s
of a core.
"""
LIMIT_BYTES: Final = 64 << 20


class Waiting(NamedTuple):
    """An order that is not sent yet."""

    tenant: str
    size: int
    order: KeyOrder
    asked: asyncio.Future[KeyAnswer | None]


class FairQueue:
    """Orders by tenant. The next one is of the tenant that got the fewest bytes while others
    waited; a tenant that comes begins level with the least of them, and saves up nothing.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Waiting]] = {}
        self._got: dict[str, int] = {}
        """Bytes that each tenant got since the queue was last empty."""
        self._least = 0

    def put(self, waiting: Waiting) -> None:
        """Add an order."""
        tenant = waiting.tenant
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._got[tenant] = max(self._got.get(tenant, 0), self._least)
        self._waiting[tenant].append(waiting)

    def take(self) -> Waiting | None:
        """Remove and return the next order whose caller still waits; None: there is none."""
        while self._waiting:
            tenant = min(self._waiting, key=self._got.__getitem__)
            self._least = self._got[tenant]
            found = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not found.asked.done():
                self._got[tenant] += found.size
                return found
        self._got.clear()
        self._least = 0
        return None


class _Lane:
    """One child, and the orders for it."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._child: asyncio.subprocess.Process | None = None
        self._queue = FairQueue()
        self._sender: asyncio.Task[None] | None = None
        self._asked_s: float | None = None
        """When the child got the order that it has not answered; None: it has answered all."""
        self._has_answered = False  # this child

    async def made(self, waiting: Waiting) -> KeyAnswer | None:
        self._queue.put(waiting)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await waiting.asked

    async def _send(self) -> None:
        while (waiting := self._queue.take()) is not None:
            answer = await self._answer(waiting.order)
            if not waiting.asked.done():
                waiting.asked.set_result(answer)

    async def _answer(self, order: KeyOrder) -> KeyAnswer | None:
        data = msgspec.msgpack.encode(order)
        try:
            child = await self.running()
            assert child.stdin is not None
            assert child.stdout is not None
            self._asked_s = asyncio.get_running_loop().time()
            child.stdin.write(len(data).to_bytes(4, "little"))
            child.stdin.write(data)
            await child.stdin.drain()
            size = int.from_bytes(await child.stdout.readexactly(4), "little")
            answer = msgspec.msgpack.decode(await child.stdout.readexactly(size), type=KeyAnswer)
        except (asyncio.IncompleteReadError, OSError, RuntimeError, msgspec.DecodeError):
            # RuntimeError: uvloop's for a write to a child that has ended.
            await self.end()
            return None
        finally:
            self._asked_s = None
        self._has_answered = True
        return answer

    async def running(self) -> asyncio.subprocess.Process:
        """The child process, which is started if there is none."""
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "kvstore.router.keys.child", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LIMIT_BYTES,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            )
        return self._child

    @property
    def limit_s(self) -> float:
        """Time that the child may take for an order."""
        return HANG_S if self._has_answered else LOADING_S

    def replace_hanging(self) -> None:
        """Kill the child if it has not answered for too long."""
        now_s = asyncio.get_running_loop().time()
        if self._asked_s is not None and now_s - self._asked_s > self.limit_s:
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def end(self) -> None:
        """Kill the child, if there is one, and wait for its end."""
        self._kill()
        if self._child is not None:
            child, self._child, self._has_answered = self._child, None, False
            await child.wait()
            assert child.stdin is not None
            child.stdin.close()
            with contextlib.suppress(OSError):
                await child.stdin.wait_closed()

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        await self.end()


class KeyProcess:
    """Two children, for short and for long prompts; each starts with its first order. Call `make`
    on one loop only.
    """

    def __init__(self, tokenizers: Mapping[str, Path]) -> None:
        arguments = [f"{model}={path}" for model, path in tokenizers.items()]
        self.lanes = _Lane(arguments), _Lane(arguments)
        self.models = tuple(tokenizers)
        """Models with a local tokenizer."""
        self._owed = Counts[str]()
        """Bytes of orders without an answer, by tenant."""

    async def make(
        self, order: KeyOrder, tenant: str = "", *, delays_request: bool = True
    ) -> KeyAnswer | None:
        """Carry out an order in a child; None: no answer in time, or the order is refused. An order
        that delays no request has a request's time more than the child may take.
        """
        size = len(order.body) + len(order.rendered)
        lane, owed = self.lanes[size >= LONG_BYTES], self._owed
        is_over = owed[tenant] > 0 and owed[tenant] + size > BYTES_MAX // 2
        if is_over or owed.total() + size > BYTES_MAX:
            lane.replace_hanging()
            return None
        owed[tenant] += size
        asked: asyncio.Future[KeyAnswer | None] = asyncio.get_running_loop().create_future()
        try:
            # A request's time more: a child that hangs is over its own limit by then.
            limit_s = ANSWER_TIMEOUT_S + (0 if delays_request else lane.limit_s)
            async with asyncio.timeout(limit_s):
                return await lane.made(Waiting(tenant, size, order, asked))
        except TimeoutError:
            lane.replace_hanging()
            return None
        finally:
            owed.drop(tenant, size)

    async def close(self) -> None:
        """End the children."""
        for lane in self.lanes:
            await lane.close()
