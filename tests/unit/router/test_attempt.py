"""Attempts at an engine of some bytes, where two things happen in one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.http import HttpVersion11
from yarl import URL

from kvstore.router.engines.connections import EngineConnection, EngineHttp
from kvstore.router.engines.workers import Worker, WorkerAddress
from kvstore.router.front.attempt import Attempt, LegFailure
from kvstore.routing.events import Failure

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
SIZED = HEAD + b"Content-Length: 5\r\n\r\nhello"


async def turns_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110 - the condition is not the test's
            await asyncio.sleep(0)


class Client:
    """What a client's connection has got."""

    def __init__(self) -> None:
        self.got = b""
        self.transport = SimpleNamespace(write=self._write, is_closing=lambda: False)
        self.protocol = SimpleNamespace(writing_paused=False)
        self.method, self.rel_url = "POST", URL("/v1/completions")
        self.version, self.keep_alive = HttpVersion11, True

    def _write(self, data: bytes) -> None:
        self.got += data


class Engine:
    """Answers by hand: `asked` has the writer of each request."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        self.engines = EngineHttp(None)
        self.open: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)
                self.asked.put_nowait(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            self.open.discard(writer)

    async def is_left(self) -> None:
        """Until no connection is there."""
        await turns_until(lambda: not self.open)

    def attempt(self, client: Client, *, deadline_s: float = 10.0) -> Attempt:
        worker = Worker(WorkerAddress(name="a", url=self.url))
        return Attempt(self.engines, worker, cast("Any", client), deadline_s)


@asynccontextmanager
async def scripted() -> AsyncIterator[Engine]:
    engine = Engine()
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        engine.url = f"http://127.0.0.1:{port}"
        try:
            yield engine
        finally:
            engine.engines.close()
            for writer in engine.open:
                writer.transport.abort()
            await engine.is_left()


def run(attempt: Attempt, on_first: Callable[[], None] = lambda: None) -> asyncio.Task[Any]:
    return asyncio.create_task(attempt.run([], b"{}", on_first=on_first, more={}))


class Nobody:
    def heard(self, piece: bytes, *, is_over: bool) -> None: ...

    def broke(self, why: str) -> None: ...


@pytest.mark.parametrize("status", [b"200 OK", b"500 No"])
def test_headers_are_those_of_the_answer_when_its_connection_is_used_again_at_once(
    status: bytes,
) -> None:
    async def both() -> str:
        async with scripted() as engine:
            client = Client()
            attempt = engine.attempt(client)
            place = engine.engines.place(attempt.worker.url)
            keep = place.keep

            def kept(connection: EngineConnection) -> None:
                keep(connection)
                asyncio.get_running_loop().call_soon(again)

            def again() -> None:  # before the task of the first one runs
                used = place.idle()
                assert used is not None
                used.ask(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"{}", Nobody())

            place.keep = kept  # type: ignore[method-assign]
            running = run(attempt)
            (await engine.asked.get()).write(SIZED.replace(b"200 OK", status))
            await asyncio.wait([running])
            ended = running.exception()
            if isinstance(ended, LegFailure):
                assert ended.answer is not None
                return ended.answer.headers["Content-Type"]
            [line] = [each for each in client.got.split(b"\r\n") if b"Content-Type" in each]
            return line.decode().partition(": ")[2]

    assert asyncio.run(both()) == "text/plain"


def test_a_piece_in_the_turn_in_which_the_time_is_over_is_no_first_one() -> None:
    async def late() -> list[int]:
        async with scripted() as engine:
            attempt, firsts = engine.attempt(Client()), list[int]()
            running = run(attempt, lambda: firsts.append(1))
            await engine.asked.get()
            attempt._late()
            attempt._connection.data_received(SIZED)
            with pytest.raises(LegFailure) as failed:
                await running
            assert failed.value.failure is Failure.TIMEOUT
            return firsts

    assert not asyncio.run(late()), "the core would take it for begun, and try nobody else"


def test_nothing_of_a_first_run_is_left_in_the_second() -> None:
    """A decode leg that began beside its prefill begins anew, alone."""

    async def twice() -> bytes:
        async with scripted() as engine:
            client = Client()
            attempt = engine.attempt(client)
            running = run(attempt)
            refusal = b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\nhalf"
            (await engine.asked.get()).write(refusal)
            await turns_until(lambda: bool(attempt._pieces))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            running = run(attempt)
            (await engine.asked.get()).write(SIZED)
            await running
            return client.got

    assert asyncio.run(twice()).partition(b"\r\n\r\n")[2] == b"hello"


def test_a_connection_that_is_closing_is_not_used_again() -> None:
    async def used() -> bool:
        async with scripted() as engine:
            attempt = engine.attempt(Client())
            running = run(attempt)
            (await engine.asked.get()).write(SIZED)
            await running
            attempt._connection.data_received(b"unasked")
            return engine.engines.place(attempt.worker.url).idle() is not None

    assert not asyncio.run(used()), "the request would fail, and count against the engine"
