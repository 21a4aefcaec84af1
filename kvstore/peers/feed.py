"""The node's end of its feeds: its offers, published to every replica of the index.

    loop of the node ─append─▶ ChangeLog ─▶ FeedLink per replica (asyncio) ─▶ gRPC stream

Nothing here makes the node wait. After a loss in the log a link uses up a number, so that its
replica sees a gap and asks for a snapshot; so it does after a stream broke with something on its
way. A snapshot is read from the engine slice by slice, between steps; later changes follow as
deltas, and the last update about a block counts.

A link that fails dials again, with jitter, for ever. A replica that takes nothing for so long as
WRITE_TIMEOUT_S is hung up on. Carries keys, tenants and spaces; never a token.

Covers: numbers, streams. Does not cover: the log (`changes`), what is offered
(`engine.memory.residency`), a replica's trust (`index.feed`), forms (`wire.feed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import grpc

from kvstore.client.index import aio_channel, reason_of
from kvstore.engine.events import OffersUntold
from kvstore.errors import NodeBusy, ProtocolError
from kvstore.index.feed import BEAT_MS
from kvstore.indexer.service import OWN_NAMES
from kvstore.net import aio
from kvstore.net.aio import LoopThread, persist
from kvstore.peers import changes
from kvstore.proto import index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub
from kvstore.types import Incarnation
from kvstore.wire import feed as wire
from kvstore.wire.load import EngineEntry, Load

MESSAGE_BYTES: Final = wire.MESSAGE_BYTES_MAX // 4
"""A message gets changes until it has this many bytes. Its last change adds at most half of that
and two names."""
BEAT_S: Final = BEAT_MS / 1000
LOAD_S: Final = 2.0
"""Interval at which the node's load and engines are read."""
CONNECT_TIMEOUT_S: Final = 5.0
WRITE_TIMEOUT_S: Final = 5.0
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
STEADY_S: Final = 30.0
"""A stream that lasted this long was healthy: errors that end the next one are logged again."""
REASONS_MAX: Final = 8
REASON_CHARS_MAX: Final = 300
BUSY_RETRY_S: Final = 0.2
TOLD_S: Final = 10.0
"""A report of a second process with this node's name is kept for this long."""
ANOTHER_VERSION: Final = "it is of another version of kvstore: run one on nodes and indexes"

Slice = tuple[list[wire.Stored], int]
"""Blocks in some rows of the table that peers can fetch, and the next row, -1 after the last."""

FeedLog = changes.ChangeLog[wire.Change | OffersUntold]

Serves = Callable[[], tuple[EngineEntry, ...]]
"""Returns the engines that a node serves now."""

Dial = Callable[[str, grpc.ChannelCredentials | None], grpc.aio.Channel]
"""(address, credentials) of a replica → a channel to it."""

_DIGITS: Final = re.compile(r"\d+")
_log = logging.getLogger(__name__)


class Twin:
    """Second process with this node's name (one certificate on two machines), as reported by one
    replica: every second to the process that it accepts, at each attempt to the other."""

    def __init__(self) -> None:
        self.text = ""
        """Text of the last report; empty: there was none lately."""
        self._at_s = 0.0

    def told(self, text: str, now_s: float) -> None:
        """Keep a report; the first one is logged."""
        if not self.text:
            _log.error("%s. %s", text, OWN_NAMES)
        self.text, self._at_s = text, now_s

    def look(self, now_s: float) -> None:
        """Drop a report that is older than TOLD_S: this node is accepted, and the other process is
        gone."""
        if now_s - self._at_s > TOLD_S:
            self.text = ""


class FeedSource:
    """Content of all feeds of a node."""

    def __init__(self, hello: wire.Hello, credentials: grpc.ChannelCredentials | None) -> None:
        """`hello`: that of the first stream, before any delta."""
        self.hello, self.credentials = hello, credentials
        self.log, self.counters = FeedLog(), changes.FeedCounters()
        self.load: Load | None = None
        """Load of the node, as last read; None: not yet."""
        self.engines: tuple[EngineEntry, ...] | None = None
        """Engines of the node, as last read."""


