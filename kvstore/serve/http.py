"""/metrics and /healthz: two read-only pages over HTTP, bounded in every direction.

A handful of threads, a request head of at most 8 KiB that must arrive within 2 s in all, an answer
that must be taken within 5 s, one request per connection. Not a web server: GET of known paths.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from kvstore.errors import ConfigError
from kvstore.serve.addresses import HttpConfig

HEAD_BYTES_MAX: Final = 8 << 10
HEAD_TIMEOUT_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 5.0
THREAD_COUNT: Final = 4
WAITING_COUNT_MAX: Final = 16
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}

_log = logging.getLogger(__name__)


class Page(NamedTuple):
    """One answer."""

    status: int
    content_type: str
    body: bytes


def text_page(status: int, text: str) -> Page:
    """A plain text answer."""
    return Page(status, "text/plain; charset=utf-8", text.encode() + b"\n")


class HttpServer:
    """Serves `pages` (path → function that makes the page) until `close`."""

    def __init__(
        self, config: HttpConfig, pages: Mapping[str, Callable[[], Page]], *, held_fd: int = -1
    ) -> None:
        """Listen.

        Args:
            config: where.
            pages: what.
            held_fd: the listening socket, if an earlier process left it; ours from now on.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._pages = pages
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.socket(fileno=held_fd) if held_fd >= 0 else _listen(config, family)
        # Another process may have it, too: nothing but `accept` is ever done to it, and that may
        # come too late.
        self._socket.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if family == socket.AF_INET6 else host}:{self.port}"
        self._pool = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="http")
        self._room = threading.Semaphore(THREAD_COUNT + WAITING_COUNT_MAX)
        self._clients: set[socket.socket] = set()
        self._clients_lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="http-accept", daemon=True)

    def start(self) -> None:
        """Begin to answer. Once."""
        self._thread.start()

    def close(self) -> None:
        """Take no more and cut off the requests in flight: a slow reader delays no exit.

        Who connects then is heard by the process that holds the socket next, if there is one.
        """
        self._waker.close()
        if self._thread.is_alive():
            self._thread.join()
        with self._clients_lock:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._woken.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fileno(self) -> int:
        """Of the listening socket."""
        return self._socket.fileno()

    def _accept(self) -> None:
        ready = select.poll()
        for sock in (self._socket, self._woken):
            ready.register(sock, select.POLLIN)
        while True:
            if any(fd == self._woken.fileno() for fd, _ in ready.poll()):
                return
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError:
                threading.Event().wait(0.2)  # out of descriptors: others must close some first
                continue
            if not self._room.acquire(blocking=False):
                client.close()
                continue
            try:
                self._pool.submit(self._answer, client).add_done_callback(_report)
            except RuntimeError:  # closed in between
                client.close()
                return

    def _answer(self, client: socket.socket) -> None:
        with self._clients_lock:
            self._clients.add(client)
        try:
            with client, contextlib.suppress(OSError):
                page = self._page(_read_head(client))
                head = (
                    f"HTTP/1.1 {page.status} {_REASONS.get(page.status, 'Unavailable')}\r\n"
                    f"Content-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n"
                    "Connection: close\r\n\r\n"
                )
                client.settimeout(ANSWER_TIMEOUT_S)
                client.sendall(head.encode() + page.body)
        finally:
            with self._clients_lock:
                self._clients.discard(client)
            self._room.release()

    def _page(self, head: bytes) -> Page:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return text_page(400, "not an HTTP/1.1 request")
        if parts[0] != b"GET":
            return text_page(405, "only GET")
        make = self._pages.get(parts[1].split(b"?", 1)[0].decode("latin-1"))
        return text_page(404, f"only {', '.join(self._pages)}") if make is None else make()


def _listen(config: HttpConfig, family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
        sock.listen()
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"metrics cannot listen on {config.host}:{config.port}: {error.strerror};"
            " choose another --metrics, such as 127.0.0.1:0, or off"
        ) from None
    return sock


def _report(answered: Future[None]) -> None:
    error = None if answered.cancelled() else answered.exception()
    if error is not None:
        _log.error("a page could not be made", exc_info=error)


def _read_head(client: socket.socket) -> bytes:
    """The request head; empty when it is too long or too late. Raises OSError."""
    head = b""
    deadline_s = time.monotonic() + HEAD_TIMEOUT_S
    while b"\r\n\r\n" not in head:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or len(head) > HEAD_BYTES_MAX:
            return b""
        client.settimeout(left_s)
        try:
            piece = client.recv(HEAD_BYTES_MAX)
        except TimeoutError:
            return b""
        if not piece:
            return b""
        head += piece
    return head
