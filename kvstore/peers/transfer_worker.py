"""The node's end of its transfer worker: starts, watches and kills it; a transfer is something to
be awaited.

    worker = TransferWorker(arena_fd, hold_fd, begin, clock)
    worker.start()          # on the asyncio loop, from a thread that lives as long as the node
    trouble = await worker.move("node-b", descriptor, pieces, timeout_s=…)

`move` returns when nothing writes to the places of the transfer any more: the transfer worker said
so, or it is dead and reaped. After a death another one is started, to which peers are connected
again as they are needed.

Does not cover: messages (`wire.transfer_worker`), whom to read from (`fetcher`), what is read
(`engine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvstore.descriptors import send_datagram
from kvstore.errors import ProtocolError
from kvstore.net.process import Child, spawn
from kvstore.ports import Clock, Pieces
from kvstore.transport.pieces import joined, total_bytes
from kvstore.transport.transfer_worker import Datagrams
from kvstore.units import NS_PER_S
from kvstore.wire import transfer_worker as wire
from kvstore.wire.transfer_worker import Direction

PROGRAM: Final = ("-P", "-m", "kvstore.peers.transfer_worker_process")

_log = logging.getLogger(__name__)


# ── watch ─────────────────────────────────────────────────────────────────────────────────────────
# When a transfer worker must be killed, because nothing else can end what it does. Pure.
#
#     posted ──▶ under way ──▶ ended              by its own words
#                   │  deadline
#                   ▼
#                limbo ──▶ the peer is forgotten, and after GRACE_NS without an end: Recycle
#                   ▲
#     Limbo ────────┘                             it says that it cannot know; at its deadline,
#                                                 or when too much of the arena is in limbo: Recycle
#
# A transfer worker that does not beat is recycled, too. While this process was stopped itself,
# nothing was heard: a look that comes late moves the deadlines of beats, not of transfers.
#
# All that was under way has ended when the transfer worker is dead and reaped; nothing else says
# so.

GRACE_NS: Final = NS_PER_S
SILENT_NS: Final = 5 * NS_PER_S
START_NS: Final = 60 * NS_PER_S
"""Limit until a transfer worker's first message: libraries are loaded, and an arena is
registered.
"""
LOOK_LATE_NS: Final = NS_PER_S
LIMBO_DIVISOR: Final = 16
"""One part in this many of the arena may be in limbo."""
PAUSES_NS: Final = (0, NS_PER_S // 10, NS_PER_S // 2, NS_PER_S, 2 * NS_PER_S, 5 * NS_PER_S)
LONG_NS: Final = 30 * NS_PER_S
"""A transfer worker that served for longer did not die of its start."""


class Recycle(NamedTuple):
    """The transfer worker must be killed, for this reason."""

    reason: str


class WatchedTransfer:
    """A transfer that has not ended."""

    def __init__(
        self, peer: str, size_bytes: int, deadline_ns: int, end: Callable[[str], object]
    ) -> None:
        """`end`: called when it has ended, with the reason why bytes are missing."""
        self.peer, self.size_bytes, self.deadline_ns, self.end = peer, size_bytes, deadline_ns, end
        self.limbo = False
        self.overdue = False
        """Whether its peer was forgotten at the first deadline; the other is GRACE_NS later."""


class Watch:
    """Watches the transfer workers of a node, one after the other."""

    def __init__(self, *, arena_bytes: int) -> None:
        self._limbo_max = arena_bytes // LIMBO_DIVISOR
        self.transfers: dict[int, WatchedTransfer] = {}
        """Transfers that have not ended, by number."""
        self._silent_at_ns = 0
        """Time at which it will have been silent for too long; 0: there is no transfer worker."""
        self._looked_ns = 0
        self._begun_ns = 0
        self._deaths = 0

    def began(self, now_ns: int) -> None:
        """A transfer worker was started."""
        self._begun_ns = self._looked_ns = now_ns
        self._silent_at_ns = now_ns + START_NS

    def heard(self, now_ns: int) -> None:
        """A message of the transfer worker came."""
        self._silent_at_ns = now_ns + SILENT_NS

    def in_limbo(self, transfer: int) -> None:
        """The transfer worker reports that it cannot know the end of a transfer."""
        if transfer in self.transfers:
            self.transfers[transfer].limbo = True

    def look(self, now_ns: int) -> set[str] | Recycle:
        """Actions that are due now: the peers to be forgotten, since a transfer is past its
        deadline; or Recycle, to end the transfer worker.
        """
        if now_ns - self._looked_ns > LOOK_LATE_NS:
            self._silent_at_ns = max(self._silent_at_ns, now_ns + SILENT_NS)
        self._looked_ns = now_ns
        if now_ns >= self._silent_at_ns:
            return Recycle("it is silent")
        overdue = set()
        for each in self.transfers.values():
            if now_ns < each.deadline_ns:
                continue
            if each.overdue:
                return Recycle(f"a read from {each.peer} has no end")
            each.overdue, each.deadline_ns = True, each.deadline_ns + GRACE_NS
            overdue.add(each.peer)
        # The end of these only the transfer worker's death would prove.
        limbo = (each.size_bytes for each in self.transfers.values() if each.limbo)
        if sum(limbo) > self._limbo_max:
            return Recycle("too many reads have no end")
        return overdue

    def next_ns(self) -> int:
        """Time at which to look again at the latest, in ns."""
        times = [each.deadline_ns for each in self.transfers.values()]
        return min([*times, self._looked_ns + LOOK_LATE_NS // 2, self._silent_at_ns])

    def died(self, now_ns: int) -> int:
        """The transfer worker is dead and reaped, and all transfers have ended with it. Returns how
        many ns to wait before another is started.
        """
        self.transfers.clear()
        soon = now_ns - self._begun_ns <= LONG_NS
        self._deaths = self._deaths + 1 if soon else 1
        self._silent_at_ns = 0
        return PAUSES_NS[min(self._deaths, len(PAUSES_NS)) - 1]


# ── its process ───────────────────────────────────────────────────────────────────────────────────


class TransferWorkerChild(Child, Datagrams[wire.FromTransferWorker]):
    """One transfer worker process and the socket to it."""

    def __init__(
        self,
        arena_fd: int,
        hold_fd: int,
        begin: wire.Begin,
        *,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Start the process. Raises OSError if the machine has no room for it."""
        Child.__init__(self, spawn(program))
        Datagrams.__init__(self, self.socket, wire.decode_from_transfer_worker)
        with contextlib.suppress(OSError):  # its pidfd tells the rest
            send_datagram(self.socket, wire.encode(begin), [arena_fd, hold_fd])


