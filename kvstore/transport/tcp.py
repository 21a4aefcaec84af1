"""TCP with TLS 1.3 on both sides: the owner copies its bytes out when it is asked for them, and
into its landing memory when they are sent.

    reader                                       owner
      │── TLS: both show certificates ───────────▶│
      │── request: number, count, bytes, pieces ─▶│   at most REQUESTS_MAX unanswered
      │◀────── answer: number, bytes, the bytes ──│   in the order of the requests
      │── write: as a request, and the bytes ────▶│   each into its place in the landing memory
      │◀────────────────── answer: number, none ──│

    request  "KVRQ" u32 count  u64 number  u64 bytes  count × (u64 offset, u64 length)
    write    "KVWR" u32 count  u64 number  u64 bytes  count × (u64 offset, u64 length)  the bytes
    answer   "KVAN" u32 0      u64 number  u64 bytes  the bytes                     little-endian

Anything else closes the connection, before a byte of it is written. Bytes go from the socket into
their places in this process, by this thread alone: a connection that is closed writes no more, so
every end is known.

Options: `listen` (HOST:PORT, port 0: the kernel's choice), `host` (what peers dial, default that of
`listen`), `ca`, `certificate`, `key` (paths of PEM files); `insecure=yes` instead of those three,
in labs. Both ends must be nodes by their certificates, and who is dialled the one that is meant.

Does not cover: who may read what (the node serves, ADR 11), which connections may stay (`guests`),
when a peer is given up (the caller).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, TransportError
from kvstore.mailbox import Wake
from kvstore.ports import Landing, Pieces, TransportCapabilities, TransportMemory
from kvstore.transport.guests import Guests
from kvstore.transport.pieces import BackEnd, check_within, total_bytes
from kvstore.units import NS_PER_S
from kvstore.wire.identity import identities_of, is_name
from kvstore.wire.transfer_worker import Descriptor, Direction, Done, Failed
from kvstore.wording import cannot_listen

HEADER: Final = struct.Struct("<4sIQQ")
PIECE_BYTES: Final = 16
REQUEST: Final = b"KVRQ"
WRITE: Final = b"KVWR"
ANSWER: Final = b"KVAN"
REQUESTS_MAX: Final = 32
"""Most unanswered requests of one connection."""
PIECES_MAX: Final = 4096
HELLO_NS: Final = 10 * NS_PER_S
"""Time for connecting and showing certificates."""
SEND_BYTES: Final = 256 << 10
TURN_BYTES: Final = 8 << 20
"""Bytes that one connection moves before others have their turn."""
CALL_BYTES: Final = 4096
"""Bytes that a call counts as at least: a peer may ask for many places of a byte."""
BACKLOG: Final = 1024
"""Length of the listen queue; the kernel limits it to net.core.somaxconn."""
ACCEPTS_PER_TURN: Final = 64
PORT_PATIENCE_S: Final = 5.0
"""Time for which a port that is in use is tried again."""
PORT_PAUSE_S: Final = 0.05
UNREACHABLE: Final = (OSError, ValueError, TypeError)
"""Errors of connecting, also to an address that is invalid by its scope."""
LABEL_CHARS_MAX: Final = 63
"""Longest label of a DNS name."""


# ── the two ends of a connection ──────────────────────────────────────────────────────────────────


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address at which an owner listens. Raises ValueError, in decoding a ValidationError."""

    host: str
    """IP address: names are not looked up."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secure: bool

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.host)


class ConnectionClosed(Exception):
    """The other end closed the connection, or does not keep to the protocol."""


class Stream:
    """A connection that sends and receives bytes without waiting."""

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None, dialled: str | None = None
    ) -> None:
        """`tls` None: insecure. `dialled`: name of the node at the other end; None: it dialled this
        one.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._tls, self._dialled = sock, tls, dialled
        self.fd = sock.fileno()
        self.deadline_ns = time.monotonic_ns() + HELLO_NS
        """Time by which it must be open, in ns; 0: it is open, that is connected, and certificates
        are verified."""
        self.node = ""
        """Name of the node at the other end, by its certificate."""
        # The end that dialled speaks first: one that is silent costs no more than a place.
        self.events = selectors.EVENT_READ | (selectors.EVENT_WRITE if dialled else 0)
        """Events of the selector to wait for."""

    def shake(self) -> bool:
        """Go on with connecting and the handshake. Returns whether it is open by now. Raises
        OSError, ConnectionClosed.
        """
        if self.deadline_ns:
            if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            try:
                self._socket.getpeername()
            except OSError:  # not yet
                return False
            if self._tls is not None:
                self._socket = self._tls.wrap_socket(
                    self._socket,
                    server_side=self._dialled is None,
                    server_hostname=self._dialled,
                    do_handshake_on_connect=False,
                )
                self._tls = None
            if isinstance(self._socket, ssl.SSLSocket):
                try:
                    self._socket.do_handshake()
                except ssl.SSLWantReadError:
                    self.events = selectors.EVENT_READ
                    return False
                except ssl.SSLWantWriteError:
                    self.events = selectors.EVENT_WRITE
                    return False
                # Clients and indexes have certificates of the same authority.
                shown: dict[str, Any] = self._socket.getpeercert() or {}
                names = identities_of(shown.get("subjectAltName", ()))
                nodes = (each.name for each in names if each.role == "node")
                self.node = min(nodes, default="")
                if not self.node:
                    raise ConnectionClosed("its certificate names no node")
            self.deadline_ns = 0
        return True

    def receive(self, into: memoryview) -> int:
        """Number of bytes received; 0: none for now. Raises OSError, ConnectionClosed."""
        try:
            count = self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        if not count:
            raise ConnectionClosed("it closed the connection")
        return count

    def send(self, data: memoryview) -> int:
        """How many bytes went; 0: there is no room. Raises OSError."""
        try:
            return self._socket.send(data[:SEND_BYTES])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def close(self) -> None:
        self._socket.close()

    def wants(self, *, write: bool) -> int:
        """Events to wait for; `write`: there are bytes to send."""
        if not self.deadline_ns:
            self.events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        return self.events