class Feeder(FeedSource):
    """All feeds of one node, from construction until `close`."""

    def __init__(
        self,
        loop: LoopThread,
        hello: wire.Hello,
        replicas: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        super().__init__(hello, credentials)
        self._loop = loop
        self.links = [FeedLink(replica, self) for replica in replicas]
        self._tasks = aio.Tasks("a bug in the feeds")

    # ── of any other thread ──────────────────────────────────────────────────────────────────────

    def start(
        self,
        ask: Callable[[int], Slice],
        load: Callable[[], Load] = Load,
        engines: Serves = tuple,
    ) -> None:
        """Begin to dial the replicas. `ask` is `Engine.offered`, `load` returns the node's load,
        and `engines` the engines that the node serves; all are called in the node's loop, and may
        raise NodeBusy."""
        self._loop.loop.call_soon_threadsafe(self._begin, ask, load, engines)

    def close(self) -> None:
        """End all feeds."""
        with contextlib.suppress(TimeoutError):
            self._loop.call(self._end(), timeout_s=WRITE_TIMEOUT_S)

    @property
    def connected_count(self) -> int:
        """Replicas that are connected."""
        return sum(link.is_connected for link in self.links)

    @property
    def trouble(self) -> str:
        """Trouble to report on /healthz; empty while all is well."""
        if twins := [link.twin.text for link in self.links if link.twin.text]:
            return twins[0]
        away = [
            f"{link.replica} is not reached{link.why}"
            for link in self.links
            if not link.is_connected
        ]
        return f"the index at {', '.join(away)}" if away else ""

    # ── of the asyncio loop ──────────────────────────────────────────────────────────────────────

    def _begin(
        self, ask: Callable[[int], Slice], load: Callable[[], Load], engines: Serves
    ) -> None:
        for link in self.links:
            run = partial(link.run, ask)
            self._tasks.run(persist(f"the feed of {link.replica}", run, pause_s=RETRY_MAX_S))
        asking = partial(self._follow_node, load, engines)
        self._tasks.run(persist("asking the node what it does", asking, pause_s=LOAD_S))

    async def _follow_node(self, load: Callable[[], Load], engines: Serves) -> None:
        """Read the node's load and engines. Beats repeat the last load, so they do not wait for a
        node that is busy."""
        with contextlib.suppress(NodeBusy):
            self.load = await asyncio.to_thread(load)
            self.engines = await asyncio.to_thread(engines)

    async def _end(self) -> None:
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)


