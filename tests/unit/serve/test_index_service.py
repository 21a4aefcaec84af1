"""The regular work of an index: it goes on after a bug in it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvstore.ports import IndexStore
from kvstore.serve import index
from kvstore.serve.index import IndexService


class Store:
    """Fails twice at the same, then at something else, then works."""

    def __init__(self) -> None:
        self.bugs: list[Exception] = [ValueError("one"), ValueError("one"), KeyError("two")]
        self.has_worked = asyncio.Event()

    async def tick(self, now_ms: int) -> None:
        if self.bugs:
            raise self.bugs.pop(0)
        self.has_worked.set()


def test_a_bug_in_regular_work_is_logged_once_and_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index, "TICK_S", 0)

    async def body() -> None:
        store = Store()
        service = IndexService(cast("IndexStore", store), demands_names=False)
        task = asyncio.create_task(service.tick())
        await asyncio.wait(
            [task, waiter := asyncio.create_task(store.has_worked.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert not task.done()
        waiter.cancel()
        task.cancel()
        await asyncio.wait([task, waiter])
        assert task.cancelled()
        service.close()

    asyncio.run(body())
    assert [str(r.exc_info[1]) for r in caplog.records if r.exc_info] == ["one", "'two'"]
