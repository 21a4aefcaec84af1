"""The node's end of the attach sockets: who may come in, and datagrams both ways.

Covers: the check of every newcomer (uid, pidfd, hello in time, room), counts and the last reason of
refusals, reading in the order that the protocol guarantees, bounded outboxes, and the pidfds by
which the death of a process is seen. Turns sockets into engine events. Does not cover: what the
messages mean (`kvstore.engine`), whose turn it is (`kvstore.node.driver`), the socket's files
(`kvstore.supervisor.sockets`).

Order of one round: ranks, read until empty; then processes that ended; then one datagram of each
scheduler; then newcomers (`turns`). One datagram, because a second one may be younger than the look
at the ranks: every datagram that is read from a scheduler was there when the ranks were looked at,
so a seal sent before a lookup is seen by it. A scheduler waits for the next round while what its
ranks sent is not read to the end.

Events are read as they are taken, one at a time: what a step has no time for stays in its socket,
where it holds up its sender and takes no memory of the node.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstore.descriptors import receive_datagram, send_datagram
from kvstore.engine.events import Ended, Event, Exited, Received
from kvstore.engine.sessions.owners import OwnerKey
from kvstore.errors import ProtocolError
from kvstore.net.process import peer_of, process_of, vouches_for, why_no_descriptor
from kvstore.node.turns import Party, TurnKind, Turns, TurnSource
from kvstore.ports import Clock
from kvstore.supervisor.sockets import Door
from kvstore.types import ConnectionId
from kvstore.units import NS_PER_S
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    HelloRank,
    HelloScheduler,
    Refused,
    decode_from_engine,
    encode,
)

# ── refusals ──────────────────────────────────────────────────────────────────────────────────────
# Counts, and the last sentence for /healthz: nothing else is known of a process that is refused
# before it has introduced itself. All engines ask again after 10 s, so a refusal that nobody
# repeats is over; one for want of room is over when there is room.

TOLD_NS: Final = 30 * NS_PER_S
SILENT: Final = "late"
"""Kind of refusal of a process that connected and sent nothing: it is no engine."""


class RefusalCounts(dict[str, int]):
    """Refusals since the start, by kind."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(dict.fromkeys(kinds, 0))
        self._last: tuple[str, int, Callable[[], bool]] | None = None

    def add(
        self, kind: str, reason: str, now_ns: int, holds: Callable[[], bool] = lambda: True
    ) -> None:
        """Count one; `holds`: whether the reason is still true."""
        self[kind] += 1
        if kind != SILENT:
            self._last = (reason, now_ns, holds)

    def trouble(self, now_ns: int) -> str:
        """The last refusal of what may be an engine; empty when it is long ago."""
        if self._last is None or now_ns - self._last[1] > TOLD_NS or not self._last[2]():
            return ""
        return f"a process that wants to attach is refused: {self._last[0]}"


# ── sockets ───────────────────────────────────────────────────────────────────────────────────────

RANK_COUNT_MAX = 1024
"""Most datagrams of one rank in one round."""


class AttachCounters:
    """Counters of the attach sockets since the start; read by /metrics."""

    def __init__(self) -> None:
        self.datagrams_received = 0
        self.datagrams_sent = 0
        self.accepted = 0
        self.refused = RefusalCounts("uid", "full", "hello", "late")
        self.ended: dict[str, int] = dict.fromkeys(
            ("closed", "protocol", "overflow", "exited", "engine", "failure"), 0
        )


@dataclass(eq=False)
class AttachSocket:
    """One socket and, once it has introduced itself, the process behind it."""

    number: ConnectionId
    socket: socket.socket | None
    deadline_ns: int
    """Time by which it must have introduced itself."""
    pidfd: int | None = None
    is_rank: bool = False
    engine: str = ""
    """The engine of a scheduler, as much of its id as is logged."""
    outbox: deque[bytes] = field(default_factory=deque)
    owner: OwnerKey | None = None
    """The engine that it is a process of."""
    left_when_exited: int = RANK_COUNT_MAX
    """Datagrams still to be read at most once its process is gone: others may hold the socket."""

    @property
    def introduced(self) -> bool:
        return self.pidfd is not None