class _Places(deque[memoryview]):
    """Bytes to receive or to send, one place after the other, without copies of them."""

    def __init__(self, *places: memoryview) -> None:
        super().__init__()
        self.put(*places)

    def put(self, *places: memoryview) -> None:
        self.extend(place for place in places if len(place))

    def move(self, how: Callable[[memoryview], int], budget: int) -> tuple[int, int]:
        """Bytes moved by `how` (`receive` or `send` of a stream); and their cost, at most about
        `budget`, with CALL_BYTES at least for each call. Raises OSError, ConnectionClosed.
        """
        moved = cost = 0
        while self and cost < budget:
            count = how(self[0])
            if not count:
                break
            moved += count
            cost += max(count, CALL_BYTES)
            rest = self.popleft()[count:]
            if len(rest):
                self.appendleft(rest)
        return moved, cost


class _TcpEnd(ABC):
    """Either end: bytes to send, and places of the bytes that come next."""

    stream: Stream | None = None
    """Connection; None for an owner until the first transfer, and after a failure until the
    next."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Drop what is not sent, and expect the beginning of a message."""
        self.out, self._sent, self._parts = _Places(), 0, self._messages()
        self._in = next(self._parts)

    def turn(self) -> bool:
        """Send and receive, while the stream is open. Returns whether there may be more to do at
        once. Raises OSError, ConnectionClosed.
        """
        assert self.stream is not None
        left = TURN_BYTES
        while left > 0:
            sent, cost = self.out.move(self.stream.send, left)
            self._sent += sent
            left -= cost + self._in.move(self.stream.receive, left - cost)[1]
            if self._in:
                return left <= 0
            self._in = next(self._parts)
        return True

    @abstractmethod
    def _messages(self) -> Iterator[_Places]:
        """Places for the parts of messages that come, one after the other: each is full when the
        next is asked for. Raises ConnectionClosed.
        """


