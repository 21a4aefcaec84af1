"""Connections to engines whose DNS or whose TLS is slow or away: the engines are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from yarl import URL

from kvstore.cli.certs import make_certificates
from kvstore.net import aio
from kvstore.router.engines.connections import EngineConnection, EnginePlaces
from kvstore.router.engines.failures import NoConnection
from kvstore.wire.identity import Identity


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None = None) -> Iterator[tuple[int, threading.Event]]:
    """(port, event) of a server; with TLS, its handshakes wait for the event."""
    may_go, taken = threading.Event(), list[socket.socket]()
    shaking: list[threading.Thread] = []

    def shake(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            taken.append(client)
            if context is not None and may_go.wait(20):
                taken.append(context.wrap_socket(client, server_side=True))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                one = threading.Thread(target=shake, args=(door.accept()[0],), daemon=True)
                shaking.append(one)
                one.start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield door.getsockname()[1], may_go
        door.shutdown(socket.SHUT_RDWR)
    may_go.set()
    serving.join()
    for one in shaking:
        one.join()
    for each in taken:
        each.close()


def test_a_name_that_dns_knows_no_more_is_found_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio, "DNS_S", 0.01)

    async def away(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")

    async def played() -> None:
        loop, answers, calls = asyncio.get_running_loop(), asyncio.Event(), []

        async def late(*_: Any, **__: Any) -> Any:
            calls.append(late)
            await answers.wait()
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.9", 0))]

        known = loop.getaddrinfo
        with listening() as (port, _):
            engines = EnginePlaces(None)
            place = engines.place(URL(f"http://localhost:{port}"))
            monkeypatch.setattr(loop, "getaddrinfo", away)
            with pytest.raises(NoConnection):
                await place.connected()
            monkeypatch.setattr(loop, "getaddrinfo", known)
            opened = [await place.connected()]
            for broken in (away, late, late):
                monkeypatch.setattr(loop, "getaddrinfo", broken)
                opened.append(await place.connected())
            assert not any(each.is_closing for each in opened)
            assert len(calls) == 1, "the call that hangs is waited for by all"
            answers.set()
            with pytest.raises(NoConnection):  # it has moved, as DNS says by now
                await place.connected()
            engines.close()
            for each in opened:
                each.abort()

    asyncio.run(asyncio.wait_for(played(), 20))


def test_a_handshake_has_no_limit_but_may_be_given_up(tmp_path: Path) -> None:
    make_certificates(tmp_path, [Identity("client", "e")], hosts=["127.0.0.1"], days=2)
    its = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    its.load_cert_chain(tmp_path / "client-e.crt", tmp_path / "client-e.key")
    ours = ssl.create_default_context(cafile=tmp_path / "ca.crt")

    async def played() -> None:
        with listening(its) as (port, may_go):
            loop = asyncio.get_running_loop()
            place = EnginePlaces(ours).place(URL(f"https://127.0.0.1:{port}"))

            async def within(limit: asyncio.Timeout) -> EngineConnection:
                async with limit:
                    return await place.connected(limit)

            limit = asyncio.timeout(0.2)
            loop.call_later(0.5, lambda: limit.reschedule(loop.time()))
            begin_s = loop.time()
            with pytest.raises(TimeoutError):
                await within(limit)
            assert loop.time() - begin_s >= 0.5, "the limit was lifted"
            loop.call_later(0.5, may_go.set)
            connection = await within(asyncio.timeout(0.2))
            assert not connection.is_closing
            connection.abort()

    asyncio.run(asyncio.wait_for(played(), 20))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_engine_that_hangs_up_before_its_handshake_has_no_connection(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def played() -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            url = URL(f"https://127.0.0.1:{door.getsockname()[1]}")
            place = EnginePlaces(ssl.create_default_context()).place(url)

            def hang_up() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        door.accept()[0].close()

            serving = threading.Thread(target=hang_up, daemon=True)
            serving.start()
            for _ in range(100):
                with pytest.raises(NoConnection):
                    await place.connected()
            door.shutdown(socket.SHUT_RDWR)
            serving.join()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(played(), 20))
