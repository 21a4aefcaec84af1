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

import asyncio
import contextlib
import enum
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore.config.values import HostPort, joined
from kvstore.errors import ConfigError, NodeBusy
from kvstore.net.aio import LoopThread, persist
from kvstore.obs.metrics import Family, Values, families
from kvstore.wording import cannot_listen

HEAD_BYTES_MAX: Final = 8 << 10
HEAD_TIMEOUT_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 5.0
CLIENT_COUNT_MAX: Final = 64
PAUSE_S: Final = 0.2
"""Pause until the next `accept`, when the process is out of descriptors, or all clients wait for
pages."""
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


class ClientPhase(enum.IntEnum):
    """Phase of a client. Where places are short, silent clients in the lesser phase leave first."""

    HEAD, ANSWER, PAGE = range(3)
    """Its head arrives; its answer goes; it waits for its page, and is not silent."""


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
        self._clients: dict[asyncio.Task[None], ClientPhase] = {}
        """Those of one phase by the time for which they are in it, the longest first."""
        self._answers: dict[_Target, asyncio.Task[bytes]] = {}
        """Page → the answer with it, until that is begun."""
        self._making = {path: asyncio.Lock() for path in pages}
        """Locks of pages, by path: one thread at a time makes it."""
        self._pool = ThreadPoolExecutor(max(1, len(pages)), thread_name_prefix="http-page")
        self._thread = LoopThread("http")

    def start(self) -> None:
        """Begin to answer. Once."""
        accepting = persist("the server of pages", self._accept, pause_s=PAUSE_S)
        asyncio.run_coroutine_threadsafe(accepting, self._thread.loop)

    def close(self) -> None:
        """Take no more and cut off the requests in flight: a slow reader delays no exit.

        Later connections wait for the next process that holds the socket, if there is one.
        Idempotent.
        """
        if self._socket.fileno() >= 0:
            self._thread.close()
            self._socket.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def fileno(self) -> int:
        """Descriptor of the listening socket."""
        return self._socket.fileno()

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except ConnectionError:  # it has hung up meanwhile
                continue
            except OSError:  # out of descriptors
                await asyncio.sleep(PAUSE_S)
                continue
            with contextlib.ExitStack() as held:
                held.enter_context(sock)  # closed if the server is, while places are short
                await asyncio.sleep(0)  # those before it first read what has arrived
                while len(self._clients) >= CLIENT_COUNT_MAX:
                    if (silent := self._silent()) is not None:
                        silent.cancel()
                        del self._clients[silent]
                    else:  # all of them wait for pages
                        await asyncio.sleep(PAUSE_S)
                held.pop_all()
            client = asyncio.create_task(self._serve(sock))
            self._clients[client] = ClientPhase.HEAD
            client.add_done_callback(partial(self._hang_up, sock))

    def _silent(self) -> asyncio.Task[None] | None:
        """The oldest client without a complete head, or else with an unsent answer."""
        silent = (client for client, its in self._clients.items() if its is not ClientPhase.PAGE)
        return min(silent, key=self._clients.__getitem__, default=None)

    def _hang_up(self, sock: socket.socket, client: asyncio.Task[None]) -> None:
        self._clients.pop(client, None)
        sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        loop, head = asyncio.get_running_loop(), bytearray()
        with contextlib.suppress(OSError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    while b"\r\n\r\n" not in head and len(head) <= HEAD_BYTES_MAX:
                        if not (piece := await loop.sock_recv(sock, HEAD_BYTES_MAX)):
                            break
                        head += piece
            self._enter(ClientPhase.PAGE)
            answer = await self._answer_to(bytes(head))
            self._enter(ClientPhase.ANSWER)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await loop.sock_sendall(sock, answer)

    def _enter(self, phase: ClientPhase) -> None:
        """The client of the running task is the newest in this phase."""
        client = asyncio.current_task()
        assert client is not None
        del self._clients[client]
        self._clients[client] = phase

    async def _answer_to(self, head: bytes) -> bytes:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        path, _, query = (parts[1].decode("latin-1") if len(parts) == 3 else "").partition("?")
        target: _Target = (f"{path}?", query) if f"{path}?" in self._pages else (path,)
        if b"\r\n\r\n" not in head or not parts[-1].startswith(b"HTTP/1.") or not path:
            return _response(text_page(400, "not an HTTP/1.1 request"))
        if parts[0] != b"GET":
            return _response(text_page(405, "only GET"))
        if self._is_loopback and _FOREIGN.search(head):
            text = f"on loopback only localhost and IP addresses are answered: use {self.url}"
            return _response(text_page(400, text))
        if target[0] not in self._pages:
            return _response(text_page(404, f"only {', '.join(self._pages)}"))
        if target not in self._answers:
            self._answers[target] = asyncio.create_task(self._answer_with(*target))
        return await asyncio.shield(self._answers[target])

    async def _answer_with(self, path: str, *query: str) -> bytes:
        """The answer with a page, for all that ask for it until it is begun."""
        async with self._making[path]:
            del self._answers[path, *query]
            loop = asyncio.get_running_loop()
            making = loop.run_in_executor(self._pool, self._pages[path], *query)
            await asyncio.wait([making])
            if (error := making.exception()) is not None:
                _log.error("a page could not be made", exc_info=error)
                return b""
            return _response(making.result())


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