class FeedLink:
    """The feed of one replica."""

    def __init__(
        self,
        replica: str,
        source: FeedSource,
        *,
        dial: Dial = aio_channel,
        jitter: Callable[[], float] = aio.jitter,
    ) -> None:
        """`dial`: makes a channel. `jitter`: returns a random number from 0 to 1."""
        self.replica, self._source = replica, source
        self.is_connected = False
        self.twin = Twin()
        self._hello, self._counters = source.hello, source.counters
        self._dial, self._jitter = dial, jitter
        self.changes = source.log.reader(self._woken)
        self._sequence = 0
        """Number of the last delta that was made, sent or not."""
        self._streams = 0
        self._wake = asyncio.Event()
        self._is_asked = False
        self.why = ""
        """Reason of the last failure, in brackets, for sentences that the replica is not
        reached."""
        self._told: deque[str] = deque(maxlen=REASONS_MAX)
        """Recently logged reasons, without digits, so that a repeated one is not logged again."""

    def _stream_name(self) -> tuple[str, Incarnation, int]:
        """(node, incarnation, stream): first fields of all messages of the present stream."""
        return self._hello.node, self._hello.incarnation, self._streams

    def _woken(self) -> None:
        """Wake the link, because a change was appended. Called by threads that append, once `run`
        has begun to read."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake.set)

    def _lose(self) -> None:
        """Skip a sequence number, so that the replica sees a gap and asks for a snapshot."""
        self._sequence += 1
        self._wake.set()

    def _look_for_losses(self) -> None:
        if lost := self.changes.take_lost():
            self._counters.keys_lost += lost
            self._lose()

    async def run(self, ask: Callable[[int], Slice]) -> None:
        """Publish to the replica until cancelled; dial again whenever the stream ends. `ask`
        returns the slice of a snapshot that begins at a row."""
        retry_s = RETRY_MIN_S
        self._loop = loop = asyncio.get_running_loop()
        while True:
            begin_s = loop.time()
            reason = "it ended the stream"
            try:
                await self._stream(ask)
            except grpc.RpcError as error:
                reason = _short(reason_of(error, unimplemented=ANOTHER_VERSION))
                if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                    self.twin.told(reason, loop.time())
                    reason = ""  # that is said
            except ProtocolError as error:
                reason = _short(str(error))
            except TimeoutError:
                reason = f"it took nothing for {WRITE_TIMEOUT_S:.0f} s"
            except Exception:  # a bug, which may have kept what was taken to be told
                self._lose()
                raise
            finally:
                was_connected, self.is_connected = self.is_connected, False
            if was_connected and loop.time() - begin_s >= STEADY_S:
                self._told.clear()
            if reason:
                self.why = f" ({reason})"
                what = "was lost" if was_connected else "is not reached"
                self._note(what, f"{reason}; trying on")
            retry_s = RETRY_MIN_S if was_connected else min(2 * retry_s, RETRY_MAX_S)
            await asyncio.sleep(retry_s * (0.5 + self._jitter()))

    def _note(self, what: str, reason: str) -> None:
        # Sizes and ports differ each time.
        news = f"{what} {_DIGITS.sub('', reason)}"
        if news not in self._told:
            self._told.append(news)
            _log.warning("the index at %s %s: %s", self.replica, what, reason)

    async def _stream(self, ask: Callable[[int], Slice]) -> None:
        async with self._dial(self.replica, self._source.credentials) as channel:
            await _connect(channel)
            call = channel.stream_stream(f"/{wire.FEEDS}/Feed", wire.encode, bytes)()
            try:
                await self._feed(call, ask)
            finally:
                call.cancel()

    async def _feed(self, call: Any, ask: Callable[[int], Slice]) -> None:
        self._streams += 1
        self._counters.streams += 1
        self._is_asked = False
        self._look_for_losses()
        await _write(call, wire.Hello(*self._stream_name(), self._sequence, self._hello.address))
        listening = asyncio.get_running_loop().create_task(self._listen(call))
        try:
            # A replica says that it takes the Hello, before it has anything else to say.
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.initial_metadata()
            self.is_connected = not call.done()
            loop = asyncio.get_running_loop()
            beat_s = loop.time()
            told: tuple[EngineEntry, ...] | None = None
            while not listening.done():
                self._wake.clear()
                # First: what waits may be much, and come faster than it goes.
                if self._is_asked:
                    self._is_asked = False
                    await self._write_snapshot(call, ask)
                await self._write_waiting(call)
                if self._is_asked:
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._wake.wait()
                engines = self._source.engines
                if engines is not None and engines != told:
                    await _write(call, wire.Registry(*self._stream_name(), engines))
                    told = engines
                # Who stores all the time is heard of in deltas, but tells its load in beats only.
                if not self.changes.waiting_keys or loop.time() - beat_s >= BEAT_S:
                    beat = wire.FeedBeat(*self._stream_name(), self._sequence, self._source.load)
                    await _write(call, beat)
                    beat_s = loop.time()
                    self.twin.look(beat_s)
        finally:
            listening.cancel()
            (ended,) = await asyncio.gather(listening, return_exceptions=True)
        if isinstance(ended, grpc.RpcError | ProtocolError):
            raise ended

    async def _listen(self, call: Any) -> None:
        """Read orders of the replica, such as to send a snapshot, until it ends the stream. Raises
        grpc.RpcError, ProtocolError."""
        try:
            async for data in call:
                order = wire.decode_order(data)
                if order.another:
                    text = f"another process, at {order.another}, says it is {self._hello.node}"
                    self.twin.told(text, asyncio.get_running_loop().time())
                    continue
                if order.refused:
                    self._note("lists no new engines", _short(order.refused))
                    continue
                self._is_asked = True
                self._wake.set()
        finally:
            self._wake.set()

    async def _write_waiting(self, call: Any) -> None:
        """Send the changes that are in the log now. Later ones have to wait, so that a snapshot is
        not held up."""
        self._look_for_losses()
        rows = self.changes.new()
        while told := self._take_changes(rows):
            self._sequence += 1
            self._counters.deltas += 1
            await _write(call, wire.Delta(*self._stream_name(), self._sequence, told))

    def _take_changes(self, rows: Iterator[wire.Change | OffersUntold]) -> tuple[wire.Change, ...]:
        """As many changes as one message may have; changes that differ in keys only are joined."""
        runs: list[tuple[wire.Change, list[bytes]]] = []
        count = size = 0
        while (
            count < changes.DELTA_KEYS_MAX and size < MESSAGE_BYTES and (told := next(rows, None))
        ):
            if isinstance(told, OffersUntold):
                self._lose()
                continue
            if not runs or not changes.is_like(runs[-1][0], told):
                runs.append((told, []))
                size += changes.head_bytes(told)
            keys = b"" if isinstance(told, wire.Left) else told.keys
            runs[-1][1].append(keys)
            count, size = count + changes.key_count(told), size + len(keys)
        return tuple(changes.joined(told, keys) for told, keys in runs)

    async def _write_snapshot(self, call: Any, ask: Callable[[int], Slice]) -> None:
        """Send all blocks that peers can fetch, in parts, with deltas between them."""
        self._counters.snapshots += 1
        # Before anything is read: what is told from here on counts, and what is lost is noticed.
        await self._write_part(call, 0, [], is_last=False)
        number, row = 1, 0
        while row >= 0:
            offers, row = await _slice(ask, row)
            for offer in offers:
                for piece in changes.pieces(offer, changes.DELTA_KEYS_MAX):
                    await self._write_part(call, number, [piece], is_last=False)
                    number += 1
            await self._write_waiting(call)
        await self._write_part(call, number, [], is_last=True)

    async def _write_part(
        self, call: Any, number: int, offers: Sequence[wire.Stored], *, is_last: bool
    ) -> None:
        name = self._stream_name()
        await _write(call, wire.SnapshotPart(*name, self._sequence, number, is_last, tuple(offers)))


async def _slice(ask: Callable[[int], Slice], row: int) -> Slice:
    while True:
        try:
            return await asyncio.to_thread(ask, row)
        except NodeBusy:
            await asyncio.sleep(BUSY_RETRY_S)


async def _write(call: Any, word: wire.OfStream) -> None:
    """Send one message. Raises grpc.RpcError, TimeoutError."""
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        try:
            await call.write(word)
        except asyncio.InvalidStateError:
            # The other end is done with this call; its status says why.
            raise grpc.aio.AioRpcError(
                await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
            ) from None


async def _connect(channel: grpc.aio.Channel) -> None:
    """Wait until the channel is connected: a first write would otherwise wait for ever for a
    replica that is not there. Raises RpcError."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await channel.channel_ready()
    except TimeoutError:  # a call that does not wait is told why
        await IndexStub(channel).Nodes(pb.NodesRequest(), timeout=CONNECT_TIMEOUT_S)


def _short(text: str) -> str:
    return " ".join(text.split())[:REASON_CHARS_MAX]
