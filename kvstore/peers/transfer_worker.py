"""The node's end of its transfer worker: starts, watches and kills it, and reports each transfer's
end once.

    worker = TransferWorker(arena_fd, hold_fd, arena_bytes, settings, clock)
    worker.start()                                  # from the loop's own thread: it dies with it
    selector.register(worker.fileno(), EVENT_READ)  # and call `read` at `worker.next_ns()`, too
    worker.connect("node-b", descriptor)            # of b's transfer worker, from b
    worker.post(7, "node-b", pieces, deadline_ns=…)
    for event in worker.read(): …                   # TransferEnded(7, …): its slots are quiet

`TransferEnded` is the moment from which nothing writes to the places of a transfer: the transfer
worker said so, or it is dead and reaped. After a death peers must be connected again: `Up` says
when.

Does not cover: rules (`transport.watch`), messages (`wire.transfer_worker`), what is read
(`engine`).
"""

from __future__ import annotations

import array
import contextlib
import select
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from kvstore.errors import ProtocolError
from kvstore.net.child import Child, spawn
from kvstore.ports import Clock, Pieces
from kvstore.transport.pieces import joined, total_bytes
from kvstore.transport.watch import Recycle, Watch
from kvstore.units import NS_PER_S
from kvstore.wire import transfer_worker as wire

UNSENT_MAX: Final = 1024
"""Most datagrams that wait for a transfer worker to read them; with more it is killed."""
PROGRAM: Final = ("-P", "-m", "kvstore.peers.transfer_worker_process")


class TransferWorkerSettings(msgspec.Struct, frozen=True):
    """Back end of a transfer worker, and its settings."""

    backend: str
    name: str
    """Name of this node, under which peers connect."""
    options: dict[str, str] = {}
    """Options of the back end."""
    environment: dict[str, str] = {}
    """Variables added to the child's environment, such as UCX_*."""
    landing: tuple[int, int] = (0, 0)
    """(offset, bytes) of the part of the arena that peers may write to."""
    paced: bool = False
    """Whether reads are paced by windows. Not by default: on a busy host the transfer worker may
    then read at an eighth of its speed."""


class Up(NamedTuple):
    """A transfer worker is ready: its descriptor can be given to peers, and no peer is connected
    yet."""

    registered: wire.Registered


class Down(NamedTuple):
    """The transfer worker is dead and reaped."""

    reason: str


class Unusable(NamedTuple):
    """This back end cannot be used on this machine: an operator must repair that. No other transfer
    worker is started."""

    reason: str


class PeerUnreachable(NamedTuple):
    """The transfer worker cannot connect to this peer."""

    peer: str
    reason: str


class TransferEnded(NamedTuple):
    """A transfer has ended: nothing writes to its places any more."""

    transfer: int
    peer: str
    good: bool
    """Whether all bytes are there; not whether they are right, or were served until the end."""
    reason: str = ""


class Crowded(NamedTuple):
    """The transfer worker refused peers that wanted to read here, for want of room. Reported at the
    first refusal, and whenever their number doubles."""

    refused: int
    """Peers refused by this transfer worker."""


TransferWorkerEvent = Up | Down | Unusable | PeerUnreachable | TransferEnded | Crowded


