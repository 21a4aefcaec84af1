"""/metrics, /healthz and the page: read-only answers over HTTP, bounded in every direction.

    thread "http"   accept ─▶ head ─▶ wait for the page ─▶ answer ─▶ closed
    one per page                        └─ made once for all that wait ─┘

One thread has all connections: a silent one costs a place and no thread. A request head has at most
8 KiB and must arrive within 2 s in all, an answer must be taken within 5 s. Where CLIENT_COUNT_MAX
are connected, the oldest that is silent gives way to the newest, so that silence keeps no probe
out. A page is made by one thread at a time, for all requests that had arrived by then: a crowd
costs the node no more than a few. Not a web server: GET of known paths, one request per connection.

A server on loopback refuses host names other than localhost: a web page of somebody else, whose
name resolves to 127.0.0.1, would read it with the operator's browser (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore.config.values import HostPort, joined
from kvstore.errors import ConfigError, NodeBusy
from kvstore.mailbox import Mailbox
from kvstore.obs.metrics import Family, Values, families
from kvstore.wording import cannot_listen

HEAD_BYTES_MAX: Final = 8 << 10
HEAD_TIMEOUT_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 5.0
CLIENT_COUNT_MAX: Final = 64
ACCEPTS_PER_TURN: Final = 16
PAUSE_S: Final = 0.2
"""Pause until the next `accept`, when the process is out of descriptors."""
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all answers."""
_FOREIGN: Final = re.compile(
    rb"\r\nhost:(?![ \t]*(localhost|[\d.]*|\[[\da-f:.]+\])(:\d+)?[ \t]*\r\n)", re.IGNORECASE
)
"""Host header that is neither localhost nor an IP address."""

_log = logging.getLogger(__name__)


class Page(NamedTuple):
    """Content of one HTTP answer."""

    status: int
    content_type: str
    body: bytes


PageMaker = Callable[..., Page]
"""Function that makes a page. Takes no arguments, or the query if its path ends with `?`."""
_Target = tuple[str, *tuple[str, ...]]
"""Path of a page; and the query, if the page depends on it."""


def text_page(status: int, text: str) -> Page:
    """A plain text answer."""
    return Page(status, "text/plain; charset=utf-8", text.encode() + b"\n")


class _Families(Collector):
    def __init__(self, read: Callable[[], Values]) -> None:
        self._read = read

    def collect(self) -> Iterable[Family]:
        return families(self._read())


def metrics_page(read: Callable[[], Values], *, busy: str = "") -> PageMaker:
    """The page /metrics. `read`: returns the values, or raises NodeBusy or TimeoutError, and the
    page is `busy` then; empty: the error's text."""

    def page() -> Page:
        try:
            return Page(200, CONTENT_TYPE_LATEST, generate_latest(_Families(read)))
        except (NodeBusy, TimeoutError) as error:
            return text_page(503, busy or str(error))

    return page


