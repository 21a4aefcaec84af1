"""Publishes KV events over ZeroMQ, in a thread of its own, and never makes the node wait.

    loop ─append─▶ ChangeLog ─▶ thread ─▶ PUB     topic, sequence number, batch
                                   └────▶ ROUTER  replay or snapshot, on request

Subscribe first, then ask. A replay request is [empty, first sequence number]; the answer is what is
kept of the batches from there on, [empty, sequence number, payload] each, then [empty, -1, empty].
When the first of them is later than asked for, or the live stream has a gap that a replay does not
fill, ask for a snapshot: [empty, -1]. Its batches say what is held, and all carry the number of the
last batch that they include: go on with the live stream after that number.

Everything is bounded. After a loss in the log a number is used up, so that subscribers see the gap.
A subscriber that does not read loses batches by ZeroMQ's high-water mark, and one that does not
take its replay is given up. A client's next request ends the answer to its last one; the next
answer begins when no other client is being answered.

Covers: sockets, numbers, what is kept. Does not cover: the form (`kvstore.wire.kv_events`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from kvstore.config.node import EventsConfig
from kvstore.engine.events import Changed
from kvstore.errors import ConfigError, NodeBusy
from kvstore.mailbox import Wake
from kvstore.peers.changes import ChangeLog, EventCounters, key_count, pieces
from kvstore.ports import Clock
from kvstore.supervisor.sockets import SocketFile, refuse_what_is_not_ours
from kvstore.types import Incarnation
from kvstore.units import NS_PER_S
from kvstore.wire import kv_events as wire
from kvstore.wording import cannot_listen

BATCH_KEYS_MAX: Final = 1024
KEPT_BATCHES_MAX: Final = 10_000
KEPT_BYTES_MAX: Final = 64 << 20
SUBSCRIBER_BATCHES_MAX: Final = 4096
"""Batches that wait for one slow subscriber."""
REPLY_BATCHES_MAX: Final = 64
"""Batches of a replay that wait for one slow reader."""
REQUEST_BYTES_MAX: Final = 256
REPLAY_COUNT_MAX: Final = 4
"""Most replays and snapshots sent at once; other requests wait their turn."""
ASKED_COUNT_MAX: Final = 64
"""Clients whose requests were read and wait; those of others wait in ZeroMQ's queues."""
REPLAY_STUCK_NS: Final = 5 * NS_PER_S
_TURN_BATCHES: Final = 16
_STUCK_POLL_MS: Final = 10
_IPC: Final = "ipc://"

Held = tuple[list[Changed], int]
_Frames = tuple[bytes, bytes]


class _ReplayRequest(NamedTuple):
    first: bytes
    """Number that it asks from, or END for a snapshot."""
    again: bool
    """The request came before its client had the answer to the one before."""


class _Reply:
    """A replay or snapshot on its way to one client."""

    def __init__(self, frames: Iterator[_Frames], now_ns: int) -> None:
        self.frames = frames
        self.unsent: _Frames | None = None
        self.moved_ns = now_ns