class TcpReader(_TcpEnd):
    """A peer that reads from and writes to this node, over a stream that is open at its turns."""

    stream: Stream

    def __init__(self, stream: Stream, source: NDArray[np.uint8], landing: Landing | None) -> None:
        super().__init__()
        self.stream, self._view = stream, memoryview(source.data)
        self._landing = landing or Landing(0, np.empty(0, np.uint8))
        self._unanswered: deque[int] = deque()
        """For each answer that is not sent: total of bytes sent once it is."""
        self._put = 0

    def _messages(self) -> Iterator[_Places]:
        while True:
            header = bytearray(HEADER.size)
            yield _Places(memoryview(header))
            magic, count, number, size_bytes = HEADER.unpack(header)
            if magic not in (REQUEST, WRITE) or not 0 < count <= PIECES_MAX:
                raise ConnectionClosed("its request is invalid")
            pieces = bytearray(PIECE_BYTES * count)
            yield _Places(memoryview(pieces))
            while self._unanswered and self._unanswered[0] <= self._sent:
                self._unanswered.popleft()
            if len(self._unanswered) >= REQUESTS_MAX:
                raise ConnectionClosed("it asks for too much")
            places = self._places(pieces, size_bytes, is_write=magic == WRITE)
            if magic == WRITE:
                yield _Places(*places)
                places, size_bytes = [], 0
            self.out.put(memoryview(HEADER.pack(ANSWER, 0, number, size_bytes)), *places)
            self._put += HEADER.size + size_bytes
            self._unanswered.append(self._put)
            del pieces, places  # or an idle connection would hold them until its next request

    def _places(self, pieces: bytearray, size_bytes: int, *, is_write: bool) -> list[memoryview]:
        """Memory that a request names. Raises ConnectionClosed."""
        begin, length = np.frombuffer(pieces, "<u8").reshape(-1, 2).T.astype(np.uint64)
        first, view = 0, self._view
        if is_write:
            first, view = self._landing.begin, memoryview(self._landing.memory.data)
        try:
            check_within(begin, length, first, len(view), "what a peer may use")
        except TransportError as error:
            raise ConnectionClosed(str(error)) from None
        if total_bytes(Pieces(begin, begin, length)) != size_bytes:
            raise ConnectionClosed("its request is invalid")
        ranges = zip((begin - np.uint64(first)).tolist(), length.tolist(), strict=True)
        return [view[at : at + size] for at, size in ranges]


class TcpOwner(_TcpEnd):
    """A peer that this node reads from and writes to; its requests are answered in order."""

    def __init__(self, found: Descriptor, address: Address, done: Callable[[int], None]) -> None:
        """`done`: takes the number of each transfer that is done."""
        super().__init__()
        self.found, self.address, self._done = found, address, done
        self._waiting: deque[tuple[int, Pieces, Direction, list[memoryview]]] = deque()
        self._asked: deque[tuple[int, int, list[memoryview]]] = deque()
        """(number, bytes that will come, their places) of each request without a whole answer, in
        order.
        """

    def post(
        self, number: int, pieces: Pieces, direction: Direction, places: list[memoryview]
    ) -> None:
        """Request a transfer, now or once fewer are unanswered. `places`: of the pieces here."""
        self._waiting.append((number, pieces, direction, places))
        self._ask()

    def lose(self) -> list[int]:
        """Return the numbers of all transfers that have not ended, and forget them."""
        found = [each[0] for each in self._asked] + [each[0] for each in self._waiting]
        self._asked.clear()
        self._waiting.clear()
        self.start_over()
        return found

    def _ask(self) -> None:
        while self._waiting and len(self._asked) < REQUESTS_MAX:
            number, pieces, direction, places = self._waiting.popleft()
            size_bytes = total_bytes(pieces)
            table = np.stack([pieces.remote, pieces.length], axis=1).astype("<u8").tobytes()
            magic = REQUEST if direction is Direction.READ else WRITE
            header = HEADER.pack(magic, len(pieces.length), number, size_bytes)
            self.out.put(memoryview(header + table))
            if direction is Direction.READ:
                self._asked.append((number, size_bytes, places))
            else:
                self.out.put(*places)
                self._asked.append((number, 0, []))

    def _messages(self) -> Iterator[_Places]:
        while True:
            header = bytearray(HEADER.size)
            yield _Places(memoryview(header))
            magic, _, number, size_bytes = HEADER.unpack(header)
            if not self._asked or (magic, number, size_bytes) != (ANSWER, *self._asked[0][:2]):
                raise ConnectionClosed("its response is invalid")
            yield _Places(*self._asked[0][2])
            self._asked.popleft()
            self._done(number)
            self._ask()


# ── the transport ─────────────────────────────────────────────────────────────────────────────────


