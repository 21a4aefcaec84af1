"""The network of the world, as gRPC shows it: streams between processes that run on virtual loops.

A stream is in order and loses nothing while it lives, as TCP is. What the network can do: delay,
hold back what goes one way or both (a partition; what was sent arrives when it heals), break
streams, where a part of what was under way arrives and each end learns of it in its own time, and
say the same word twice. A dead process breaks its streams; a new one at the same address has none
of them.

Does not cover: who talks to whom (`peers`, `index`), bytes of blocks (`transfer_worker`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, Self

import grpc

from kvstore.net.server import RefusedCall
from kvstore.units import NS_PER_MS, NS_PER_S
from tests.sim.world.ground import Ground
from tests.sim.world.loop import SimLoop

PATIENCE_NS: Final = 4 * NS_PER_S
"""A stream that is held back for longer is given up by both ends, as by keep-alive."""
DELAYS_NS: Final = (0, NS_PER_MS // 5, NS_PER_MS, 3 * NS_PER_MS)
_NOTICED_NS: Final = 200 * NS_PER_MS
_STALLED_NS: Final = (NS_PER_S, 4 * NS_PER_S)
_DIAL_S: Final = 0.05
_WINDOW: Final = 64
"""Words that nobody read: whoever writes more waits."""
_REPEATED_SHARE: Final = 0.05
REPEATED: Final = "feed says it twice"

Handler = Callable[[Any, Any], AsyncIterator[Any]]
"""A method of a servicer."""
Handlers = Mapping[str, tuple[Handler, Callable[[bytes], Any], Callable[[Any], bytes]]]
"""Name of a method → how it is served, its requests are decoded and its answers encoded."""


class _Listener:
    def __init__(self, name: str, loop: SimLoop, handlers: Handlers) -> None:
        self.name, self.loop, self.handlers = name, loop, handlers


class SimNet:
    """All streams. `World` lets it go on."""

    def __init__(self, world: Ground) -> None:
        self.random = world.random
        self.lag_ns: dict[str, int] = {}
        """More delay of what goes to a host."""
        self.heard_ns: dict[tuple[str, str], int] = {}
        """(from, to) → when a word last arrived."""
        self._world = world
        self._cut: dict[tuple[str, str], int] = {}
        """(from, to) → until when nothing passes."""
        self._listeners: dict[str, _Listener] = {}
        self._streams: list[_Stream] = []

    # ── what happens to it ───────────────────────────────────────────────────────────────────────

    @property
    def now_ns(self) -> int:
        return self._world.now_ns

    def cut(self, source: str, target: str, duration_ns: int) -> None:
        """Nothing passes that way for so long."""
        self._cut[source, target] = self.now_ns + duration_ns

    def heal(self) -> None:
        """All ways are open, and as quick as ever."""
        self._cut.clear()
        self.lag_ns.clear()

    def is_cut(self, source: str, target: str) -> bool:
        return self._cut.get((source, target), 0) > self.now_ns

    def break_one(self) -> bool:
        """Some stream breaks. False: there is none."""
        if self._streams:
            stream = self.random.choice(self._streams)
            stream.stall() if self.random.random() < 0.5 else stream.break_off()
        return bool(self._streams)

    def go_on(self) -> bool:
        """Bring what is due. False: nothing was."""
        moved = False
        for stream in list(self._streams):
            moved = stream.go_on() or moved
        self._streams = [stream for stream in self._streams if not stream.is_over]
        return moved

    # ── processes ────────────────────────────────────────────────────────────────────────────────

    def listen(self, address: str, name: str, loop: SimLoop, handlers: Handlers) -> None:
        """Of a process of the host `name`; ends with its loop."""
        self._listeners[address] = _Listener(name, loop, handlers)

    def died(self, loop: SimLoop) -> None:
        """A process is gone."""
        self._listeners = {a: its for a, its in self._listeners.items() if its.loop is not loop}
        for stream in self._streams:
            if stream.server_loop is loop:
                stream.break_off()
            elif stream.client_loop is loop:
                stream.stall() if self.random.random() < 0.5 else stream.break_off()

    def at(self, address: str) -> str:
        """Name of the host where somebody listens; empty: nobody does."""
        listener = self._listeners.get(address)
        return listener.name if listener is not None else ""

    def is_reached(self, source: str, address: str) -> bool:
        """Whether a connection can be made now."""
        listener = self._listeners.get(address)
        return listener is not None and not (
            self.is_cut(source, listener.name) or self.is_cut(listener.name, source)
        )

    def host_of(self, name: str) -> str:
        """IP address of a machine."""
        machine = next(m for m in self._world.machines if m.name == name)
        return machine.address.partition(":")[0]

    def delay_ns(self, target: str) -> int:
        return self.random.choice(DELAYS_NS) + self.lag_ns.get(target, 0)

    def repeats(self, method: str) -> bool:
        """Whether a word of this method arrives twice."""
        if method != "Feed" or REPEATED not in self._world.enabled:
            return False
        if self.random.random() >= _REPEATED_SHARE:
            return False
        self._world.faults[REPEATED] += 1
        return True

    def open(self, source: str, loop: SimLoop, address: str, method: str) -> _Stream | None:
        listener = self._listeners.get(address)
        if listener is None:
            return None
        stream = _Stream(self, (source, loop), listener, method)
        self._streams.append(stream)
        return stream


class SimChannel:
    """As `grpc.aio.Channel`, of a process on `loop` of the host `name`."""

    def __init__(self, net: SimNet, name: str, loop: SimLoop, address: str) -> None:
        self._net, self._name, self._loop, self._address = net, name, loop, address
        self._calls: list[SimCall] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def channel_ready(self) -> None:
        await asyncio.sleep(self._net.delay_ns(self._name) / NS_PER_S)
        while not self._net.is_reached(self._name, self._address):  # noqa: ASYNC110 -- no event
            await asyncio.sleep(_DIAL_S)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[[], SimCall]:
        method = path.rpartition("/")[2]

        def begin() -> SimCall:
            call = SimCall(request_serializer, response_deserializer, method)
            call.begin(self._net.open(self._name, self._loop, self._address, method))
            self._calls.append(call)
            return call

        return begin

    def unary_unary(self, *_: Any, **__: Any) -> Callable[..., Awaitable[None]]:
        """Of a generated stub: whoever calls it wants to know why nobody answers."""

        async def ask(*_: Any, **__: Any) -> None:
            if not self._net.is_reached(self._name, self._address):
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE, nothing, nothing, "nobody is there"
                )

        return ask

    def unary_stream(self, *_: Any, **__: Any) -> None:
        """Of a generated stub; nobody calls it here."""


class SimCall:
    """As the call of a stream, at its client."""

    def __init__(
        self, serialize: Callable[[Any], bytes], decode: Callable[[bytes], Any], method: str
    ) -> None:
        self._serialize, self._decode, self._method = serialize, decode, method
        self._answers: deque[bytes] = deque()
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._is_taken = False
        self._news = asyncio.Event()
        self._is_begun = False
        self._stream: _Stream | None = None

    def begin(self, stream: _Stream | None) -> None:
        if stream is None:
            self.ended(grpc.StatusCode.UNAVAILABLE, "nobody listens there")
            return
        self._stream = stream
        stream.begin(self)

    async def write(self, message: Any) -> None:
        if self.done() or self._stream is None:
            raise asyncio.InvalidStateError
        while len(self._stream.to_server) >= _WINDOW:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(_DIAL_S)
        data = self._serialize(message)
        self._stream.say(data)
        if self._is_begun and self._stream.net.repeats(self._method):
            self._stream.say(data)
        self._is_begun = True
        await asyncio.sleep(0)

    async def read(self) -> Any:
        await self._until(lambda: bool(self._answers))
        if self._answers:
            return self._decode(self._answers.popleft())
        assert self._status is not None
        if self._status[0] is not grpc.StatusCode.OK:
            raise _error(*self._status)
        return grpc.aio.EOF

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        answer = await self.read()
        if answer is grpc.aio.EOF:
            raise StopAsyncIteration
        return answer

    async def initial_metadata(self) -> None:
        await self._until(lambda: self._is_taken)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Or until it has ended."""
        while not condition() and not self.done():
            self._news.clear()
            await self._news.wait()

    def done(self) -> bool:
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        assert self._status is not None
        return self._status[1]

    def cancel(self) -> None:
        if not self.done():
            self.ended(grpc.StatusCode.CANCELLED, "it was cancelled here")
            if self._stream is not None:
                self._stream.hang_up()

    # ── of the network ───────────────────────────────────────────────────────────────────────────

    def taken(self) -> None:
        """The server's first sign."""
        self._is_taken = True
        self._news.set()

    def answered(self, data: bytes) -> None:
        self._answers.append(data)
        self.taken()

    def ended(self, code: grpc.StatusCode, details: str) -> None:
        if self._status is None:
            self._status = (code, details)
        self._news.set()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class _Way:
    """One direction of a stream."""

    def __init__(self, net: SimNet, source: str, target: str, loop: SimLoop) -> None:
        self._net, self._source, self._target, self._loop = net, source, target, loop
        self._under_way: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._last_ns = 0
        self.held_since_ns = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def put(self, callback: Callable[..., None], *args: Any) -> None:
        due_ns = self._net.now_ns + self._net.delay_ns(self._target)
        self._last_ns = max(due_ns, self._last_ns)
        self._under_way.append((self._last_ns, callback, args))

    def lose_some(self) -> None:
        """Of what is under way the last part never arrives."""
        kept = self._net.random.randint(0, len(self._under_way))
        while len(self._under_way) > kept:
            self._under_way.pop()

    def hold_until(self, until_ns: int) -> None:
        """Nothing that is under way, or comes, arrives before."""
        self._last_ns = max(until_ns, self._last_ns)
        self._under_way = deque(
            (max(due, until_ns), how, what) for due, how, what in self._under_way
        )

    def go_on(self) -> bool:
        net, now_ns, moved = self._net, self._net.now_ns, False
        if net.is_cut(self._source, self._target):
            self.held_since_ns = self.held_since_ns or now_ns
            return False
        self.held_since_ns = 0
        while self._under_way and self._under_way[0][0] <= now_ns:
            _, callback, args = self._under_way.popleft()
            self._loop.call_soon(self._arrive, callback, args)
            moved = True
        return moved

    def _arrive(self, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Of the target's loop, which may have been stopped."""
        self._net.heard_ns[self._source, self._target] = self._net.now_ns
        callback(*args)


class _Stream:
    """Both directions, and its handler at the server."""

    def __init__(
        self, net: SimNet, client: tuple[str, SimLoop], listener: _Listener, method: str
    ) -> None:
        self.net = net
        name, self.client_loop = client
        self.server_loop = listener.loop
        self.to_server = _Way(net, name, listener.name, listener.loop)
        self.to_client = _Way(net, listener.name, name, self.client_loop)
        self._handler, self._decode, self._encode = listener.handlers[method]
        self._client_host = name
        self._call: SimCall | None = None
        self._requests = _Requests(self._decode)
        self._serving: asyncio.Task[None] | None = None
        self._is_ended = self._is_broken = False
        self._stalled_until_ns = 0

    @property
    def is_over(self) -> bool:
        ends = (self._is_ended or self._is_broken) and not self.to_server and not self.to_client
        ends = ends and not self._stalled_until_ns
        return ends or (self.client_loop.is_dead and self.server_loop.is_dead)

    def begin(self, call: SimCall) -> None:
        self._call = call
        self.to_server.put(self._serve)

    def say(self, data: bytes) -> None:
        self.to_server.put(self._requests.put, data)

    def hang_up(self) -> None:
        """Of the client."""
        self.to_server.put(self._stop)

    def break_off(self) -> None:
        """Each end learns of it, after a part of what was under way to it."""
        if self._is_broken:
            return
        self._is_broken = True
        self.to_server.lose_some()
        self.to_client.lose_some()
        self.to_server.put(self._stop)
        if self._call is not None:
            self.to_client.put(self._call.ended, grpc.StatusCode.UNAVAILABLE, "connection lost")

    def stall(self) -> None:
        """The client gives it up soon, and dials another one; what it said until then arrives
        late."""
        if self._is_broken or self._call is None:
            return
        now_ns = self.net.now_ns
        self._is_broken = True
        self._stalled_until_ns = now_ns + self.net.random.choice(_STALLED_NS)
        self.to_server.hold_until(self._stalled_until_ns)
        self.to_client.hold_until(now_ns + _NOTICED_NS)
        self.to_client.put(self._call.ended, grpc.StatusCode.UNAVAILABLE, "connection lost")

    def go_on(self) -> bool:
        moved = self.to_server.go_on()
        if self._stalled_until_ns and self._stalled_until_ns < self.net.now_ns:
            self._stalled_until_ns = 0
            self.to_server.put(self._stop)
        moved = self.to_client.go_on() or moved
        held = [w.held_since_ns for w in (self.to_server, self.to_client) if w.held_since_ns]
        if held and not self._is_broken and self.net.now_ns - min(held) > PATIENCE_NS:
            self._is_broken = True
            self.server_loop.call_soon(self._stop)
            if self._call is not None:
                code, details = grpc.StatusCode.UNAVAILABLE, "keep-alive failed"
                self.client_loop.call_soon(self._call.ended, code, details)
            self.to_server.lose_some()
            self.to_client.lose_some()
        return moved

    # ── of the server's loop ─────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        if not self.server_loop.is_dead:
            self._serving = self.server_loop.create_task(self._run())

    def _stop(self) -> None:
        self._is_ended = True
        if self._serving is not None:
            self._serving.cancel()

    async def _run(self) -> None:
        assert self._call is not None
        call, status = self._call, (grpc.StatusCode.OK, "")
        try:
            async for answer in self._handler(self._requests, _Context(self)):
                self.to_client.put(call.answered, self._encode(answer))
        except RefusedCall as refused:
            status = (refused.code, str(refused))
        self._is_ended = True
        self.to_client.put(call.ended, *status)

    def sign(self) -> None:
        assert self._call is not None
        self.to_client.put(self._call.taken)

    @property
    def peer(self) -> str:
        return f"ipv4:{self.net.host_of(self._client_host)}:1"


class _Requests:
    """What a handler reads."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._decode(self._waiting.popleft())


class _Context:
    """What a handler knows of its call: no certificates."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise RefusedCall(code, details)

    async def send_initial_metadata(self, _: object) -> None:
        self._stream.sign()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return self._stream.peer
