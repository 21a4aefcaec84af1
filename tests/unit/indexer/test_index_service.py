"""An index that begins, and its regular work."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import cast

import pytest

from kvstore.config.cluster import IndexConfig
from kvstore.index import holdings, loops
from kvstore.index.feed import ConnectRefused, Trust
from kvstore.indexer import replica, service as index
from kvstore.indexer.service import IndexService
from kvstore.net.aio import LoopThread, persist
from kvstore.ports import IndexStore
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.feed import Hello
from tests.kit.coroutines import on_loop


class Store:
    """Fails twice at the same, then at something else, then works."""

    def __init__(self) -> None:
        self.bugs: list[Exception] = [ValueError("one"), ValueError("one"), KeyError("two")]
        self.has_worked = asyncio.Event()

    async def tick(self, now_ms: int) -> None:
        if self.bugs:
            raise self.bugs.pop(0)
        self.has_worked.set()


@on_loop
async def test_a_bug_in_regular_work_is_logged_once_and_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index, "TICK_S", 0)

    store = Store()
    service = IndexService(cast("IndexStore", store), demands_names=False)
    work = persist("regular work", service.tick, pause_s=0)
    task = asyncio.create_task(work)
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
    assert [str(r.exc_info[1]) for r in caplog.records if r.exc_info] == ["one", "'two'"]


def test_while_its_loops_are_compiled_it_does_not_grow_old(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = [0]

    def compiled() -> ModuleType:
        times[0] = 20_000
        return loops

    monkeypatch.setattr(replica, "is_installed", lambda module: True)
    monkeypatch.setattr(holdings, "compiled", compiled)
    monkeypatch.setattr(replica, "now_ms", lambda: times[0])
    config = IndexConfig(entries=100_000)
    with caplog.at_level("INFO"):
        store = replica._store_of(config, cast("LoopThread", None))
    answer = asyncio.run(store.match("t", SpaceId(bytes(32)), bytes(32), times[0]))
    assert answer.trust is Trust.CATCHING_UP, "nobody has had the time to tell it anything"
    assert "compiling" in caplog.text


@on_loop
async def test_a_node_that_hangs_up_as_it_dies_is_dialled_again() -> None:
    class Heard:
        def __init__(self) -> None:
            self.words: list[object] = []

        async def hear(self, word: object, now_ms: int) -> None:
            self.words.append(word)

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    heard = Heard()
    service = IndexService(cast("IndexStore", heard), demands_names=False)
    hello = Hello("n1", Incarnation(1), 1, 0, address=f"127.0.0.1:{port}")
    await service._ended(hello, "ipv4:127.0.0.1:5")
    service.close()
    assert heard.words[-1] == ConnectRefused("n1")
