"""Attempts at an engine of some bytes, where two things happen in one turn of the loop."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.http import HttpVersion11
from yarl import URL

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.connections import Attempt, EngineConnection
from kvstore.router.engines.failures import LegFailure, NoConnection, fault_of
from kvstore.router.engines.workers import Worker
from kvstore.router.front.proxy import tokens_of
from kvstore.routing.events import Failure, Fault, Lack
from tests.kit.coroutines import on_loop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
REFUSED = Failure.REFUSED
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
        self.connection_count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        self.connection_count += 1
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

    def attempt(self, client: Client) -> Attempt:
        worker = Worker(WorkerAddress(name="a", url=self.url))
        return Attempt(self.engines, worker, cast("Any", client))


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

    def broke(self, why: str, *, is_stale: bool) -> None: ...


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


@on_loop
async def test_a_piece_in_the_turn_in_which_it_is_given_up_is_no_first_one() -> None:
    async with scripted() as engine:
        attempt, firsts = engine.attempt(Client()), list[int]()
        running = run(attempt, lambda: firsts.append(1))
        await engine.asked.get()
        attempt.give_up()
        assert attempt._connection is not None
        attempt._connection.data_received(SIZED)
        with pytest.raises(LegFailure) as failed:
            await running
        assert failed.value.fault.failure is Failure.SILENT
        assert not firsts, "the core would take it for begun, and try nobody else"


@on_loop
async def test_nothing_of_a_first_run_is_left_in_the_second() -> None:
    """A decode leg that began beside its prefill begins anew, alone."""
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
        assert client.got.partition(b"\r\n\r\n")[2] == b"hello"


async def served(engine: Engine) -> Attempt:
    """An attempt whose connection is kept."""
    attempt = engine.attempt(Client())
    running = run(attempt)
    (await engine.asked.get()).write(SIZED)
    await running
    return attempt


@on_loop
async def test_a_connection_that_is_closing_is_not_used_again() -> None:
    async with scripted() as engine:
        attempt = await served(engine)
        assert attempt._connection is not None
        attempt._connection.data_received(b"unasked")
        assert engine.engines.place(attempt.worker.url).idle() is None, (
            "the request would fail, and count against the engine"
        )


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
TRAILED = CHUNKED[:-2] + b"Link: x\r\nConnection: content-type\r\n\r\n"
CLOSED = HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello"


def read(got: bytes) -> tuple[str | None, str | None, bytes]:
    """(Content-Type, Link, body) as a client reads them."""
    answer = http.client.HTTPResponse(cast("Any", SimpleNamespace(makefile=lambda _: BytesIO(got))))
    answer.begin()
    return answer.getheader("Content-Type"), answer.getheader("Link"), answer.read()


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize(
    ("answer", "closes", "whole"),
    [
        (CHUNKED, False, b"hello world"),
        (TRAILED, False, b"hello world"),
        (SIZED, False, b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED, False, b"hello"),
        (HEAD + b"\r\nhello world", True, b"hello world"),
        (CLOSED, True, b"hello"),
        (HEAD + b"Content-Length: 0\r\n\r\n", False, b""),
    ],
)
@on_loop
async def test_an_answer_arrives_whole_in_any_framing(
    answer: bytes, closes: bool, whole: bytes, step: int
) -> None:
    async with scripted() as engine:
        for _ in range(2):
            client = Client()
            running = run(engine.attempt(client))
            writer = await engine.asked.get()
            for at in range(0, len(answer), step):
                writer.write(answer[at : at + step])
                await asyncio.sleep(0)
            if closes:
                writer.close()
            await running
            assert read(client.got) == ("text/plain", None, whole)
        assert engine.connection_count == 1 + closes, "one is kept where it can be"


@pytest.mark.parametrize(
    ("answer", "has_streamed"),
    [
        (HEAD + b"X-Long: " + b"x" * (100 << 10) + b"\r\nContent-Length: 5\r\n\r\nhello", False),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", False),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", False),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH\r\n", False),
        (CHUNKED[:-9], True),
        (HEAD + b"Content-Length: 400000\r\n\r\nhello", True),
    ],
)
@on_loop
async def test_an_answer_that_is_none_or_half_of_one_fails_the_attempt(
    answer: bytes, *, has_streamed: bool
) -> None:
    async with scripted() as engine:
        running = run(engine.attempt(Client()))
        writer = await engine.asked.get()
        writer.write(answer)
        writer.close()
        with pytest.raises(LegFailure) as failed:
            await running
    found = failed.value
    assert (found.fault.failure, found.has_streamed) == (Failure.BROKEN, has_streamed)


FAULTS: list[tuple[int, bytes, Fault | None]] = [
    (200, b"context length", None),
    (204, b"", None),
    (301, b"", Fault(Failure.STATUS)),
    (400, b"wrong temperature", None),
    (400, b"This model's maximum context length is 4096 tokens.", Fault(REFUSED, Lack.CONTEXT)),
    (400, b"The prompt is longer than MAX_MODEL_LEN", Fault(REFUSED, Lack.CONTEXT)),
    (400, b"At most 1 image(s) may be provided in one prompt.", Fault(REFUSED, Lack.LIMIT)),
    (400, b"At most 0 audio(s) may be provided in one prompt.", Fault(REFUSED, Lack.LIMIT)),
    (400, b"This model does not support video inputs", Fault(REFUSED, Lack.LIMIT)),
    (400, b"m is not a multimodal model", Fault(REFUSED, Lack.MEDIA)),
    (400, b"unknown field 'multimodal'", None),
    (404, b"", Fault(REFUSED, Lack.MODEL)),
    (404, b"context length", Fault(REFUSED, Lack.MODEL)),
    (501, b"", Fault(REFUSED)),
    (422, b"context length", None),
    (429, b"", Fault(Failure.BUSY)),
    (500, b"context length", Fault(Failure.ERROR)),
    (502, b"", Fault(Failure.STATUS)),
    (503, b"", Fault(Failure.STATUS)),
    (599, b"", Fault(Failure.STATUS)),
]


@pytest.mark.parametrize(("status", "body", "fault"), FAULTS)
def test_a_status_is_a_fault_of_the_engine_or_a_word_about_the_request(
    status: int, body: bytes, fault: Fault | None
) -> None:
    found = fault_of(status, is_put_off=False, has_client_key=False, body=body)
    assert found == fault


def test_a_put_off_request_and_a_key_that_is_refused() -> None:
    busy = fault_of(503, is_put_off=True, has_client_key=False)
    assert busy == Fault(Failure.BUSY)
    for status in (401, 403):
        assert fault_of(status, is_put_off=False, has_client_key=True) == Fault(REFUSED)
        ours = fault_of(status, is_put_off=False, has_client_key=False)
        assert ours == Fault(Failure.STATUS), "the router's own key is wrong there"


@on_loop
async def test_a_kept_connection_that_ends_before_the_first_byte_is_tried_anew() -> None:
    async with scripted() as engine:
        await served(engine)
        client = Client()
        running = run(engine.attempt(client))
        (await engine.asked.get()).transport.abort()
        (await engine.asked.get()).write(SIZED)
        await running
        assert client.got.endswith(b"hello")


@pytest.mark.parametrize(
    ("is_kept", "said"), [(False, b""), (False, b"H"), (False, SIZED[:-3]), (True, SIZED[:-3])]
)
@on_loop
async def test_a_connection_that_ends_in_an_answer_or_at_its_first_request_is_the_engines_failure(
    said: bytes, *, is_kept: bool
) -> None:
    async with scripted() as engine:
        if is_kept:
            await served(engine)
        running = run(engine.attempt(Client()))
        writer = await engine.asked.get()
        writer.write(said)
        await writer.drain()
        writer.close()
        with pytest.raises(LegFailure) as failed:
            await running
        assert engine.asked.empty(), "and is not tried again"
    found = failed.value
    assert (found.fault.failure, found.has_streamed) == (Failure.BROKEN, False)


@on_loop
async def test_a_piece_for_a_client_that_is_leaving_ends_the_attempt() -> None:
    async with scripted() as engine:
        client = Client()
        running = run(engine.attempt(client))
        writer = await engine.asked.get()
        client.transport.is_closing = lambda: True
        writer.write(SIZED)
        with pytest.raises(ConnectionResetError, match="the client has left"):
            await running
        assert client.got == b""


@on_loop
async def test_an_answer_that_has_begun_is_not_given_up() -> None:
    async with scripted() as engine:
        client = Client()
        attempt = engine.attempt(client)
        running = run(attempt)
        writer = await engine.asked.get()
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await turns_until(lambda: attempt.has_answered)
        attempt.give_up()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")
        await running
        assert not attempt.worker.attempts
        assert client.got.endswith(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")


@asynccontextmanager
async def connecting(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> AsyncIterator[Attempt]:
    """An attempt whose connection never comes."""
    monkeypatch.setattr("kvstore.router.engines.connections.CONNECT_TIMEOUT_S", limit_s)
    async with asyncio.timeout(10), scripted() as engine:
        attempt = engine.attempt(Client())
        place = engine.engines.place(attempt.worker.url)
        place.connected = lambda _: asyncio.Event().wait()  # type: ignore[assignment, method-assign, misc]
        yield attempt


@on_loop
async def test_an_attempt_that_has_no_connection_yet_is_given_up_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connecting(monkeypatch, 1e6) as attempt:
        running = run(attempt)
        await turns_until(lambda: bool(attempt.worker.attempts))
        for give_up in list(attempt.worker.attempts):
            give_up()
        with pytest.raises(LegFailure) as failed:
            await running
        assert not attempt.worker.attempts
        assert failed.value.fault.failure is Failure.SILENT


@on_loop
async def test_an_attempt_is_given_up_as_its_time_to_connect_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect_s = 0.01
    async with connecting(monkeypatch, connect_s) as attempt:
        running, loop = run(attempt), asyncio.get_running_loop()
        await turns_until(lambda: bool(attempt.worker.attempts))
        threading.Event().wait(2 * connect_s)
        # The next turn of the loop ends the time, and the one after that wakes the attempt.
        given_up = asyncio.Event()

        def give_up() -> None:
            attempt.give_up()
            given_up.set()

        loop.call_soon(loop.call_soon, give_up)
        with pytest.raises(LegFailure, match="the engine is silent"):
            await running
        assert given_up.is_set()


@pytest.mark.parametrize(
    ("tail", "has_ended"),
    [
        (b"data: [DONE]\n\n", True),
        (b"event: message_stop\ndata: {}\n\n", True),
        (b"event: response.completed\ndata: {}", True),
        (b'data: {"text":"DONE"}\n\n', False),
        (b"", False),
    ],
)
@on_loop
async def test_a_stream_that_was_read_to_its_last_word_has_ended(
    tail: bytes, has_ended: bool
) -> None:
    attempt = Engine().attempt(Client())
    assert not attempt.has_ended
    attempt.tail = tail
    assert not attempt.has_ended, "nothing of it was sent"
    attempt.has_answered = True
    assert attempt.has_ended is has_ended


@pytest.mark.parametrize(
    ("tail", "numbers"),
    [
        (b"", (None, 0, 0)),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":7}}', (None, 9, 7)),
        (b'{"usage":{"input_tokens":9,"output_tokens":7,"cached_tokens" : 3}}', (3, 9, 7)),
        (b'"prompt_tokens":1,"prompt_tokens":2,"cached_tokens":0', (0, 2, 0)),
        (b'"prompt_tokens":-1,"cached_tokens":null,"completion_tokens":1.5', (None, 0, 1)),
        (b'"prompt_tokens":9999999999,"cached_tokens":1e9,"output_tokens":"7"', (None, 0, 0)),
        (b'"cached_tokens":' + b"9" * 5000, (None, 0, 0)),
    ],
)
def test_numbers_of_usage_are_those_of_a_request_or_none(
    tail: bytes, numbers: tuple[int | None, int, int]
) -> None:
    assert tokens_of(tail) == numbers


@on_loop
async def test_https_to_an_engine_without_tls_says_how_to_mend_it() -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        url = URL(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        engines = EngineHttp(ssl.create_default_context())
        with pytest.raises(NoConnection, match="does not speak TLS: give it an http:// URL"):
            await engines.place(url).connected()