# ── the door ──────────────────────────────────────────────────────────────────────────────────────

HELLO_DEADLINE_NS = 2 * NS_PER_S
OUTBOX_COUNT_MAX = 512
OUTBOX_BYTES_MAX = 512 << 10
RANK_BYTES_MAX = 2 << 20
"""Most that one rank is read for in one round: what its socket can hold at once."""
ACCEPT_COUNT_MAX = 64
ACCEPT_PAUSE_NS = NS_PER_S // 2
SEND_BUFFER_BYTES = 1 << 20
ENGINE_CHARACTERS_MAX = 64
"""Characters of an engine's id in the log."""
_DESCRIPTORS_MAX = 8

_log = logging.getLogger(__name__)


class Sent(enum.Enum):
    """Outcome of sending a datagram."""

    DONE = enum.auto()
    """The datagram is with the kernel, or queued in the outbox."""
    OVERFLOW = enum.auto()
    """Not sent: the peer does not read and its outbox is full, or the kernel refuses."""
    GONE = enum.auto()
    """There is no such connection any more."""


Register = Callable[[ConnectionId, bytes, int], bool]


class Attach:
    """All attached sockets. One thread.

    The driver asks `ready` whose turn it is and calls each `Source.read`, which yields engine
    events; the executor calls `send`, `hang_up` and `release`.
    """

    def __init__(
        self,
        door: Door,
        *,
        allow_uids: frozenset[int],
        connection_count_max: int,
        clock: Clock,
        register: Register = lambda _number, _hello, _pidfd: True,
        unregister: Callable[[ConnectionId], None] = lambda _: None,
        first_number: int = 1,
    ) -> None:
        """`register`: has a rank remembered beyond this process, given its Hello and pidfd, until
        `unregister`; False: it cannot be. `first_number`: higher than any of earlier processes."""
        self.counters = AttachCounters()
        self._register = register
        self._unregister = unregister
        self._registered: set[ConnectionId] = set()
        self.door = door
        self._allow_uids = allow_uids
        self._connection_count_max = connection_count_max
        self._clock = clock
        self._epoll = select.epoll()
        self._sources: dict[int, TurnSource] = {}
        self._turns = Turns()
        self.charge = self._turns.charge
        self._unread: dict[OwnerKey, set[ConnectionId]] = {}
        """Ranks of an engine that were ready when the round began and are not read to the end."""
        self._connections: dict[ConnectionId, AttachSocket] = {}
        """All connections with an open socket, or with a pidfd that the engine still needs."""
        self.socket_count = 0
        """Sockets open now, introduced or not."""
        self._next_number = first_number
        self._buffer = bytearray(DATAGRAM_BYTES_MAX + 1)
        self._view = memoryview(self._buffer)
        self._accept_again_ns: int | None = None
        self.watch(door.socket.fileno(), TurnSource(TurnKind.LISTENER, None, self._accept))

    # ── for the driver ───────────────────────────────────────────────────────────────────────────

    def watch(self, fd: int, source: TurnSource) -> None:
        """Have `ready` return `source` whenever `fd` can be read."""
        self._epoll.register(fd, select.EPOLLIN)
        self._sources[fd] = source

    def ready(self, timeout_s: float) -> list[tuple[int, int]]:
        """(descriptor, epoll mask) of what is ready, in the order in which to `read` it."""
        found = self._epoll.poll(timeout_s)
        self._turns.order(found, self._sources)
        self._unread.clear()
        for fd, _ in found:
            source = self._sources[fd]
            if source.turn == TurnKind.RANK and source.connection is not None:
                owner = self._connections[source.connection].owner
                if owner is not None:
                    self._unread.setdefault(owner, set()).add(source.connection)
        return found

    def source(self, fd: int) -> TurnSource | None:
        """The source behind this descriptor; None if it was closed earlier in this round. Events
        that are not taken from its `read` are there in the next round."""
        return self._sources.get(fd)

    def expire(self, now_ns: int) -> None:
        """Hang up on newcomers that stay silent; listen again after a pause. Once a tick."""
        self._turns.tick()
        for connection in [c for c in self._connections.values() if not c.introduced]:
            if connection.deadline_ns <= now_ns:
                self._refuse(connection, "late", "no hello within 2 s")
        if self._accept_again_ns is not None and self._accept_again_ns <= now_ns:
            self._epoll.register(self.door.socket.fileno(), select.EPOLLIN)
            self._accept_again_ns = None

    # ── for the executor ─────────────────────────────────────────────────────────────────────────

    def send(self, number: ConnectionId, datagram: bytes, descriptors: Sequence[int] = ()) -> Sent:
        """Send now or queue; never blocks. Descriptors go only with the first datagram."""
        connection = self._connections.get(number)
        if connection is None or connection.socket is None:
            return Sent.GONE
        if not connection.outbox:
            try:
                send_datagram(connection.socket, datagram, descriptors)
            except BlockingIOError:
                if descriptors:
                    return Sent.OVERFLOW
                self._epoll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)
            except (BrokenPipeError, ConnectionResetError):
                return Sent.DONE  # it hung up; reading will tell the engine so
            except OSError as error:
                _log.warning("sending to connection %d failed: %s", number, error.strerror)
                return Sent.OVERFLOW
            else:
                self.counters.datagrams_sent += 1
                return Sent.DONE
        if (
            len(connection.outbox) >= OUTBOX_COUNT_MAX
            or sum(map(len, connection.outbox)) + len(datagram) > OUTBOX_BYTES_MAX
        ):
            return Sent.OVERFLOW
        connection.outbox.append(datagram)
        return Sent.DONE

    def hang_up(self, number: ConnectionId, kind: str = "") -> None:
        """Close the socket of a connection; its process stays watched until `release`.

        Queued datagrams go out as far as the peer's socket takes them; nobody waits for it.
        """
        connection = self._connections.get(number)
        if connection is None or connection.socket is None:
            return
        if connection.outbox:
            self._flush(connection)
        if kind:
            self.counters.ended[kind] += 1
        self._forget(connection.socket.fileno())
        connection.socket.close()
        connection.socket = None
        connection.outbox.clear()
        self.socket_count -= 1
        if connection.engine:
            _log.info("engine %s detached (connection %d)", connection.engine, number)
        if connection.pidfd is None:
            del self._connections[number]

    def release(self, number: ConnectionId) -> None:
        """Forget a connection altogether: the engine has nothing left that its process holds."""
        self.hang_up(number)
        self._drop(number)
        if number in self._registered:
            self._registered.remove(number)
            self._unregister(number)

    def adopt(self, number: ConnectionId, pidfd: int) -> None:
        """Watch the process of a rank that attached to an earlier node process; its socket has
        ended."""
        connection = AttachSocket(number, None, deadline_ns=0)
        connection.pidfd = pidfd
        self._registered.add(number)
        self._connections[number] = connection
        self.watch(pidfd, TurnSource(TurnKind.PROCESS, number, lambda _: self._exited(connection)))

    def _drop(self, number: ConnectionId) -> None:
        """Stop watching the process of a connection, and forget it."""
        connection = self._connections.pop(number, None)
        if connection is not None and connection.pidfd is not None:
            self._forget(connection.pidfd)
            os.close(connection.pidfd)

    def close(self) -> None:
        """Close every socket and pidfd. Registrations stay: the journal names them."""
        self._registered.clear()
        for number in list(self._connections):
            self.release(number)
        self.door.close()
        self._epoll.close()

    # ── newcomers ────────────────────────────────────────────────────────────────────────────────

    def _accept(self, _mask: int) -> list[Event]:
        for _ in range(ACCEPT_COUNT_MAX):
            try:
                sock, _ = self.door.socket.accept()
            except BlockingIOError:
                return []
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    continue
                # Level-triggered, the listener would spin the loop: leave it alone for a moment.
                _log.warning("cannot accept connections: %s", error.strerror)
                self._epoll.unregister(self.door.socket.fileno())
                self._accept_again_ns = self._clock.now_ns() + ACCEPT_PAUSE_NS
                return []
            self._admit(sock)
        return []

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            pid, uid = peer_of(sock)
            self._epoll.register(sock, select.EPOLLIN)
        except OSError as error:
            # Before anything knows of it: whose uid was not seen is never listened to.
            _log.warning("a connection cannot be admitted: %s", error.strerror)
            sock.close()
            return
        number, is_full = ConnectionId(self._next_number), self._is_full()
        self._next_number += 1
        deadline_ns = self._clock.now_ns() + HELLO_DEADLINE_NS
        party = Party(uid, pid)
        connection = AttachSocket(number, sock, deadline_ns=deadline_ns)
        self._connections[number] = connection
        self.socket_count += 1
        self.counters.accepted += 1
        read = partial(self._read, connection)
        self._sources[sock.fileno()] = TurnSource(TurnKind.NEWCOMER, number, read, party)
        if uid not in self._allow_uids:
            self._refuse(connection, "uid", f"uid {uid} is not allowed: start with --allow-uid")
        elif is_full:
            reason = f"the node serves at most {self._connection_count_max} connections"
            self._refuse(connection, "full", reason, permanent=False, holds=self._is_full)

    def _is_full(self) -> bool:
        count_max = self._connection_count_max
        return self.socket_count >= count_max or len(self._connections) >= 2 * count_max

    def _refuse(
        self,
        connection: AttachSocket,
        kind: str,
        reason: str,
        *,
        permanent: bool = True,
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send a newcomer the reason, as far as it listens, and hang up."""
        self.counters.refused.add(kind, reason, self._clock.now_ns(), holds)
        _log.info("connection refused: %s", reason)
        self.send(connection.number, encode(Refused(reason=reason, permanent=permanent)))
        self.hang_up(connection.number)

    def _introduce(self, connection: AttachSocket, sock: socket.socket) -> list[Event]:
        """Read the first datagram: a Hello with the pidfd of its process."""
        descriptors: list[int] = []
        try:
            size, descriptors, is_cut = receive_datagram(sock, self._buffer, _DESCRIPTORS_MAX)
            if not size:
                self.hang_up(connection.number)
                return []
            if is_cut and not descriptors:
                self._refuse(connection, "full", why_no_descriptor(), permanent=False)
                return []
            hello = decode_from_engine(self._view[:size])
            if not isinstance(hello, HelloScheduler | HelloRank):
                raise ProtocolError("the first datagram is no hello")
            peer_pid, _ = peer_of(sock)
            if len(descriptors) != 1 or not vouches_for(descriptors[0], peer_pid):
                raise ProtocolError("hello came without the pidfd of its process")
            # Where that fails, as with too many watches of a user, nothing holds the pidfd.
            self._epoll.register(descriptors[0], select.EPOLLIN)
            connection.is_rank = isinstance(hello, HelloRank)
            if connection.is_rank:
                # Before the engine hears of it, since its grants must outlive this process.
                if not self._register(connection.number, bytes(self._view[:size]), descriptors[0]):
                    raise ProtocolError("the node's supervisor does not read")
                self._registered.add(connection.number)
            connection.pidfd = descriptors.pop()
        except BlockingIOError:
            return []
        except OSError:
            self.hang_up(connection.number)
            return []
        except ProtocolError as error:
            self._refuse(connection, "hello", str(error))
            return []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        number, newcomer = connection.number, self._sources[sock.fileno()]
        process, party = process_of(connection.pidfd, number), newcomer.party
        if party.process <= 0:
            party = Party(party.uid, process)
        self._turns.join(party)
        connection.owner = (hello.tenant, hello.engine_id, hello.nonce)
        turn = TurnKind.RANK if connection.is_rank else TurnKind.SCHEDULER
        self._sources[sock.fileno()] = newcomer._replace(turn=turn, party=party)
        self._sources[connection.pidfd] = TurnSource(
            TurnKind.PROCESS, number, lambda _: self._exited(connection), party
        )
        self.counters.datagrams_received += 1
        if isinstance(hello, HelloScheduler):
            connection.engine = hello.engine_id[:ENGINE_CHARACTERS_MAX]
            _log.info("engine %s attached (connection %d)", connection.engine, number)
        return [Received(number, hello, process)]

    # ── datagrams ────────────────────────────────────────────────────────────────────────────────

    def _read(self, connection: AttachSocket, mask: int) -> Iterable[Event]:
        if not connection.introduced:
            sock = connection.socket
            return () if sock is None else self._introduce(connection, sock)
        if mask & select.EPOLLOUT:
            self._flush(connection)
        if mask & ~select.EPOLLOUT == 0:
            return ()
        if connection.is_rank:
            return self._receive(connection, RANK_COUNT_MAX)
        is_behind = connection.owner is not None and self._unread.get(connection.owner)
        return () if is_behind else self._receive(connection, 1)

    def _receive(self, connection: AttachSocket, count_max: int) -> Iterator[Event]:
        """Up to `count_max` datagrams as events; Ended is the last one if it hung up."""
        number, sock = connection.number, connection.socket
        bytes_left = RANK_BYTES_MAX
        kind = "closed"
        try:
            while sock is not None and count_max > 0 and bytes_left > 0:
                size = sock.recv_into(self._buffer)
                if not size:
                    break
                event = Received(number, decode_from_engine(self._view[:size]))
                self.counters.datagrams_received += 1
                count_max -= 1
                bytes_left -= size
                yield event
            else:
                self._was_read(connection)
                return
        except BlockingIOError:
            self._was_read(connection)
            return
        except OSError:
            pass  # reset by the peer: the end, like an orderly one
        except ProtocolError as error:
            kind = "protocol"
            _log.warning("connection %d hung up: %s", number, error)
        self._was_read(connection)
        self.hang_up(number, kind)
        yield Ended(number)

    def _was_read(self, connection: AttachSocket) -> None:
        """Note that a rank was read to the end of what it had sent when the round began."""
        if connection.owner is not None and connection.owner in self._unread:
            self._unread[connection.owner].discard(connection.number)

    def _exited(self, connection: AttachSocket) -> Iterator[Event]:
        """The process is gone: what it sent counts, then its socket and pidfd are closed.

        A forked grandchild may hold the socket open; it is nobody the node knows.
        """
        for event in self._receive(connection, connection.left_when_exited):
            connection.left_when_exited -= 1
            yield event
        if connection.socket is not None:
            self.hang_up(connection.number, "exited")
            yield Ended(connection.number)
        self._drop(connection.number)
        yield Exited(connection.number)

    def _flush(self, connection: AttachSocket) -> None:
        sock = connection.socket
        if sock is None:
            return
        try:
            while connection.outbox:
                sock.send(connection.outbox[0], socket.MSG_NOSIGNAL)
                connection.outbox.popleft()
                self.counters.datagrams_sent += 1
        except BlockingIOError:
            return
        except OSError:
            connection.outbox.clear()  # it hung up; reading will tell the engine so
        self._epoll.modify(sock, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        """Stop watching a descriptor, before it is closed; never fails."""
        if self._sources.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
