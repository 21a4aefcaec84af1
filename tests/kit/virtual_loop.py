"""An asyncio loop in virtual time, with a network in memory: hours of a process in seconds.

    nothing is ready ─▶ the clock jumps to the next timer      create_connection ─▶ serve

The code of a shell runs unchanged: protocols, transports, tasks, timers, calls in threads. Ready
callbacks run in the order in which they became ready: the same seed, the same order. Bytes arrive
in the next turn of the loop; a port where nobody listens refuses, one that is a black hole never
answers, and a server that is killed resets.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import io
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar, cast

HIGH_WATER = 1 << 16
READ_BYTES = 1 << 18
"""Most that a protocol is given in a turn, as asyncio reads from a socket."""
_TURNS_MAX: Final = 100_000
"""Of one `go_on`: more is a loop that never waits."""
_T = TypeVar("_T")
Factory = Callable[[], asyncio.BaseProtocol]
Port = tuple[str, int]


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: VirtualLoop, name: Port, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": name, "sockname": name, "socket": None})
        self._loop, self._protocol = loop, protocol
        self.peer: MemoryTransport
        self._coming = deque[bytes]()
        """Of the peer, not read yet."""
        self._coming_bytes = 0
        self._is_paused = self._is_closing = self._is_lost = self._is_full = False
        self._has_ended = False
        """The peer has closed behind what it sent."""

    # ── what protocols call ──────────────────────────────────────────────────────────────────────

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_lost or not data:
            return
        peer = self.peer
        whole = bytes(data)
        for at in range(0, len(whole), READ_BYTES):
            peer._coming.append(whole[at : at + READ_BYTES])
            self._loop.call_soon(peer._deliver)
        peer._coming_bytes += len(whole)
        if peer._coming_bytes > HIGH_WATER and not self._is_full:
            self._is_full = True
            cast("asyncio.Protocol", self._protocol).pause_writing()

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def get_write_buffer_size(self) -> int:
        return self.peer._coming_bytes if self._is_full else 0

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        for _ in self._coming or (b"",):
            self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return not self._is_paused

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.peer._has_ended = True
            self._loop.call_soon(self.peer._deliver)
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._is_closing = True
        self._loop.call_soon(self.peer._lose, ConnectionResetError(errno.ECONNRESET, "reset"))
        self._loop.call_soon(self._lose, None)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    # ── on the loop ──────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        self._protocol.connection_made(self)

    def _deliver(self) -> None:
        protocol = cast("asyncio.Protocol", self._protocol)
        if self._coming and not (self._is_paused or self._is_lost):
            piece = self._coming.popleft()
            self._coming_bytes -= len(piece)
            protocol.data_received(piece)
        writer = self.peer
        if writer._is_full and self._coming_bytes <= HIGH_WATER // 2:
            writer._is_full = False
            if not writer._is_lost:
                cast("asyncio.Protocol", writer._protocol).resume_writing()
        is_end = self._has_ended and not self._coming and not self._is_lost
        if is_end and not protocol.eof_received():
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._coming.clear()
            self._coming_bytes = 0
            self._protocol.connection_lost(error)


class MemoryServer:
    """A port that listens. `kill`: as the end of a process; `deafen`: takes no connection."""

    def __init__(self, loop: VirtualLoop, port: Port, factory: Factory) -> None:
        self._loop, self.port, self.factory = loop, port, factory
        self.is_deaf = False
        self.connections: list[MemoryTransport] = []
        """Ends on the server's side."""

    def listen(self) -> None:
        """Again, after `kill`."""
        self._loop.servers[self.port] = self

    def kill(self) -> None:
        """Nobody listens, and all connections are reset."""
        self._loop.servers.pop(self.port, None)
        for each in self.connections:
            each.abort()
        self.connections.clear()


class MemorySocket(asyncio.Protocol):
    """A client's end, as a socket that blocks: time passes while it waits."""

    def __init__(self, loop: VirtualLoop, peer: Port, timeout_s: float) -> None:
        self._loop, self._peer, self._timeout_s = loop, peer, timeout_s
        self.coming = bytearray()
        """What was not read yet."""
        self._error: Exception | None = None
        self._has_ended = self._is_closed = False
        self._file: _MemoryFile | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("MemoryTransport", transport)

    def data_received(self, data: bytes) -> None:
        self.coming += data

    def connection_lost(self, error: Exception | None) -> None:
        self._error, self._has_ended = error, True

    def getpeername(self) -> Port:
        return self._peer

    def sendall(self, data: Any) -> None:
        self._transport.write(data)

    def recv(self, size: int) -> bytes:
        end_s = self._loop.now_s + self._timeout_s
        self._loop.until(
            lambda: bool(self.coming or self._has_ended or self._loop.now_s >= end_s),
            limit_s=self._timeout_s + 1,
        )
        if not (self.coming or self._has_ended):
            raise TimeoutError
        if self._error is not None and not self.coming:
            raise self._error
        piece = bytes(self.coming[:size])
        del self.coming[:size]
        return piece

    def makefile(self, _: str) -> io.BufferedReader:
        self._file = _MemoryFile(self)
        return io.BufferedReader(self._file)

    def close(self) -> None:
        """Its file may be read to the end all the same."""
        self._is_closed = True
        self.closed_file()

    def closed_file(self) -> None:
        if self._is_closed and (self._file is None or self._file.closed):
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()


