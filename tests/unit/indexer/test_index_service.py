"""An index that begins, and its regular work."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import ModuleType
from typing import cast

import pytest

from kvstore.config.cluster import IndexConfig
from kvstore.config.values import HostPort
from kvstore.errors import ConfigError
from kvstore.index import holdings, loops
from kvstore.index.feed import ConnectRefused, Trust
from kvstore.indexer import replica, service as index
from kvstore.indexer.replica import run_index
from kvstore.indexer.service import IndexService
from kvstore.net.aio import LoopThread, persist
from kvstore.net.server import refuse_taken
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


# ── addresses that are taken ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("option", ["--listen", "--metrics"])
def test_an_address_that_is_taken_is_refused_before_the_loops_are_compiled(
    host: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> None:
        raise AssertionError("it compiles first")

    monkeypatch.setattr(holdings, "compiled", compiled)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        ports = {"--listen": 0, "--metrics": 0, option: taken.getsockname()[1]}
        listen, metrics = (HostPort(host, ports[each]) for each in ("--listen", "--metrics"))
        config = IndexConfig(listen=listen, metrics=metrics, entries=1000, tls=None)
        with pytest.raises(ConfigError, match=f"^{option} cannot listen on .*: the address is in"):
            run_index(config)


def test_a_kernel_without_ipv6_leaves_the_address_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_family(family: socket.AddressFamily) -> None:
        asked.append(family)
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_family)
    refuse_taken("--listen", "::", 0)
    assert asked == [socket.AF_INET6]
