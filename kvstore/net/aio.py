"""Threads with an asyncio loop each.

One per process for all gRPC, because gRPC's asyncio side has one poller per process; one for pages
(`http`). Covers: the thread, work that no task awaits, work without an end, jitter, addresses in
DNS. Does not cover: the work itself (`index`, `feed`, `http`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from kvstore.config.values import joined

CLOSE_TIMEOUT_S: Final = 5.0
DNS_TIMEOUT_S: Final = 3.0
DNS_S: Final = 0.5
"""Longest time to wait for DNS about a host whose address is known from before."""
_MILLI: Final = 1000

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def call_on(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T], *, timeout_s: float
) -> _T:
    """Run `coroutine` on the loop of another thread and wait for its result.

    Raises:
        TimeoutError: the coroutine took longer, and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise


def end_now(limit: asyncio.Timeout) -> None:
    """Have a timeout end now; nothing if its time is over already: its task may have yet to wake,
    and asyncio refuses to change a timeout then.
    """
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


class LoopThread:
    """A thread that runs an asyncio loop from construction until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, _T], *, timeout_s: float) -> _T:
        """`call_on` this loop."""
        return call_on(self.loop, coroutine, timeout_s=timeout_s)

    def close(self) -> None:
        """Cancel all running work, and end."""
        with contextlib.suppress(TimeoutError):
            self.call(_cancel_all(), timeout_s=CLOSE_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


class Tasks:
    """Tasks on a loop whose result nobody takes: errors that they raise are logged."""

    def __init__(self, bug: str) -> None:
        """`bug`: line of the log for an error that work raises."""
        self._bug = bug
        self._running: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to run `work` on the running loop. Returns its task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks that run, and return them; they end soon."""
        for task in self._running:
            task.cancel()
        return list(self._running)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s", self._bug, exc_info=error)


async def _asked(host: str) -> list[Sequence[Any]]:
    """Addresses of a name, as sockets have them. Raises OSError."""
    ask, kind = asyncio.get_running_loop().getaddrinfo, socket.SOCK_STREAM
    try:
        return [row[4] for row in await ask(host, None, type=kind, proto=socket.IPPROTO_TCP)]
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(str(error)) from None


async def resolved(host: str, port: int) -> list[str]:
    """ADDRESS:PORT of each address of a name, sorted. Raises OSError, also for a late answer."""
    try:
        async with asyncio.timeout(DNS_TIMEOUT_S):
            return sorted({joined(str(address[0]), port) for address in await _asked(host)})
    except TimeoutError:
        raise TimeoutError("no answer from DNS in time") from None


class HostAddresses:
    """Addresses of a host: the one that it is, or those that DNS gave last."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._known: list[str] = []
        with contextlib.suppress(ValueError):
            self._known.append(str(ipaddress.ip_address(host)))
        self._is_name = not self._known
        self.unknown = OSError("its name has no address")
        """Why DNS gave none."""
        self._lookup: asyncio.Future[None] | None = None
        """The last call of DNS, which goes on when nobody waits for it any more."""

    async def now(self) -> list[str]:
        """The addresses; those found last, where DNS fails or is late. Raises OSError."""
        if not self._is_name:
            return self._known
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.ensure_future(self._look_up())
        await asyncio.wait([self._lookup], timeout=DNS_S if self._known else None)
        if not self._known:
            raise self.unknown
        return self._known

    async def _look_up(self) -> None:
        try:
            self._known = list(map(_text_of, await _asked(self._host)))
        except OSError as error:
            self.unknown = error

    def close(self) -> None:
        """End the call of DNS that is under way, if there is one."""
        if self._lookup is not None:
            self._lookup.cancel()


def _text_of(address: Sequence[Any]) -> str:
    """Address of a host as one text, with the interface of an IPv6 address that is link-local."""
    host, scope = str(address[0]), address[3] if len(address) > 3 else 0
    return f"{host}%{scope}" if scope else host


def jitter() -> float:
    """A random number in [0, 1), by which pauses differ so that processes do not keep step."""
    return secrets.randbelow(_MILLI) / _MILLI


async def persist(what: str, work: Callable[[], Awaitable[None]], *, pause_s: float) -> None:
    """Call `work` again and again, `pause_s` apart, until cancelled; an error is logged as a bug of
    `what`. No task awaits it, so an end would go unseen.
    """
    bug = ""
    while True:
        try:
            await work()
        except Exception as error:
            if repr(error) != bug:
                bug = repr(error)
                _log.exception("a bug: %s failed; it is tried again", what)
        await asyncio.sleep(pause_s)


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