class TransferWorkerChild(Child):
    """One transfer worker process and the socket to it."""

    def __init__(
        self,
        arena_fd: int,
        hold_fd: int,
        arena_bytes: int,
        settings: TransferWorkerSettings,
        *,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Start the process. Raises OSError if the machine has no room for it."""
        super().__init__(spawn(program, settings.environment))
        self._unsent: deque[bytes] = deque()
        begin = wire.Begin(
            backend=settings.backend,
            name=settings.name,
            arena_bytes=arena_bytes,
            options=settings.options,
            paced=settings.paced,
            landing_begin=settings.landing[0],
            landing_bytes=settings.landing[1],
        )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [arena_fd, hold_fd]))]
        with contextlib.suppress(OSError):  # its pidfd tells the rest
            self.socket.sendmsg([wire.encode(begin)], rights, socket.MSG_NOSIGNAL)

    def say(self, *messages: wire.FromNode) -> bool:
        """Send messages without waiting. Returns False if more than UNSENT_MAX of them wait to be
        read."""
        self._unsent.extend(map(wire.encode, messages))
        self.flush()
        return len(self._unsent) <= UNSENT_MAX

    def flush(self) -> None:
        """Send the messages that the socket had no room for."""
        while self._unsent:
            try:
                self.socket.send(self._unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return
            self._unsent.popleft()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def hear(self) -> Iterator[wire.FromTransferWorker]:
        """Messages that the process has sent. Raises ProtocolError at a malformed one, after those
        before it."""
        with contextlib.suppress(OSError):
            while data := self.socket.recv(wire.DATAGRAM_BYTES_MAX, socket.MSG_DONTWAIT):
                yield wire.decode_from_transfer_worker(data)


class TransferWorker:
    """The node's transfer worker: one child process after the other. For one thread; no call waits,
    except `close` and `read` after the child's end."""

    def __init__(
        self,
        arena_fd: int,
        hold_fd: int,
        arena_bytes: int,
        settings: TransferWorkerSettings,
        clock: Clock,
    ) -> None:
        """Nothing is started yet. Both descriptors (of `arena.Arena`) stay the caller's, and open
        as long as this object is used."""
        self._arena = arena_fd, hold_fd, arena_bytes
        self._settings, self._clock = settings, clock
        self._watch = Watch(arena_bytes=arena_bytes)
        self._child: TransferWorkerChild | None = None
        self._ready = False
        self._again_ns = 0
        """When to start another child; 0: not planned."""
        self._epoll = select.epoll()
        self._pending: list[TransferWorkerEvent] = []
        self._killed = ""
        """Reason if this object killed the child; empty: it did not."""
        self._unusable = False
        self._has_served = False
        self.restarts = 0
        self.refused = 0
        """Number of times that a peer wanted to read here and found no room, over all children."""
        self._refused = 0
        """The same number for the present child."""

    @property
    def is_ready(self) -> bool:
        """Whether transfers can be posted."""
        return self._ready

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._child.pid if self._child else None

    def fileno(self) -> int:
        """Descriptor that is readable when `read` has something to do."""
        return self._epoll.fileno()

    def next_ns(self) -> int:
        """Time at which to call `read` even if nothing is readable; 0: none."""
        if self._pending:
            return self._clock.now_ns()
        if self._child is not None and self._killed:  # its end is told by its pidfd
            return self._clock.now_ns() + NS_PER_S // 10
        times = [self._again_ns, self._watch.next_ns() if self._child else 0]
        if self._child is not None and self._child.has_unsent:
            times.append(self._clock.now_ns() + NS_PER_S // 100)
        return min(filter(None, times), default=0)

    def start(self) -> None:
        """Start a child. Call it in a thread that lives as long as this process, because the child
        ends with that thread."""
        assert self._child is None, "it runs"
        self._again_ns = 0
        now_ns = self._clock.now_ns()
        self._watch.began(now_ns)
        try:
            child = TransferWorkerChild(*self._arena, self._settings)
        except OSError:
            _, pause_ns = self._watch.died(now_ns)
            self._again_ns = now_ns + max(pause_ns, NS_PER_S)
            return
        self._child = child
        for fd in (child.socket.fileno(), child.pidfd):
            self._epoll.register(fd, select.EPOLLIN)

    def is_reading(self, peer: str) -> bool:
        """Whether a transfer with this peer has not ended."""
        return peer in self._watch.transfers.values()

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Connect to a peer by the descriptor of its transfer worker. `PeerUnreachable` reports a
        failure; call `forget` before connecting to the peer again."""
        if len(descriptor) > wire.DESCRIPTOR_BYTES_MAX:  # which would end the transfer worker
            self._pending.append(PeerUnreachable(peer, "its descriptor is too long"))
            return
        self._say(wire.Connect(peer, descriptor))

    def forget(self, peer: str) -> None:
        """Disconnect from a peer. Its transfers end now, if the back end can end them, or else at
        their deadlines."""
        self._say(wire.Forget(peer))

    def post(
        self,
        transfer: int,
        peer: str,
        pieces: Pieces,
        direction: wire.Direction = wire.Direction.READ,
        *,
        deadline_ns: int,
    ) -> bool:
        """Begin a transfer with this number; exactly one TransferEnded follows. Returns False if it
        cannot begin now: then nothing follows."""
        pieces = joined(pieces)
        if not self._ready or len(pieces.length) > wire.PIECES_PER_MOVE_MAX:
            return False
        size_bytes = total_bytes(pieces)
        self._watch.posted(transfer, peer, size_bytes=size_bytes, deadline_ns=deadline_ns)
        self._say(*wire.parts_of(transfer, peer, pieces, direction))
        return True

    def read(self) -> list[TransferWorkerEvent]:
        """New events; call it when `fileno` is readable, and at `next_ns`."""
        now_ns = self._clock.now_ns()
        events, self._pending = self._pending, []
        child = self._child
        if child is None:
            if self._again_ns and now_ns >= self._again_ns:
                self.start()
            return events
        ended = child.has_ended  # asked first: what it said before its end is heard below
        child.flush()
        try:
            for message in child.hear():
                self._watch.heard(now_ns)
                events += self._take(message)
        except ProtocolError as error:
            self.kill(str(error))
        if ended:
            return events + self._reap("it ended")
        match self._watch.look(now_ns):
            case Recycle(reason=reason):
                self.kill(reason)
            case overdue:
                for peer in overdue:
                    self.forget(peer)
        return events

    def kill(self, reason: str) -> None:
        """Send SIGKILL to the child. Its transfers end when it is gone, as `read` reports."""
        if self._child is not None:
            self._ready, self._killed = False, self._killed or reason
            self._child.signal(signal.SIGKILL)

    def close(self) -> list[TransferWorkerEvent]:
        """End the child for good. Returns the last events: every transfer that had not ended has
        ended."""
        events = self._pending + self._reap("the node ends")
        self._pending, self._again_ns = [], 0
        self._epoll.close()
        return events

    def _reap(self, reason: str) -> list[TransferWorkerEvent]:
        if self._child is None:
            return []
        child, self._child, self._ready = self._child, None, False
        for fd in (child.socket.fileno(), child.pidfd):
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
        status = child.close()
        now_ns = self._clock.now_ns()
        ended, pause_ns = self._watch.died(now_ns)
        why, self._killed = self._killed or f"{reason} with status {status}", ""
        self._again_ns = 0 if self._unusable else now_ns + max(pause_ns, 1)
        self.restarts += 1
        ends = [TransferEnded(each, peer, good=False, reason=why) for each, peer in ended.items()]
        return [*ends, Down(why)]

    def _say(self, *messages: wire.FromNode) -> None:
        if self._child is not None and not self._child.say(*messages):
            self.kill("it takes no messages")

    def _take(self, message: wire.FromTransferWorker) -> list[TransferWorkerEvent]:
        match message:
            case wire.Registered():
                self._ready, self._has_served, self._refused = not self._killed, True, 0
                return [Up(message)]
            case wire.Done(transfer=transfer):
                return self._end(transfer, good=True)
            case wire.Failed(transfer=transfer, reason=reason):
                return self._end(transfer, good=False, reason=reason)
            case wire.Limbo(transfer=transfer):
                self._watch.in_limbo(transfer)
            case wire.Unreachable(peer=peer, reason=reason):
                return [PeerUnreachable(peer, reason)]
            case wire.Unable(reason=reason):
                if self._has_served:  # what worked may work again: certificates being replaced, …
                    self._killed = self._killed or reason
                    return []
                self._unusable = True
                return [Unusable(reason)]
            case wire.Beat(refused=refused):
                return self._count_refused(refused)
        return []

    def _count_refused(self, refused: int) -> list[TransferWorkerEvent]:
        before, self._refused = self._refused, refused
        self.refused += refused - before
        return [Crowded(refused)] if refused.bit_length() > before.bit_length() else []

    def _end(self, transfer: int, *, good: bool, reason: str = "") -> list[TransferWorkerEvent]:
        peer = self._watch.ended(transfer)
        return [] if peer is None else [TransferEnded(transfer, peer, good, reason)]