class TransferWorker:
    """The node's transfer worker, one child process after the other, from `start` to `close`, both
    on the asyncio loop. No call blocks, except for the end of a child that was killed."""

    def __init__(
        self,
        arena_fd: int,
        hold_fd: int,
        begin: wire.Begin,
        clock: Clock,
    ) -> None:
        """Nothing is started yet. Both descriptors (of `arena.Arena`) stay the caller's, and open
        as long as this object is used. `begin`: back end and memory."""
        self.descriptor = b""
        """Descriptor that peers need to read here; empty while no transfer worker is ready."""
        self.trouble = "the transfer worker is starting"
        """Why no blocks can be moved; empty while all is well."""
        self.changed: Callable[[], object] = lambda: None
        """Called when `descriptor` has changed."""
        self.restarts = 0
        """Number of transfer workers before this one."""
        self.refused = 0
        """Number of times that a peer wanted to read here and found no room, over all children."""
        self._refused = 0
        """The same number for the present child."""
        self._arena, self._begin = (arena_fd, hold_fd), begin
        self._clock = clock
        self._watch = Watch(arena_bytes=begin.arena_bytes)
        self._child: TransferWorkerChild | None = None
        self._killed = ""
        """Why the child is killed, or ends by itself; empty: it serves."""
        self._is_unusable = False
        """Whether an operator must repair something first: no other child is started."""
        self._has_served = False
        self._numbers = itertools.count(1)
        self._connected: dict[str, bytes] = {}
        """Descriptor of each peer that the child is connected to."""
        self._to_forget: set[str] = set()
        """Peers to disconnect from when their reads have ended."""
        self._forgets_reads = False
        """Whether the back end ends the reads of a peer that it disconnects from. If not, only the
        death of the child would end them: a peer is not forgotten while it is read from."""
        self._timer: asyncio.TimerHandle | None = None
        """Next look at the child, or the start of another one."""

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start a child. The loop's thread must live as long as the node, because the child ends
        with that thread."""
        assert self._child is None, "it runs"
        now_ns = self._clock.now_ns()
        self._watch.began(now_ns)
        try:
            self._child = TransferWorkerChild(*self._arena, self._begin)
        except OSError:
            self._call_later(max(self._watch.died(now_ns), NS_PER_S), self.start)
            return
        for fd in (self._child.socket.fileno(), self._child.pidfd):
            asyncio.get_running_loop().add_reader(fd, self._turn)
        self._plan()

    def close(self) -> None:
        """End the child for good; on return every transfer has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None:
            self._reap("the node ends")

    async def move(
        self,
        peer: str,
        descriptor: bytes,
        pieces: Pieces,
        *,
        timeout_s: float,
        direction: Direction = Direction.READ,
    ) -> str:
        """Read from a peer, or write to its landing memory. On return nothing touches the places of
        the pieces here any more. Returns why bytes are missing, empty if all are there; not whether
        they are right, or were served until the end.

        Must not be cancelled: only its return proves that.
        """
        if not self.descriptor:  # nor is one told of peers that does not say yet that it is there
            return self.trouble
        pieces = joined(pieces)
        if self._killed or len(pieces.length) > wire.PIECES_PER_MOVE_MAX:
            return "the transfer worker takes nothing now"
        if len(descriptor) > wire.DESCRIPTOR_BYTES_MAX:  # which would end the transfer worker
            return f"the descriptor of {peer} is too long"
        self._to_forget.discard(peer)
        if self._connected.get(peer) != descriptor:
            if peer in self._connected:
                self._say(wire.Forget(peer))
            self._connected[peer] = descriptor
            self._say(wire.Connect(peer, descriptor))
        number = next(self._numbers)
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        deadline_ns = self._clock.now_ns() + int(timeout_s * NS_PER_S)
        its = peer, total_bytes(pieces), deadline_ns, end.set_result
        self._watch.transfers[number] = WatchedTransfer(*its)
        self._say(*wire.parts_of(number, peer, pieces, direction))
        self._plan()
        return await asyncio.shield(end)

    def forget(self, peer: str) -> None:
        """Disconnect from a peer that nothing more is read from, as far as is known; deferred while
        a read is under way that the back end cannot end."""
        transfers = self._watch.transfers.values()
        if not self._forgets_reads and any(peer == its.peer for its in transfers):
            self._to_forget.add(peer)
        elif self._connected.pop(peer, None) is not None:
            self._say(wire.Forget(peer))

    def recycle(self, reason: str) -> None:
        """Kill the child; another one follows. Transfers end when it is reaped."""
        if self._child is not None:
            self._killed = self._killed or reason
            self._child.signal(signal.SIGKILL)

    # ── the child ────────────────────────────────────────────────────────────────────────────────

    def _say(self, *messages: wire.FromNode) -> None:
        if self._child is not None and not self._child.say(*messages):
            self.recycle("it takes no messages")

    def _turn(self) -> None:
        """Hear the child, look whether it must be killed, and reap it when it has ended."""
        child, now_ns = self._child, self._clock.now_ns()
        assert child is not None
        has_ended = child.has_ended  # asked first: what it said before its end is heard below
        child.flush()
        try:
            for message in child.hear():
                self._watch.heard(now_ns)
                self._take(message)
        except ProtocolError as error:
            self.recycle(str(error))
        if has_ended:
            why, pause_ns = self._reap("it ended")
            if not self._is_unusable:
                _log.warning("the transfer worker ended: %s; another one is started", why)
                self._become(b"", f"the transfer worker ended: {why}")
                self._call_later(pause_ns, self.start)
            return
        match self._watch.look(now_ns):
            case Recycle(reason=reason):
                self.recycle(reason)
            case overdue:
                for peer in overdue:
                    self._connected.pop(peer, None)
                    self._say(wire.Forget(peer))
        self._plan()

    def _plan(self) -> None:
        """Have `_turn` called when there is something to do even if the child says nothing."""
        assert self._child is not None
        wait_ns = self._watch.next_ns() - self._clock.now_ns()
        if self._killed:  # its end is told by its pidfd
            wait_ns = NS_PER_S // 10
        elif self._child.unsent:
            wait_ns = min(wait_ns, NS_PER_S // 100)
        self._call_later(wait_ns, self._turn)

    def _call_later(self, wait_ns: int, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0, wait_ns) / NS_PER_S, call)

    def _reap(self, reason: str) -> tuple[str, int]:
        """End the child, and with it all transfers. Returns (why it ended, ns to wait before
        another is started)."""
        assert self._child is not None
        child, self._child = self._child, None
        for fd in (child.socket.fileno(), child.pidfd):
            asyncio.get_running_loop().remove_reader(fd)
        why = f"{reason} with status {child.close()}"
        why, self._killed = self._killed or why, ""
        for number in list(self._watch.transfers):
            self._end(number, why)
        pause_ns = self._watch.died(self._clock.now_ns())
        self._connected.clear()
        self.restarts += 1
        return why, pause_ns

    def _become(self, descriptor: bytes, trouble: str) -> None:
        is_another = descriptor != self.descriptor
        self.descriptor, self.trouble = descriptor, trouble
        if is_another:
            self.changed()

    def _take(self, message: wire.FromTransferWorker) -> None:
        match message:
            case wire.Registered(descriptor=descriptor, ends_forgotten=ends_forgotten):
                self._has_served, self._refused = True, 0
                self._forgets_reads = ends_forgotten
                self._connected.clear()
                self._become(descriptor, "")
            case wire.Done(transfer=transfer):
                self._end(transfer, "")
            case wire.Failed(transfer=transfer, reason=reason):
                self._end(transfer, reason or "it failed")
            case wire.Limbo(transfer=transfer):
                self._watch.in_limbo(transfer)
            case wire.Unreachable(peer=peer, reason=reason):
                _log.info("the transfer worker does not reach node %s: %s", peer, reason)
                self._connected.pop(peer, None)
            case wire.Unable(reason=reason) if self._has_served:
                # What worked may work again: certificates being replaced, …
                self._killed = self._killed or reason
            case wire.Unable(reason=reason):
                self._is_unusable = True
                _log.error("blocks cannot be moved between nodes: %s", reason)
                self._become(b"", f"blocks cannot be moved: {reason}")
            case wire.Beat(refused=refused):
                self._count_refused(refused)

    def _count_refused(self, refused: int) -> None:
        """Count peers that the child refused for want of room; logged at the first, and whenever
        their number doubles."""
        before, self._refused = self._refused, refused
        self.refused += refused - before
        if refused.bit_length() > before.bit_length():
            _log.warning(
                "the transfer worker refused peers %d times: as many as it has room for read"
                " from this node already",
                refused,
            )

    def _end(self, number: int, trouble: str) -> None:
        """A transfer has ended, if there is one of this number."""
        its = self._watch.transfers.pop(number, None)
        if its is None:
            return
        its.end(trouble)
        if its.peer in self._to_forget:
            self._to_forget.discard(its.peer)
            self.forget(its.peer)  # or not yet: it may be read from still
