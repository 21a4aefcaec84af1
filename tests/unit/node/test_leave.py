"""The end of a node that drains: the drain begins once, and not when the node has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.engine.why.report import UsedSlots
from kvstore.net.aio import LoopThread
from kvstore.node.node import _make_leave

WAIT_S = 30.0
NOTHING = np.zeros(0, dtype=np.int64)


class Parts:
    """Parts of a node: a driver that knows of no block, and a drain that ends when it may."""

    def __init__(self) -> None:
        self.loop = LoopThread("test")
        self.drains, self.has_ended = 0, False
        self.began, self.ended, self.may_end = (threading.Event() for _ in range(3))
        config: Any = SimpleNamespace(drain_s=9)
        parts: Any = self
        self.executor = SimpleNamespace(member=self)
        self.leave = _make_leave(config, parts, self.loop)

    @property
    def peering(self) -> Parts:
        return self

    def query(self, _ask: object, *, timeout_s: float) -> UsedSlots:
        return UsedSlots(NOTHING, NOTHING, NOTHING, 1)

    def stop(self) -> None:
        self.has_ended = True
        self.ended.set()

    async def drain(self, runs: list[object], *, timeout_s: float) -> None:
        assert (runs, timeout_s) == ([], 9)
        self.drains += 1
        self.began.set()
        await asyncio.to_thread(self.may_end.wait, WAIT_S)


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.may_end.set()
    if not parts.loop.loop.is_closed():
        parts.loop.close()


def test_a_second_signal_to_the_process_begins_no_second_drain(parts: Parts) -> None:
    parts.leave()
    assert parts.began.wait(WAIT_S)
    parts.leave()
    parts.loop.call(asyncio.sleep(0), timeout_s=WAIT_S)
    parts.may_end.set()
    assert parts.ended.wait(WAIT_S)
    assert parts.drains == 1


def test_a_signal_to_a_process_that_ends_does_nothing(parts: Parts) -> None:
    parts.stop()
    parts.loop.close()
    parts.leave()
    assert parts.drains == 0
