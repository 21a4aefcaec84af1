"""The pages: what is answered, and that nobody can hold the server up."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import pytest

from kvstore.config.values import HostPort
from kvstore.errors import ConfigError
from kvstore.net import http as http_module
from kvstore.net.http import CLIENT_COUNT_MAX, HEADERS, HttpServer, Page, PageMaker, text_page

HEALTHZ = b"GET /healthz HTTP/1.1\r\n\r\n"


@contextmanager
def serving(pages: dict[str, PageMaker], host: str = "127.0.0.1") -> Iterator[HttpServer]:
    made = HttpServer(HostPort(host=host, port=0), pages)
    made.start()
    with closing(made):
        yield made


@pytest.fixture
def server() -> Iterator[HttpServer]:
    pages: dict[str, PageMaker] = {
        "/healthz": lambda: text_page(200, "ok"),
        "/bug": lambda: text_page(1 // 0, ""),
        "/big": lambda: Page(200, "text/plain", b"x" * (8 << 20)),
        "/asked?": lambda query: text_page(200, f"<{query}>"),
    }
    with serving(pages) as made:
        yield made


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def ask(server: HttpServer, request: bytes) -> bytes:
    with connect(server) as client:
        client.sendall(request)
        pieces = []
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("request_line", "answer"),
    [
        (b"GET /healthz HTTP/1.1", b"HTTP/1.1 200 OK"),
        (b"GET /healthz?x=1 HTTP/1.0", b"HTTP/1.1 200 OK"),
        (b"GET / HTTP/1.1", b"HTTP/1.1 404 Not Found"),
        (b"GET /asked?id=1 HTTP/1.1", b"HTTP/1.1 200 OK"),
        (b"HEAD /healthz HTTP/1.1", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET /\xff HTTP/1.1", b"HTTP/1.1 404 Not Found"),
        (b"POST /healthz HTTP/1.1", b"HTTP/1.1 405 Method Not Allowed"),
        (b"hello", b"HTTP/1.1 400 Bad Request"),
        (b"GET /healthz SPDY/3", b"HTTP/1.1 400 Bad Request"),
    ],
)
def test_requests(server: HttpServer, request_line: bytes, answer: bytes) -> None:
    got = ask(server, request_line + b"\r\nHost: localhost\r\n\r\n")
    assert got.startswith(answer + b"\r\n")
    head = got.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert {"Connection: close", *(f"{name}: {text}" for name, text in HEADERS.items())} < {*head}


def test_a_browser_may_load_nothing_but_the_page_itself() -> None:
    its = {name: HEADERS[name] for name in ("X-Content-Type-Options", "Referrer-Policy")}
    assert its == {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    assert HEADERS["Cache-Control"] == "no-store"
    policy = HEADERS["Content-Security-Policy"]
    assert dict(each.split(" ", 1) for each in policy.split("; ")) == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
        "form-action": "'none'",
    }


HOSTS = {
    "": 200,
    "localhost": 200,
    "LOCALHOST:9464": 200,
    "127.0.0.1:9464": 200,
    "[::1]:9464": 200,
    "10.0.0.1": 200,
    "evil.example": 400,
    "evil.example:9464": 400,
    "127.0.0.1.evil.example": 400,
    "localhost.evil.example": 400,
    "localhost:x.evil": 400,
    "[::1].evil.example": 400,
}


def test_on_loopback_a_name_that_somebody_else_may_own_is_refused(server: HttpServer) -> None:
    found = {
        host: int(ask(server, f"GET /healthz HTTP/1.1\r\nhOsT: {host}\r\n\r\n".encode()).split()[1])
        for host in HOSTS
    }
    assert found == HOSTS


def test_elsewhere_any_name_is_answered() -> None:
    with serving({"/x": lambda: text_page(200, "ok")}, "0.0.0.0") as made:
        assert ask(made, b"GET /x HTTP/1.1\r\nHost: node.example\r\n\r\n").endswith(b"ok\n")


def test_pages_of_many_queries_keep_one_thread_busy() -> None:
    """Or whoever asks them would keep /healthz waiting."""
    busy, most, lock, gate = 0, 0, threading.Lock(), threading.Semaphore(0)

    def page(query: str) -> Page:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        gate.acquire()
        with lock:
            busy -= 1
        return text_page(200, query)

    pages: dict[str, PageMaker] = {"/asked?": page, "/healthz": lambda: text_page(200, "ok")}
    with serving(pages) as made, ExitStack() as stack:
        clients = [stack.enter_context(connect(made)) for _ in range(8)]
        for number, client in enumerate(clients):
            client.sendall(f"GET /asked?{number} HTTP/1.1\r\n\r\n".encode())
        assert ask(made, HEALTHZ).endswith(b"ok\n")
        for _ in clients:
            gate.release()
        answers = [client.makefile("rb").read().split()[-1] for client in clients]
    assert (answers, most) == ([b"%d" % number for number in range(8)], 1)


def test_a_page_that_fails_is_logged_and_the_next_one_served(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(server, b"GET /bug HTTP/1.1\r\n\r\n") == b""
    assert ask(server, b"GET /healthz HTTP/1.1\r\n\r\n").endswith(b"ok\n")
    deadline_s = time.monotonic() + 5
    while "a page could not be made" not in caplog.text:
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)
    assert "ZeroDivisionError" in caplog.text


def test_a_head_without_end_is_cut_off(server: HttpServer) -> None:
    got = ask(server, b"GET /healthz HTTP/1.1\r\nX: " + b"y" * http_module.HEAD_BYTES_MAX)
    assert got.startswith(b"HTTP/1.1 400")


def test_dripping_does_not_prolong_the_deadline(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT_S", 0.3)
    with connect(server) as client:
        begin_s = time.monotonic()
        client.settimeout(0.1)
        got = b""
        while not got:
            client.sendall(b"G")
            try:
                got = client.recv(100)
            except TimeoutError:
                assert time.monotonic() - begin_s < 5, "still listening to a drip"
        assert got.startswith(b"HTTP/1.1 400")


def silent_crowd(server: HttpServer, stack: ExitStack, count: int) -> list[socket.socket]:
    return [stack.enter_context(connect(server)) for _ in range(count)]


def is_hung_up_on(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\n"])
def test_the_oldest_that_is_silent_gives_way(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT_S", 600.0)
    with ExitStack() as stack:
        crowd = silent_crowd(server, stack, CLIENT_COUNT_MAX)
        for client in crowd:
            client.sendall(said)
        assert ask(server, HEALTHZ).endswith(b"ok\n")
        assert is_hung_up_on(crowd[0])
        crowd[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            crowd[1].recv(100)
        assert not [each for each in threading.enumerate() if "page_" in each.name][1:]


def test_those_who_do_not_take_their_answers_give_way(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "ANSWER_TIMEOUT_S", 600.0)
    monkeypatch.setattr(http_module, "CLIENT_COUNT_MAX", 6)
    with ExitStack() as stack:
        crowd = silent_crowd(server, stack, 6)
        for client in crowd:
            client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
            assert client.recv(1)
        assert ask(server, HEALTHZ).endswith(b"ok\n")


def test_those_whose_requests_are_there_are_answered_however_many_come_at_once() -> None:
    pages: dict[str, PageMaker] = {"/healthz": lambda: text_page(200, "ok")}
    server = HttpServer(HostPort(host="127.0.0.1", port=0), pages)
    with closing(server), ExitStack() as stack:
        crowd = silent_crowd(server, stack, CLIENT_COUNT_MAX + 40)  # in the kernel's queue
        for client in crowd:
            client.sendall(HEALTHZ)
        server.start()
        answers = [client.makefile("rb").read() for client in crowd]
    assert all(answer.endswith(b"ok\n") for answer in answers)


class Counted(dict[Any, Any]):
    """Clients of a server, and the most that there were at a time."""

    most = 0

    def __setitem__(self, client: Any, its: Any) -> None:
        super().__setitem__(client, its)
        self.most = max(self.most, len(self))


def test_those_who_wait_for_a_page_keep_their_places_and_no_more_are_taken() -> None:
    may_go_on = threading.Event()

    def slow() -> Page:
        may_go_on.wait(60)
        return text_page(200, "ok")

    server = HttpServer(HostPort(host="127.0.0.1", port=0), {"/slow": slow})
    server._clients = clients = Counted()
    server.start()
    with closing(server), ExitStack() as stack:
        stack.callback(may_go_on.set)
        crowd = []
        for _ in range(2 * CLIENT_COUNT_MAX):
            crowd += silent_crowd(server, stack, 1)
            crowd[-1].sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        deadline_s = time.monotonic() + 60
        while clients.most < CLIENT_COUNT_MAX and time.monotonic() < deadline_s:
            threading.Event().wait(0.01)
        may_go_on.set()
        answers = [client.makefile("rb").read() for client in crowd]
    assert clients.most == CLIENT_COUNT_MAX
    assert all(answer.endswith(b"ok\n") for answer in answers)


def test_a_page_is_made_once_for_all_who_wait_for_it() -> None:
    begun, may_go_on = threading.Semaphore(0), threading.Event()
    made: list[int] = []

    def slow() -> Page:
        made.append(len(made))
        begun.release()
        may_go_on.wait(60)
        return text_page(200, str(len(made)))

    pages: dict[str, PageMaker] = {"/slow": slow, "/healthz": lambda: text_page(200, "ok")}
    with serving(pages) as server, ExitStack() as stack:
        stack.callback(may_go_on.set)
        crowd = silent_crowd(server, stack, CLIENT_COUNT_MAX - 1)
        crowd[0].sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        assert begun.acquire(timeout=60)
        for client in crowd[1:]:
            client.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        # It comes after all of them: they have been read.
        assert ask(server, HEALTHZ).endswith(b"ok\n")
        may_go_on.set()
        answers = [b"".join(iter(partial(client.recv, 4096), b"")) for client in crowd]
        assert [answer[-2:-1] for answer in answers] == [b"1"] + [b"2"] * (len(crowd) - 1)


def test_closing_waits_for_nobody(server: HttpServer) -> None:
    with connect(server) as slow:
        slow.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert slow.recv(10)
        begin_s = time.monotonic()
        server.close()
        assert time.monotonic() - begin_s < 1


def test_a_socket_that_is_held_passes_from_server_to_server(server: HttpServer) -> None:
    held_fd = os.dup(server.fileno())
    server.close()
    with pytest.raises(ConfigError, match=r"the address is in use; choose another --metrics"):
        HttpServer(HostPort(host="127.0.0.1", port=server.port), {})
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as early:
        early.sendall(b"GET /next HTTP/1.1\r\n\r\n")
        pages = {"/next": lambda: text_page(200, "next")}
        following = HttpServer(HostPort(host="127.0.0.1", port=0), pages, held_fd=held_fd)
        try:
            assert (following.port, following.url) == (server.port, server.url)
            following.start()
            assert early.recv(1000).endswith(b"next\n"), "who came in between is heard"
        finally:
            following.close()
