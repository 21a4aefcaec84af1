"""Reads KV events of engines, so that what their own memory holds is in the index: tier hbm.

    engine ── PUB ─────▶ SUB ────┐
           ◀─ first number ─ DEALER ─▶ EngineFeed ─▶ changes ─▶ ChangeLog
           ── ROUTER ──────▶ ────┘

One thread serves all engines. A connection is one life of an engine: when it ends, or when the
engine does not answer ZeroMQ heartbeats for HEARTBEAT_TIMEOUT_MS (a stopped process), all blocks of
the engine are withdrawn, its sockets are closed with whatever they had read, and new ones wait for
it. So no batch number of one life is taken for one of another. An engine is begun again in the same
way when a bug is met while its events are applied.

Bounded: a frame has PAYLOAD_BYTES_MAX at most, a message FRAMES_MAX and MESSAGE_BYTES_MAX (one with
more ends the connection), and QUEUED_BATCHES_MAX messages wait in a socket. One message of a socket
is taken at a time and applied in pieces, between which other engines have their turn: an engine
that floods waits on its own side. The node's loop takes no lock of this thread.

Covers: sockets, threads. Does not cover: numbers, gaps and names
(`index.engine_feed`), where engines may be (`config.cluster`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstore.config.cluster import ENGINE_COUNT_MAX, check_endpoint
from kvstore.engine.events import Follow, Unfollow
from kvstore.engine.why.findings import SPACE_DIGITS
from kvstore.errors import ConfigError
from kvstore.index.engine_feed import EngineCounters, EngineFeed, Phase
from kvstore.mailbox import Mailbox
from kvstore.peers.feed import Slice
from kvstore.ports import Clock
from kvstore.proto.rows import MemoryReport
from kvstore.types import KEY_BYTES, EngineSource, SpaceId
from kvstore.units import NS_PER_MS
from kvstore.wire.feed import Change, Left
from kvstore.wire.kv_events import END, PAYLOAD_BYTES_MAX, SEQUENCE_BYTES

TURN_MS: Final = 250
"""Longest wait between two checks of deadlines."""
HEARTBEAT_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 3000
REOPEN_MS: Final = 200
REOPEN_MS_MAX: Final = 5000
RECONNECT_MS: Final = 100
RECONNECT_MS_MAX: Final = 2000
QUEUED_BATCHES_MAX: Final = 32
FRAMES_MAX: Final = 16
"""Most frames read of one message; valid messages have four at most."""
MESSAGE_BYTES_MAX: Final = PAYLOAD_BYTES_MAX + (64 << 10)
"""Most bytes of a message in all frames but the last."""
BUGS_MAX: Final = 8
"""Number of recent bugs remembered, so that each is logged once."""
AHEAD = 'it hashes {} token(s) ahead: add "disable_lookahead_block_hashes" to --speculative-config'
_FIRST_ROW: Final = 1 << 40
"""Number of the first snapshot slice of engines' memory: rows of the node itself have smaller
numbers."""

_log = logging.getLogger(__name__)


class _Follower:
    """Sockets that read one engine's KV events, and the feed that applies them."""

    def __init__(
        self,
        source: EngineSource,
        serial: int,
        context: zmq.Context[zmq.Socket[bytes]],
        say: Callable[[Change], None],
        counters: EngineCounters,
        *,
        failed_until_ms: int = 0,
    ) -> None:
        """`serial`: its place in snapshots. `say`: called with each change of the index.
        `failed_until_ms`: a bug ended the follower before this one; connect again at that time."""
        self.source = source
        self.serial = serial
        self.feed = EngineFeed(source, say, counters)
        self._context = context
        self._live: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._reopen_ms = failed_until_ms
        self.has_failed = failed_until_ms > 0
        """Whether a bug ended the follower before this one, and the engine has not been connected
        since."""

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll, in this order: a batch is then never seen before the event that its
        connection was made. The data sockets are left out while received batches wait to be
        applied."""
        # While there is something to work on, nothing more is read.
        read = () if self.feed.has_more else (self._live, self._replay)
        return [each for each in (*read, self._monitor) if each is not None]

    def turn(self, ready: set[object], now_ms: int) -> None:
        """Read at most one message from each socket in `ready`, or apply one more piece of what was
        read."""
        try:
            if self._live is None and now_ms >= self._reopen_ms:
                self._open()
            if self._monitor in ready:
                self._watch(now_ms)
            if self.feed.has_more:
                self.feed.more(now_ms)
            if self._live is not None and self._live in ready:
                self._hear(_take(self._live), now_ms)
            self.feed.tick(now_ms)
            self._ask()
            if self._replay is not None and self._replay in ready:
                self._hear_replay(_take(self._replay), now_ms)
                self._ask()
        except zmq.ZMQError as error:  # no descriptors are left, a message is too long, …
            self.feed.counters.refused += error.errno == errno.EMSGSIZE
            _log.warning("engine %s: its KV events cannot be read: %s", self.source.engine, error)
            self._close_until(now_ms + REOPEN_MS_MAX)

    def close(self) -> None:
        """Stop following, and withdraw the engine's blocks."""
        self.hang_up()
        self.feed.end()

    def hang_up(self) -> None:
        """Close all sockets of this engine."""
        self._close_replay()
        if self._live is not None:
            assert self._monitor is not None
            self._live.disable_monitor()
            self._monitor.close(0)
            self._live.close(0)
            self._live = self._monitor = None

    def _open(self) -> None:
        self._live = live = self._socket(zmq.SUB)
        live.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        live.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        live.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = live.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        )
        live.connect(self.source.endpoint)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, QUEUED_BATCHES_MAX)
        made.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        made.setsockopt(zmq.IPV6, 1)
        return made

    def _watch(self, now_ms: int) -> None:
        assert self._monitor is not None
        if recv_monitor_message(self._monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.has_failed = False
            self.feed.begin(now_ms)
        else:
            self._close_until(now_ms + REOPEN_MS)

    def _close_until(self, reopen_ms: int) -> None:
        self._reopen_ms = reopen_ms
        self.close()

    def _ask(self) -> None:
        """Send the replay request that the feed wants, if any. Each request has a socket of its
        own, so that a late part of an earlier replay is not taken for a part of this one."""
        number = self.feed.take_ask()
        if number is None:
            return
        self._close_replay()
        self._replay = self._socket(zmq.DEALER)
        self._replay.connect(self.source.replay_endpoint)
        self._replay.send_multipart((b"", number.to_bytes(SEQUENCE_BYTES, "big")), zmq.NOBLOCK)

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(0)
            self._replay = None

    def _hear(self, frames: list[bytes], now_ms: int) -> None:
        match frames:
            case []:
                pass
            case [_, number, payload] if len(number) == SEQUENCE_BYTES and number != END:
                self.feed.heard(int.from_bytes(number, "big"), payload, now_ms)
            case _:
                self.feed.counters.refused += 1

    def _hear_replay(self, frames: list[bytes], now_ms: int) -> None:
        # vLLM puts the topic before the number, kvstore's own publisher nothing.
        match frames:
            case []:
                pass
            case [b"", number, _] | [b"", _, number, _] if number == END:
                self._close_replay()
                self.feed.replay_ended(now_ms)
            case [b"", number, payload] | [b"", _, number, payload] if (
                len(number) == SEQUENCE_BYTES
            ):
                self.feed.replayed(int.from_bytes(number, "big"), payload, now_ms)
            case _:
                self.feed.counters.refused += 1


class EngineMemory:
    """Reader of the KV events of all engines that a node follows, from construction until
    `close`."""

    def __init__(
        self, sources: Sequence[EngineSource], *, clock: Clock, tell: Callable[[Change], None]
    ) -> None:
        """`sources`: engines from the configuration. `tell`: called with each change; `append` of
        the feeds' log."""
        self.counters = EngineCounters()
        self._clock = clock
        self._tell = tell
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._configured = {(source.engine, source.rank) for source in sources}
        self._followers: dict[int, _Follower] = {}
        """Followers by connection; those from the configuration have numbers below 0."""
        self._serial = 0
        self._orders = Mailbox[tuple[int, EngineSource | None]]()
        for number, source in enumerate(sources):
            self._orders.put((-1 - number, source))
        self._bugs: deque[str] = deque(maxlen=BUGS_MAX)
        """Texts of recent bugs, each logged once."""
        self._lock = threading.Lock()
        """Held for one engine's turn, until its changes are in the log: a snapshot slice must not
        fall between a change and its publication. Reading a single value needs no lock."""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine-memory", daemon=True)

    # ── of the node's loop ───────────────────────────────────────────────────────────────────────

    def carry_out(self, command: Follow | Unfollow) -> None:
        """Begin or end to follow an engine that is attached. Never waits."""
        if isinstance(command, Unfollow):
            self._orders.put((command.connection, None))
            return
        source = command.source
        ends = (source.endpoint, source.replay_endpoint)
        try:
            live, replay = (check_endpoint(end, insecure=False) if end else "" for end in ends)
        except ConfigError as error:
            _log.warning("engine %s: %s", source.engine, error)
            return
        source = msgspec.structs.replace(source, endpoint=live, replay_endpoint=replay)
        self._orders.put((command.connection, source))

    # ── of any other thread ──────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close all sockets."""
        self._orders.end()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        self._orders.close()

    def behind(self, ask: Callable[[int], Slice]) -> Callable[[int], Slice]:
        """A function that returns snapshot slices: those of `ask`, and then the blocks in engines'
        memory."""

        def both(row: int) -> Slice:
            if row >= _FIRST_ROW:
                return self._slice(row - _FIRST_ROW)
            offers, following = ask(row)
            return offers, following if following >= 0 else _FIRST_ROW

        return both

    def _slice(self, serial: int) -> Slice:
        with self._lock:
            left = [each for each in self._followers.values() if each.serial >= serial]
            if not left:
                return [], -1
            first = min(left, key=lambda each: each.serial)
            keys = first.feed.held_keys()
        return first.feed.held_of(keys), _FIRST_ROW + first.serial + 1

    def reports(
        self, *, tenant: str = "", space: SpaceId | None = None, keys: bytes = b""
    ) -> list[MemoryReport]:
        """One row per engine. With `space`, only engines of this tenant and space that hold the
        first of `keys`, with the number of leading keys that they hold."""
        wanted = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        rows = []
        for follower in list(self._followers.values()):
            its, held = follower.source, follower.feed.blocks
            blocks = len(held)
            if space is not None:
                if (its.tenant, its.space) != (tenant, space):
                    continue
                blocks = next((n for n, key in enumerate(wanted) if key not in held), len(wanted))
                if not blocks:
                    continue
            rows.append(
                MemoryReport(
                    engine=its.engine,
                    rank=its.rank,
                    space=its.space.hex()[:SPACE_DIGITS],
                    tenant=its.tenant,
                    state=follower.feed.phase.value,
                    blocks=blocks,
                    left_out=held.left_out,
                    note=_note(follower.feed.lookahead_tokens),
                )
            )
        return rows

    @property
    def block_count(self) -> int:
        """Number of blocks in the memory of all followed engines."""
        return sum(len(each.feed.blocks) for each in list(self._followers.values()))

    @property
    def trouble(self) -> str:
        """Trouble to report on /healthz; empty while all is well."""
        if self._has_ended:
            return "KV events of engines are not read any more after a bug, which the log has"
        found, away, failed = list[str](), list[str](), list[str]()
        for each in list(self._followers.values()):
            if each.feed.phase is Phase.UNREACHABLE:
                names = failed if each.has_failed else away
                names.append(f"{each.source.engine} at {each.source.endpoint}")
            elif note := _note(each.feed.lookahead_tokens):
                found.append(f"engine {each.source.engine}: {note}")
        if away:
            found.append(f"KV events of {', '.join(away)} are not reached")
        if failed:
            why = "are not read after a bug, which the log has"
            found.append(f"KV events of {', '.join(failed)} {why}")
        return "; ".join(found)

    # ── of the thread ────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._orders.has_ended:
                with self._guarded(None):
                    self._turn()
        finally:
            self._has_ended = True
            with self._lock:  # after a bug, too: nobody would take it back any more
                for number in list(self._followers):
                    self._end(number)

    @contextlib.contextmanager
    def _guarded(self, number: int | None) -> Iterator[None]:
        """Context that catches and logs a bug: the follower of this number (None: every follower)
        begins again."""
        try:
            yield
        except Exception as error:
            if repr(error) not in self._bugs:
                self._bugs.append(repr(error))
                _log.exception("a bug: reading KV events failed; it is tried again")
            with self._lock:
                for each in list(self._followers) if number is None else [number]:
                    self._begin_again(each)

    def _begin_again(self, number: int) -> None:
        """Replace a follower and withdraw the engine's blocks, because these, and the published
        ones, may be wrong."""
        failed = self._followers[number]
        source, until_ms = failed.source, self._clock.now_ns() // NS_PER_MS + REOPEN_MS_MAX
        self._follow(number, source, failed_until_ms=until_ms)
        failed.hang_up()
        self._tell(Left(source.engine, source.rank))

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._orders.fileno(), zmq.POLLIN)
        for follower in self._followers.values():
            for socket in follower.sockets():
                poller.register(socket, zmq.POLLIN)
        wait_ms = TURN_MS if self._followers else None
        if any(each.feed.has_more for each in self._followers.values()):
            wait_ms = 0
        ready = {source for source, _ in poller.poll(wait_ms)}
        self._take_orders()
        now_ms = self._clock.now_ns() // NS_PER_MS
        for number, follower in list(self._followers.items()):
            with self._guarded(number), self._lock:
                follower.turn(ready, now_ms)

    def _take_orders(self) -> None:
        for number, source in self._orders.take():
            follower = self._followers.get(number)
            if follower is not None and follower.source == source:
                continue
            with self._lock:
                self._end(number)
                if source is not None:
                    self._begin(number, source)

    def _begin(self, number: int, source: EngineSource) -> None:
        name = (source.engine, source.rank)
        if number >= 0 and name in self._configured:
            _log.warning(
                "engine %s rank %d is attached, and --engine-events has one of that name, which"
                " counts: give that another NAME",
                *name,
            )
            return
        for other, its in list(self._followers.items()):
            if (its.source.engine, its.source.rank) == name:
                self._end(other)  # an engine that comes back before its end was noticed
        if len(self._followers) >= ENGINE_COUNT_MAX:
            _log.warning("engine %s rank %d: %d are followed already", *name, ENGINE_COUNT_MAX)
            return
        self._follow(number, source)
        _log.info("engine %s rank %d: KV events are read from %s", *name, source.endpoint)

    def _follow(self, number: int, source: EngineSource, *, failed_until_ms: int = 0) -> None:
        self._serial += 1
        its = source, self._serial, self._context, self._tell, self.counters
        self._followers[number] = _Follower(*its, failed_until_ms=failed_until_ms)

    def _end(self, number: int) -> None:
        if (follower := self._followers.pop(number, None)) is not None:
            follower.close()


def _take(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of one message; empty if none is there. Raises ZMQError if it has too many frames
    or bytes: the rest of the message is then still in the socket."""
    try:
        frames = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return []
    size_bytes = len(frames[0])
    while socket.getsockopt(zmq.RCVMORE):
        if len(frames) == FRAMES_MAX or size_bytes > MESSAGE_BYTES_MAX:
            raise zmq.ZMQError(errno.EMSGSIZE)
        frames.append(socket.recv(zmq.NOBLOCK))
        size_bytes += len(frames[-1])
    return frames


def _note(ahead: int) -> str:
    """Note for an engine whose hits are shorter than its blocks suggest; empty for others. `ahead`:
    tokens that its hashes cover behind a block."""
    return AHEAD.format(ahead) if ahead else ""