class Tcp(BackEnd[TcpOwner]):
    """A `Transport` over TCP and TLS."""

    capabilities = TransportCapabilities(
        takes_writes=True, ends_forgotten=True, is_secure=True, options={"port": "NUMBER"}
    )

    def __init__(self, name: str, memory: TransportMemory, options: Mapping[str, str]) -> None:
        """Listen. Raises ConfigError: certificates or the address cannot be used."""
        super().__init__("tcp", name, memory)
        self._arena = memoryview(memory.arena.data)
        self._source, self._landing = memory.source, memory.landing
        self._theirs, self._ours = _contexts(options)
        self._listener = _listen(options)
        self._address = _address(options, self._listener, secure=self._theirs is not None)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake = Wake()
        """Makes the selector ready when a turn ended before its bytes did: those may be in TLS's
        buffers.
        """
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._spare_fd = os.eventfd(0)
        """Descriptor that is closed for a moment to accept and refuse a connection, when there is
        no other.
        """
        self._again: set[TcpReader | TcpOwner] = set()
        self._guests: Guests[TcpReader] = Guests()
        self._dialled: set[TcpOwner] = set()
        """Owners whose connection may not be open yet."""

    @staticmethod
    def is_at(details: bytes, host: str) -> bool:
        told = _address_in(details)
        return told is not None and msgspec.msgpack.encode(told) == details and told.host == host

    def describe(self) -> bytes:
        return self._described(msgspec.msgpack.encode(self._address))

    def _connected(self, found: Descriptor) -> TcpOwner:
        peer, address = found.name, _address_in(found.details)
        if address is None:
            raise TransportError(f"the descriptor of {peer} has no address")
        if address.secure != (self._ours is not None):
            raise TransportError(f"only one of {peer} and this node is insecure")
        if address.secure and not _is_dns_name(peer):
            raise TransportError(f"no certificate can name {peer}")
        return TcpOwner(found, address, lambda number: self._outcomes.append(Done(number)))

    def _begin(self, number: int, to: TcpOwner, pieces: Pieces, direction: Direction) -> None:
        if len(pieces.length) > PIECES_MAX:
            raise TransportError(f"more than {PIECES_MAX} pieces in one transfer")
        ranges = zip(pieces.local.tolist(), pieces.length.tolist(), strict=True)
        places = [self._arena[at : at + size] for at, size in ranges]
        if to.stream is None:
            try:
                to.stream = self._dial(to)
            except UNREACHABLE as error:
                raise TransportError(f"{to.found.name} cannot be reached: {error}") from None
            self._dialled.add(to)
        to.post(number, pieces, direction, places)
        self._turn(to)

    def _go_on(self) -> None:
        self._wake.clear()
        due, self._again = self._again, set()
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is not None:
                due.add(key.data)
        for end in due:
            self._turn(end)
        self._expire()

    def fileno(self) -> int:
        return self._selector.fileno()

    def forget(self, peer: str) -> None:
        owner = self._peers.pop(peer, None)
        if owner is not None:
            self._fail(owner, "forgotten")

    def close(self) -> None:
        if self._wake.fileno() < 0:
            return
        super().close()
        for reader in self._guests.everybody:
            self._end(reader)
        self._selector.close()
        self._listener.close()
        self._wake.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    def _dial(self, owner: TcpOwner) -> Stream:
        address = owner.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream = Stream(sock, self._ours, owner.found.name)
            with contextlib.suppress(BlockingIOError):
                sock.connect((address.host, address.port))
        except UNREACHABLE:
            sock.close()
            raise
        self._selector.register(stream.fd, stream.events, owner)
        return stream

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # no more, or it left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return
            reader = TcpReader(Stream(sock, self._theirs), self._source, self._landing)
            self._selector.register(reader.stream.fd, reader.stream.events, reader)
            if (oldest := self._guests.arrive(reader)) is not None:
                self._end(oldest)

    def _turn_away(self) -> None:
        """Out of descriptors: accept one connection and close it, or the listener would stay ready
        for as long as it waits.
        """
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
            self.refused_count += 1
        self._spare_fd = -1
        with contextlib.suppress(OSError):
            self._spare_fd = os.eventfd(0)

    def _admit(self, reader: TcpReader) -> None:
        """Let a peer that connected stay, if there is room. Raises ConnectionClosed."""
        now_ns = time.monotonic_ns()
        if reader in self._guests.arriving:
            gone = self._guests.admit(reader, reader.stream.node, now_ns)
            if gone is reader:
                self.refused_count += 1
                raise ConnectionClosed("no connection is free for it")
            if gone is not None:
                self._end(gone)
        self._guests.heard(reader, now_ns)

    def _turn(self, end: TcpReader | TcpOwner) -> None:
        if end.stream is None or (isinstance(end, TcpReader) and end not in self._guests):
            return
        try:
            is_open = end.stream.shake()
            if is_open and isinstance(end, TcpReader):
                self._admit(end)
            more = is_open and end.turn()
        except (OSError, ConnectionClosed) as error:
            if isinstance(end, TcpOwner):
                self._fail(end, str(error))
            else:
                self._end(end)
            return
        self._selector.modify(end.stream.fd, end.stream.wants(write=bool(end.out)), end)
        if more:
            self._again.add(end)
            self._wake.set()

    def _fail(self, owner: TcpOwner, reason: str) -> None:
        """Close the connection to an owner, and fail its transfers: nothing of it writes
        any more.
        """
        self._end(owner)
        why = f"{owner.found.name}: {reason}"
        self._outcomes += [Failed(number, why) for number in owner.lose()]

    def _end(self, end: TcpReader | TcpOwner) -> None:
        self._again.discard(end)
        if end.stream is not None:
            self._selector.unregister(end.stream.fd)
            end.stream.close()
        if isinstance(end, TcpOwner):
            end.stream = None
        else:
            self._guests.leave(end)

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        for reader in list(self._guests.arriving):
            if reader.stream.deadline_ns and now_ns > reader.stream.deadline_ns:
                self._end(reader)
        for owner in list(self._dialled):
            if owner.stream is None or not owner.stream.deadline_ns:
                self._dialled.discard(owner)
            elif now_ns > owner.stream.deadline_ns:
                self._fail(owner, "it does not respond")


