"""Connections to engines: which are kept, and answers in every framing that engines choose."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.integration.router.test_proxy import until
from tests.kit.router_thread import ASK, RouterThread

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
TRAILED = HEAD + (
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
    b"Link: x\r\nConnection: content-type\r\n\r\n"
)
SIZED = HEAD + b"Content-Length: 5\r\n\r\nhello"


class RawEngine:
    """Answers each completion with the next of some bytes, then closes if told to."""

    def __init__(self, answers: Sequence[bytes], *, step: int, closes: bool) -> None:
        self._answers, self._step, self._closes = list(answers), step, closes
        self._server = socket.create_server(("127.0.0.1", 0))
        self.flag = f"a=http://127.0.0.1:{self._server.getsockname()[1]}"
        self.asked = list[int]()
        """Number of the connection of each completion."""
        self._count = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._count += 1
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(
                target=self._serve, args=(connection, self._count), daemon=True
            ).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                length = 0
                while (field := reader.readline()) not in (b"\r\n", b""):
                    if field.lower().startswith(b"content-length:"):
                        length = int(field.split(b":")[1])
                reader.read(length)
                if not line.startswith(b"POST"):
                    connection.sendall(SIZED)  # probes
                    continue
                self.asked.append(number)
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                for at in range(0, len(answer), self._step):
                    connection.sendall(answer[at : at + self._step])
                if self._closes:
                    return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)


@contextmanager
def engine(*answers: bytes, step: int = 1 << 20, closes: bool = False) -> Iterator[RawEngine]:
    made = RawEngine(answers, step=step, closes=closes)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("answer", "closes", "whole"),
    [
        (CHUNKED, False, b"hello world"),
        (TRAILED, False, b"hello"),
        (SIZED, False, b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED, False, b"hello"),
        (HEAD + b"\r\nhello world", True, b"hello world"),
        (HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", True, b"hello"),
        (HEAD + b"Content-Length: 0\r\n\r\n", False, b""),
    ],
)
def test_an_answer_arrives_whole_in_any_framing(
    answer: bytes, closes: bool, whole: bytes, step: int
) -> None:
    with engine(answer, step=step, closes=closes) as one, RouterThread([one.flag]) as router:
        for _ in range(3):
            status, headers, body = router.ask()
            assert (status, body, headers["content-type"]) == (200, whole, "text/plain")
            assert "link" not in headers
        assert (len(set(one.asked)) == 3) == closes, "a connection is kept where it can be"


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"X-Long: " + b"x" * (100 << 10) + b"\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
def test_an_answer_that_is_none_fails_the_attempt(answer: bytes) -> None:
    with engine(answer, closes=True) as one, RouterThread([one.flag]) as router:
        assert router.ask()[0] >= 500
        until(lambda: not router.core.under_way)
        assert router.failure_count("a") >= 1


@pytest.mark.parametrize("answer", [CHUNKED[:-9], HEAD + b"Content-Length: 400000\r\n\r\nhello"])
def test_half_an_answer_is_never_taken_for_a_whole_one(answer: bytes) -> None:
    with engine(answer, closes=True) as one, RouterThread([one.flag]) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)
        connection.request("POST", "/v1/completions", json.dumps(ASK))
        with pytest.raises((http.client.HTTPException, ConnectionError)):  # noqa: PT012
            answered = connection.getresponse()
            if answered.status == 200:
                answered.read()
            else:
                raise http.client.HTTPException("nothing of it was sent")
        connection.close()


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    """A second answer would be that of the next request, which may be another client's."""
    two = SIZED + HEAD + b"Content-Length: 6\r\n\r\nsecret"
    with engine(two, SIZED) as one, RouterThread([one.flag]) as router:
        first = router.ask()
        assert first[0] >= 500 or first[2] == b"hello"
        assert router.ask()[2] == b"hello"
        assert one.asked[0] != one.asked[-1]