class _MemoryFile(io.RawIOBase):
    def __init__(self, of: MemorySocket) -> None:
        self._of = of

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._of.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        super().close()
        self._of.closed_file()


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `now_s`: its clock. It runs to the end of some work (`run`), or as far as its
    time has come (`go_on`)."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.servers: dict[Port, MemoryServer] = {}
        self._next_port = 40_000
        self._selector = self
        self._spent_s = 0.0

    def time(self) -> float:
        return self.now_s

    def clock_ns(self) -> int:
        """For code that takes a clock."""
        return round(self.now_s * 1e9)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """To its end, and close."""
        try:
            asyncio.set_event_loop(self)
            return self.run_until_complete(work)
        finally:
            self.end()

    def end(self) -> None:
        """All tasks end where they are, and the loop is closed."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.close()

    def until(self, true: Callable[[], bool], *, limit_s: float = 10.0) -> None:
        """Time passes until this is so."""
        begin_s = self.now_s
        while not true():
            passed_s = self.now_s - begin_s
            assert passed_s < limit_s, "it did not come about in time"
            self.run_until_complete(asyncio.sleep(0.02 if passed_s < 10 else 1.0))

    def go_on(self) -> bool:
        """Run what is due, and all that follows from it at this time. False: there was nothing."""
        if not self._is_due():
            return False
        for _ in range(_TURNS_MAX):
            self.call_soon(self.stop)
            self.run_forever()
            if not self._is_due():
                return True
        raise AssertionError("a loop that never waits")

    def _is_due(self) -> bool:
        timers = cast("list[asyncio.TimerHandle]", self._scheduled)  # type: ignore[attr-defined]
        return bool(self._ready or (timers and timers[0].when() <= self.time()))  # type: ignore[attr-defined]

    # ── as asyncio's base calls it ───────────────────────────────────────────────────────────────

    def select(self, timeout: float | None) -> None:
        """Of a selector: a wait is a jump of the clock, to the timer itself: a sum may be an ulp
        short of it for ever, and so may a clock of whole nanoseconds."""
        assert timeout is not None, "the loop waits for nothing"
        if timeout > 0:
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]

    def _process_events(self, _: None) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There are no other threads."""

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """What a thread does is done at once, and told when it has taken its time (`spend`)."""
        future = self.create_future()
        self._spent_s = 0.0
        try:
            tell = functools.partial(future.set_result, func(*args))
        except Exception as error:  # noqa: BLE001 -- it is the caller's
            tell = functools.partial(future.set_exception, error)
        self.call_later(self._spent_s, lambda: future.cancelled() or tell())
        return future

    def spend(self, duration_s: float) -> None:
        """Of a function in a thread: it takes so long."""
        self._spent_s += duration_s

    # ── its network ──────────────────────────────────────────────────────────────────────────────

    def serve(self, factory: Factory, port: int = 0) -> MemoryServer:
        """Listen on a port of 127.0.0.1; 0: any free one."""
        if not port:
            self._next_port += 1
            port = self._next_port
        server = MemoryServer(self, ("127.0.0.1", port), factory)
        server.listen()
        return server

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        await asyncio.sleep(0)
        server = self.servers.get((host, port))
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        if server.is_deaf:
            await asyncio.Event().wait()
        protocol = protocol_factory()
        self._next_port += 1
        near = MemoryTransport(self, (host, port), protocol)
        far = MemoryTransport(self, ("127.0.0.1", self._next_port), server.factory())
        near.peer, far.peer = far, near
        server.connections.append(far)
        far.begin()
        near.begin()
        return near, protocol

    def connected(self, port: Port, timeout_s: float) -> MemorySocket:
        """Of a client that is no coroutine."""
        made = self.create_connection(lambda: MemorySocket(self, port, timeout_s), *port)
        return cast("MemorySocket", self.run_until_complete(made)[1])