def _contexts(options: Mapping[str, str]) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """TLS (for peers that dial this node, for peers that it dials); None: insecure. Raises
    ConfigError.
    """
    if options.get("insecure") == "yes":
        return None, None
    try:
        ca, certificate, key = (options[name] for name in ("ca", "certificate", "key"))
    except KeyError as error:
        raise ConfigError(
            f"the tcp transport lacks the option {error}: give ca, certificate and key, or in a lab"
            " insecure=yes"
        ) from None
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.hostname_checks_common_name = False
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificates cannot be used: {error}") from None
        contexts.append(context)
    return contexts[0], contexts[1]


def _is_dns_name(name: str) -> bool:
    return is_name(name) and max(map(len, name.split("."))) <= LABEL_CHARS_MAX


def _address_in(details: bytes) -> Address | None:
    """The address in a descriptor's details; None: they have none."""
    try:
        return msgspec.msgpack.decode(details, type=Address)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _address(options: Mapping[str, str], listener: socket.socket, *, secure: bool) -> Address:
    """The address that peers dial. Raises ConfigError: its host is no IP address."""
    host, port = listener.getsockname()[:2]
    host = options.get("host") or host
    try:
        return Address(host, port, secure)
    except ValueError:
        listener.close()
        raise ConfigError(f"the tcp transport's host {host!r} is no IP address") from None


def _listen(options: Mapping[str, str]) -> socket.socket:
    address = options.get("listen", "127.0.0.1:0")
    host, _, port = address.rpartition(":")
    pause, give_up_s = threading.Event(), time.monotonic() + PORT_PATIENCE_S
    while True:
        try:
            listener = socket.create_server(
                (host.strip("[]"), int(port)),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=BACKLOG,
            )
        except (OSError, ValueError) as error:
            # The transfer worker of the process before may take a moment to be gone.
            if getattr(error, "errno", 0) == errno.EADDRINUSE and time.monotonic() < give_up_s:
                pause.wait(PORT_PAUSE_S)
                continue
            why = error if isinstance(error, OSError) else OSError(errno.EINVAL, "")
            raise ConfigError(cannot_listen("--transport tcp,port", address, why)) from None
        listener.setblocking(False)
        return listener
