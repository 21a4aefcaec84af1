"""The two pages: what is answered, and that nobody can hold the server up."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.errors import ConfigError
from kvstore.serve import http as http_module
from kvstore.serve.addresses import HttpConfig
from kvstore.serve.http import THREAD_COUNT, WAITING_COUNT_MAX, HttpServer, Page, text_page


@pytest.fixture
def server() -> Iterator[HttpServer]:
    pages = {
        "/healthz": lambda: text_page(200, "ok"),
        "/bug": lambda: text_page(1 // 0, ""),
        "/big": lambda: Page(200, "text/plain", b"x" * (8 << 20)),
    }
    made = HttpServer(HttpConfig(host="127.0.0.1", port=0), pages)
    made.start()
    yield made
    made.close()


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
        (b"GET /\xff HTTP/1.1", b"HTTP/1.1 404 Not Found"),
        (b"POST /healthz HTTP/1.1", b"HTTP/1.1 405 Method Not Allowed"),
        (b"hello", b"HTTP/1.1 400 Bad Request"),
        (b"GET /healthz SPDY/3", b"HTTP/1.1 400 Bad Request"),
    ],
)
def test_requests(server: HttpServer, request_line: bytes, answer: bytes) -> None:
    got = ask(server, request_line + b"\r\nHost: x\r\n\r\n")
    assert got.startswith(answer + b"\r\n")
    assert b"Connection: close\r\n" in got


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


def test_a_crowd_of_silent_clients_is_bounded_and_passes(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT_S", 0.2)
    crowd = [connect(server) for _ in range(2 * (THREAD_COUNT + WAITING_COUNT_MAX))]
    assert threading.active_count() < THREAD_COUNT + 10
    answers = []
    for client in crowd:
        try:
            answers.append(client.recv(100)[:12])
        except ConnectionResetError:
            answers.append(b"")
        client.close()
    assert answers.count(b"HTTP/1.1 400") >= THREAD_COUNT
    assert b"" in answers, "beyond the bound they are turned away at once"
    assert ask(server, b"GET /healthz HTTP/1.1\r\n\r\n").endswith(b"ok\n")


def test_closing_waits_for_nobody(server: HttpServer) -> None:
    with connect(server) as slow:
        slow.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert slow.recv(10)
        begin_s = time.monotonic()
        server.close()
        server._pool.shutdown(wait=True)
        assert time.monotonic() - begin_s < 1


def test_a_socket_that_is_held_passes_from_server_to_server(server: HttpServer) -> None:
    held_fd = os.dup(server.fileno())
    server.close()
    with pytest.raises(ConfigError, match="in use"):
        HttpServer(HttpConfig(host="127.0.0.1", port=server.port), {})
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as early:
        early.sendall(b"GET /next HTTP/1.1\r\n\r\n")
        pages = {"/next": lambda: text_page(200, "next")}
        following = HttpServer(HttpConfig(host="127.0.0.1", port=0), pages, held_fd=held_fd)
        try:
            assert (following.port, following.url) == (server.port, server.url)
            following.start()
            assert early.recv(1000).endswith(b"next\n"), "who came in between is heard"
        finally:
            following.close()


def test_a_taken_port_is_one_sentence(server: HttpServer) -> None:
    with pytest.raises(ConfigError, match=r"in use; choose another --metrics"):
        HttpServer(HttpConfig(host="127.0.0.1", port=server.port), {})