class Publisher:
    """The publisher of one node, from construction until `close`."""

    def __init__(self, config: EventsConfig, *, incarnation: Incarnation, clock: Clock) -> None:
        """Listen.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        self.counters = EventCounters()
        self._whole_hashes = config.whole_hashes
        self._who = wire.PublisherName(config.node, f"{incarnation:016x}")
        self._clock = clock
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next_number = 0
        self._replies: dict[bytes, _Reply] = {}
        self._asked: dict[bytes, _ReplayRequest] = {}
        """Last request of each client, in the order in which they come up."""
        self._closing = False
        self._files: list[SocketFile] = []
        """Files of ipc:// sockets, which ZeroMQ leaves behind."""
        self._ask: Callable[[int], Held] | None = None
        self._wake = Wake()
        self.log: ChangeLog[Changed] = ChangeLog()
        """Changes to be published."""
        self._changes = self.log.reader(self._wake.set)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        try:
            self._pub = self._listen(zmq.PUB, config.endpoint, SUBSCRIBER_BATCHES_MAX)
            self._router = self._listen(zmq.ROUTER, config.replay_endpoint, REPLY_BATCHES_MAX)
        except ConfigError:
            self.close()
            raise
        # Without it, what a slow reader's queue does not take would be dropped in silence.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _listen(self, kind: int, endpoint: str, queued_max: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, queued_max)
        made.setsockopt(zmq.RCVHWM, REPLY_BATCHES_MAX)
        made.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        made.setsockopt(zmq.IPV6, int("[" in endpoint))
        path = Path(endpoint.removeprefix(_IPC)) if endpoint.startswith(_IPC) else None
        # ZeroMQ makes the file of ipc:// itself: the mask keeps others out from the first moment.
        mask = os.umask(0o177)
        try:
            if path is not None:  # ZeroMQ would replace whatever is there
                refuse_what_is_not_ours(path, option="--events")
            made.bind(endpoint)
        except (OSError, zmq.ZMQError) as error:
            why = OSError(error.errno or 0, str(error.strerror))
            raise ConfigError(cannot_listen("--events", endpoint, why)) from None
        finally:
            os.umask(mask)
        self._files += [SocketFile(path)] if path is not None else []
        return made

    @property
    def trouble(self) -> str:
        """Why nobody new reaches this publisher; empty while all is well. Any thread."""
        for file in self._files:
            if not file.is_in_place:
                return f"{file.path} is no longer this node's events socket: restart the node"
        return ""

    # ── of the loop ──────────────────────────────────────────────────────────────────────────────

    def start(self, ask: Callable[[int], Held]) -> None:
        """Begin to publish. `ask` is `Engine.held`, on the loop, and may raise NodeBusy."""
        self._ask = ask
        self._thread.start()

    def close(self) -> None:
        """Stop; what waits is not published any more."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        for file in self._files:
            with contextlib.suppress(OSError):
                os.unlink(file.path)
        self._wake.close()

    # ── of the thread ────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        # Who kept what an earlier incarnation said is told that it is void.
        cleared = wire.AllBlocksCleared(kvstore=self._who)
        self._publish(*self._batch("", [cleared]))
        self._publish_waiting()
        while not self._closing:
            self._turn()

    def _turn(self) -> None:
        ready = self._poll()
        if self._wake.fileno() in ready:
            self._wake.clear()
            self._publish_waiting()
        if self._router in ready:
            self._take_request()
        for client, reply in list(self._replies.items()):
            if not self._advance(client, reply):
                del self._replies[client]
        # Last: whoever waits while nobody is answered would wait for ever.
        self._begin()

    def _poll(self) -> set[object]:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if len(self._asked) < ASKED_COUNT_MAX:
            poller.register(self._router, zmq.POLLIN)
        wait_ms = None
        if self._replies:
            stuck = all(reply.unsent for reply in self._replies.values())
            wait_ms = _STUCK_POLL_MS if stuck else 0
        return {source for source, _ in poller.poll(wait_ms)}

    def _publish_waiting(self) -> None:
        if lost := self._changes.take_lost():
            self.counters.keys_lost += lost
            self._next_number += 1  # of what was lost: nobody will ever have it
        for batch in self._batches(self._changes.new()):
            self._publish(*batch)

    def _publish(self, topic: bytes, payload: bytes) -> None:
        number = self._next_number
        self._next_number += 1
        self.counters.batches += 1
        self._pub.send_multipart((topic, _sequence(number), payload), zmq.NOBLOCK)
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _batches(self, changes: Iterable[Changed]) -> Iterator[_Frames]:
        """Batches of these changes, in order; each is of one model, because its topic names it."""
        events: list[wire.KVEvent] = []
        label, count = "", 0
        for change in changes:
            for piece in pieces(change, BATCH_KEYS_MAX):
                size = key_count(piece)
                if events and (change.label != label or count + size > BATCH_KEYS_MAX):
                    yield self._batch(label, events)
                    events, count = [], 0
                events.append(self._event(piece))
                label, count = change.label, count + size
        if events:
            yield self._batch(label, events)

    def _event(self, change: Changed) -> wire.KVEvent:
        tenant, space, shard = change.scope
        origin = wire.EventOrigin(
            node=self._who.node,
            incarnation=self._who.incarnation,
            tenant=tenant,
            space=space,
            shard=shard,
            label=change.label,
            block_tokens=change.block_tokens,
            keys=change.keys,
        )
        hashes = (wire.whole_hashes if self._whole_hashes else wire.low_hashes)(change.keys)
        kind = wire.BlockStored if change.stored else wire.BlockRemoved
        return kind(block_hashes=hashes, medium=wire.MEDIUM[change.tier], kvstore=origin)

    def _batch(self, label: str, events: list[wire.KVEvent]) -> _Frames:
        """Topic and payload of events of one model."""
        topic = f"kv@{self._who.node}@{label}".encode()
        return topic, wire.encode_batch(time.time(), events)

    # ── replay and snapshot ──────────────────────────────────────────────────────────────────────

    def _take_request(self) -> None:
        match self._router.recv_multipart():
            case [client, b"", first] if len(first) == wire.SEQUENCE_BYTES:
                cut = self._replies.pop(client, None) is not None
                again = cut or self._asked.pop(client, None) is not None
                self._asked[client] = _ReplayRequest(first, again)
                self.counters.replays += 1
            case _:
                self.counters.requests_refused += 1

    def _begin(self) -> None:
        """Begin to answer clients that wait, as far as there is room."""
        for client, request in list(self._asked.items()):
            if len(self._replies) >= (1 if request.again else REPLAY_COUNT_MAX):
                continue
            del self._asked[client]
            first = request.first
            wanted = self._snapshot() if first == wire.END else self._replay(first)
            self._replies[client] = _Reply(wanted, self._clock.now_ns())

    def _replay(self, request: bytes) -> Iterator[_Frames]:
        first = int.from_bytes(request, "big")
        for number, payload in [kept for kept in self._kept if kept[0] >= first]:
            yield _sequence(number), payload
        yield wire.END, b""

    def _snapshot(self) -> Iterator[_Frames]:
        """All blocks held, while the loop goes on: a change that a slice has or has not seen is in
        the live stream after this number, and the last update about a block counts."""
        assert self._ask is not None
        number = _sequence(self._next_number - 1)
        cleared = wire.AllBlocksCleared(kvstore=self._who)
        yield number, wire.encode_batch(time.time(), [cleared])
        row = 0
        while row >= 0:
            try:
                held, row = self._ask(row)
            except NodeBusy:
                return  # without an end: the client asks again
            for _, payload in self._batches(held):
                yield number, payload
        yield wire.END, b""

    def _advance(self, client: bytes, reply: _Reply) -> bool:
        """Send a few batches. False: there are no more, or nobody takes them."""
        now_ns = self._clock.now_ns()
        for _ in range(_TURN_BATCHES):
            frames = reply.unsent or next(reply.frames, None)
            if frames is None:
                return False
            try:
                self._router.send_multipart((client, b"", *frames), zmq.NOBLOCK)
            except zmq.Again:
                reply.unsent = frames
                return now_ns - reply.moved_ns < REPLAY_STUCK_NS
            except zmq.ZMQError:
                return False  # it is gone
            reply.unsent, reply.moved_ns = None, now_ns
        return True


def _sequence(number: int) -> bytes:
    return number.to_bytes(wire.SEQUENCE_BYTES, "big")