class _Client:
    """A connection: its head arrives, it waits for a page, its answer goes."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.head = bytearray()
        self.answer: memoryview | None = None
        self.deadline_s: float | None = time.monotonic() + HEAD_TIMEOUT_S
        """Limit for the client to send its head, or to take the answer; None: it waits for its
        page.
        """

    def hears(self) -> bool:
        """Read from the client. Returns whether the head is complete, too long, or the connection
        has ended. Raises OSError.
        """
        while b"\r\n\r\n" not in self.head and len(self.head) <= HEAD_BYTES_MAX:
            try:
                piece = self.socket.recv(HEAD_BYTES_MAX)
            except BlockingIOError:
                return False
            if not piece:
                break
            self.head += piece
        return True

    def begin(self, answer: bytes) -> None:
        """Begin to send an answer, with a new deadline."""
        self.answer = memoryview(answer)
        self.deadline_s = time.monotonic() + ANSWER_TIMEOUT_S

    def says(self) -> bool:
        """Send what the client takes. Returns whether all of the answer has been sent. Raises
        OSError.
        """
        assert self.answer is not None
        with contextlib.suppress(BlockingIOError):
            while self.answer:
                self.answer = self.answer[self.socket.send(self.answer) :]
        return not self.answer


class HttpServer:
    """Serves `pages` (path → function that makes the page) until `close`."""

    def __init__(
        self, config: HostPort, pages: Mapping[str, PageMaker], *, held_fd: int = -1
    ) -> None:
        """Listen.

        Args:
            config: the address.
            pages: path → function that makes the page.
            held_fd: the listening socket, if an earlier process left it; ours from now on.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._pages = pages
        self._socket = socket.socket(fileno=held_fd) if held_fd >= 0 else _listen(config)
        # Another process may have it, too: nothing but `accept` is ever done to it, and that may
        # come too late.
        self._socket.setblocking(False)
        host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{joined(host, self.port)}"
        self._is_loopback = ipaddress.ip_address(host).is_loopback
        self._clients: dict[int, _Client] = {}
        """Descriptor → client; heads that arrive and answers that go, oldest first."""
        self._waiting = defaultdict[_Target, list[_Client]](list)
        """Page → clients that wait for it; begun when the page of its path that is being made is
        ready.
        """
        self._making: set[str] = set()
        self._made = Mailbox[tuple[str, list[_Client], bytes]]()
        self._accept_again_s = 0.0
        self._pool = ThreadPoolExecutor(max(1, len(pages)), thread_name_prefix="http-page")
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Begin to answer. Once."""
        self._thread.start()

    def close(self) -> None:
        """Take no more and cut off the requests in flight: a slow reader delays no exit.

        Later connections wait for the next process that holds the socket, if there is one.
        """
        self._made.end()
        if self._thread.is_alive():
            self._thread.join()
        for client in self._clients.values():
            client.socket.close()
        self._clients.clear()
        self._socket.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._made.close()

    def fileno(self) -> int:
        """Descriptor of the listening socket."""
        return self._socket.fileno()

    def _run(self) -> None:
        while not self._made.has_ended:
            ready = self._ready()
            for made in self._made.take():
                self._answer(*made)
            for client in [self._clients[fd] for fd in ready if fd in self._clients]:
                self._turn(client)
            if self._socket.fileno() in ready:
                self._accept()
            self._expire(time.monotonic())

    def _ready(self) -> list[int]:
        """Wait. Returns descriptors with input or room for output, the listening one included."""
        poll, now_s = select.poll(), time.monotonic()
        poll.register(self._made, select.POLLIN)
        times = [client.deadline_s for client in self._clients.values() if client.deadline_s]
        for fd, client in self._clients.items():
            if client.deadline_s is not None:
                poll.register(fd, select.POLLIN if client.answer is None else select.POLLOUT)
        if now_s < self._accept_again_s:
            times.append(self._accept_again_s)
        elif len(self._clients) < CLIENT_COUNT_MAX or self._silent() is not None:
            poll.register(self._socket, select.POLLIN)
        wait_ms = max(0.0, min(times) - now_s) * 1000 + 1 if times else None
        return [fd for fd, _ in poll.poll(wait_ms)]

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            silent = self._silent()
            if len(self._clients) >= CLIENT_COUNT_MAX and silent is None:
                return  # all of them wait for pages, which others come to when those are made
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # out of descriptors
                self._accept_again_s = time.monotonic() + PAUSE_S
                return
            if len(self._clients) >= CLIENT_COUNT_MAX and silent is not None:
                self._hang_up(silent)
            sock.setblocking(False)
            client = self._clients[sock.fileno()] = _Client(sock)
            self._turn(client)

    def _silent(self) -> _Client | None:
        """The oldest client without a complete head, or else with an unsent answer."""
        late = [client for client in self._clients.values() if client.deadline_s is not None]
        return next((each for each in late if each.answer is None), next(iter(late), None))

    def _turn(self, client: _Client) -> None:
        try:
            if client.answer is None and client.hears():
                self._heard(client)
            if client.answer is not None and client.says():
                self._hang_up(client)
        except OSError:
            self._hang_up(client)

    def _heard(self, client: _Client) -> None:
        parts = bytes(client.head).split(b"\r\n", 1)[0].split(b" ")
        path, _, query = (parts[1].decode("latin-1") if len(parts) == 3 else "").partition("?")
        target: _Target = (f"{path}?", query) if f"{path}?" in self._pages else (path,)
        if b"\r\n\r\n" not in client.head or not parts[-1].startswith(b"HTTP/1.") or not path:
            client.begin(_response(text_page(400, "not an HTTP/1.1 request")))
        elif parts[0] != b"GET":
            client.begin(_response(text_page(405, "only GET")))
        elif self._is_loopback and _FOREIGN.search(client.head):
            text = f"on loopback only localhost and IP addresses are answered: use {self.url}"
            client.begin(_response(text_page(400, text)))
        elif target[0] not in self._pages:
            client.begin(_response(text_page(404, f"only {', '.join(self._pages)}")))
        else:
            client.deadline_s = None
            self._waiting[target].append(client)
            self._make(target[0])

    def _make(self, path: str) -> None:
        """Begin to make the next page of a path, for all clients that wait for it by now."""
        target = next((each for each in self._waiting if each[0] == path), None)
        if path in self._making or target is None:
            return
        clients = self._waiting.pop(target)
        self._making.add(path)
        making = self._pool.submit(self._pages[path], *target[1:])
        making.add_done_callback(lambda made: self._is_made(path, clients, made))

    def _is_made(self, path: str, clients: list[_Client], made: Future[Page]) -> None:
        """Pass a page to the thread of the server; called on the thread that made it."""
        error = None if made.cancelled() else made.exception()
        if error is not None:
            _log.error("a page could not be made", exc_info=error)
        self._made.put(
            (path, clients, b"" if error or made.cancelled() else _response(made.result()))
        )

    def _answer(self, path: str, clients: Iterable[_Client], answer: bytes) -> None:
        self._making.discard(path)
        for client in clients:
            # Now the newest of the clients with an answer.
            self._clients[client.socket.fileno()] = self._clients.pop(client.socket.fileno())
            client.begin(answer)
            self._turn(client)
        self._make(path)

    def _expire(self, now_s: float) -> None:
        for client in list(self._clients.values()):
            if client.deadline_s is None or now_s < client.deadline_s:
                continue
            if client.answer is None:
                client.begin(_response(text_page(400, "not an HTTP/1.1 request")))
                self._turn(client)
            else:
                self._hang_up(client)

    def _hang_up(self, client: _Client) -> None:
        del self._clients[client.socket.fileno()]
        client.socket.close()


def _response(page: Page) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {_REASONS.get(page.status, 'Unavailable')}\r\n"
        f"Content-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n"
        "Connection: close\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    return f"{head}\r\n".encode() + page.body


def listening(option: str, host: str, port: int) -> socket.socket:
    """A socket that listens on HOST:PORT. Raises ConfigError: it cannot, with the flag to change;
    OSError: the kernel has no such addresses, as without IPv6.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        raise ConfigError(cannot_listen(option, joined(host, port), error)) from None
    return sock


def _listen(config: HostPort) -> socket.socket:
    try:
        return listening("--metrics", *config)
    except ConfigError as error:
        raise ConfigError(f"{error}, such as 127.0.0.1:0, or off") from None
