"""The router's end of `child`: orders to a process, answers in their order.

A child that ends or hangs costs its orders, which are answered with None, and is replaced. Orders
that would wait too long are refused at once: routing by bytes is better than waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvstore.router.keys.child import KeyAnswer, KeyOrder

WAITING_MAX: Final = 64
ANSWER_TIMEOUT_S: Final = 2.0
"""For a busy child; loading a tokenizer takes longer, and its first orders go unanswered."""
HANG_S: Final = 30.0
"""A child that owes an answer for so long is replaced."""
LOADING_S: Final = 300.0
"""The same of one that has not answered yet: to import `transformers` takes 5 s of a core."""
LIMIT_BYTES: Final = 64 << 20
_answers: Final = msgspec.msgpack.Decoder(KeyAnswer)


class KeyProcess:
    """One child. `make` from one loop."""

    def __init__(self, tokenizers: Mapping[str, Path]) -> None:
        self._arguments = [f"{model}={path}" for model, path in tokenizers.items()]
        self._child: asyncio.subprocess.Process | None = None
        self._waiting: deque[tuple[float, asyncio.Future[KeyAnswer | None]]] = deque()
        """Since when, and for what, in the order of the child's answers."""
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._has_answered = False  # this child
        self.refused_count = 0
        self.restart_count = 0

    async def make(self, order: KeyOrder) -> KeyAnswer | None:
        """None: no answer in time."""
        if len(self._waiting) >= WAITING_MAX:
            self.refused_count += 1
            self._replace_hanging()
            return None
        child = await self._running()
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[KeyAnswer | None] = loop.create_future()
        data = msgspec.msgpack.encode(order)
        assert child.stdin is not None
        self._waiting.append((loop.time(), asked))
        child.stdin.write(len(data).to_bytes(4, "little") + data)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.shield(asked)
        except TimeoutError:
            self._replace_hanging()
            return None

    def _replace_hanging(self) -> None:
        owes_since_s = self._waiting[0][0] if self._waiting else math.inf
        limit_s = HANG_S if self._has_answered else LOADING_S
        if asyncio.get_running_loop().time() - owes_since_s > limit_s and self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "kvstore.router.keys.child", *self._arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=LIMIT_BYTES,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                )
                self._has_answered = False
                self._reader = asyncio.create_task(self._read(self._child))
        return self._child

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        try:
            while True:
                size = int.from_bytes(await child.stdout.readexactly(4), "little")
                answer = _answers.decode(await child.stdout.readexactly(size))
                self._has_answered = True
                _, asked = self._waiting.popleft()
                if not asked.done():
                    asked.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            self.restart_count += 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            self._child = None
            while self._waiting:
                _, asked = self._waiting.popleft()
                if not asked.done():
                    asked.set_result(None)

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
