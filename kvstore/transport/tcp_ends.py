"""The two ends of a connection of the tcp transport: requests, answers, and bytes in their places.

    reader                                       owner
      │── TLS: both show certificates ───────────▶│
      │── request: number, count, bytes, pieces ─▶│   at most REQUESTS_MAX unanswered
      │◀────── answer: number, bytes, the bytes ──│   in the order of the requests
      │── write: as a request, and the bytes ────▶│   each into its place in the landing memory
      │◀────────────────── answer: number, none ──│

    request  "KVRQ" u32 count  u64 number  u64 bytes  count × (u64 offset, u64 length)
    write    "KVWR" u32 count  u64 number  u64 bytes  count × (u64 offset, u64 length)  the bytes
    answer   "KVAN" u32 0      u64 number  u64 bytes  the bytes                     little-endian

Anything else closes the connection, before a byte of it is written. Does not cover: who is
connected (`tcp`).
"""

from __future__ import annotations

import ipaddress
import os
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TransportError
from kvstore.ports import Landing, Pieces
from kvstore.transport.pieces import check_within, total_bytes
from kvstore.units import NS_PER_S
from kvstore.wire.identity import identities_of
from kvstore.wire.transfer_worker import Descriptor, Direction

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
        self,
        sock: socket.socket,
        secure: Callable[[socket.socket], ssl.SSLSocket] | None,
        events: int = selectors.EVENT_READ | selectors.EVENT_WRITE,
    ) -> None:
        """`events`: events of the selector to wait for first."""
        self._socket, self._secure = sock, secure
        self.fd = sock.fileno()
        self.deadline_ns = time.monotonic_ns() + HELLO_NS
        """Time by which it must be open, in ns; 0: it is open."""
        self.is_open = False
        """Connected, and certificates verified."""
        self.node = ""
        """Name of the node at the other end, by its certificate."""
        self.events = events

    def shake(self) -> bool:
        """Go on with connecting and the handshake. Returns whether it is open by now. Raises
        OSError, ConnectionClosed.
        """
        if not self.is_open:
            if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            try:
                self._socket.getpeername()
            except OSError:  # not yet
                return False
            if self._secure is not None:
                self._socket, self._secure = self._secure(self._socket), None
            if isinstance(self._socket, ssl.SSLSocket):
                try:
                    self._socket.do_handshake()
                except ssl.SSLWantReadError:
                    self.events = selectors.EVENT_READ
                    return False
                except ssl.SSLWantWriteError:
                    self.events = selectors.EVENT_WRITE
                    return False
                self.node = _node_of(self._socket.getpeercert() or {})
                if not self.node:
                    raise ConnectionClosed("its certificate names no node")
            self.is_open, self.deadline_ns = True, 0
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
        if self.is_open:
            self.events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        return self.events


def _node_of(certificate: dict[str, Any]) -> str:
    """Node name in a certificate; empty: it has none. Clients and indexes have certificates of the
    same authority, but must not connect here.
    """
    names = identities_of(certificate.get("subjectAltName", ()))
    return min((each.name for each in names if each.role == "node"), default="")


class _Places:
    """Bytes to receive or to send, one place after the other, without copies of them."""

    def __init__(self, *places: memoryview) -> None:
        self._places = deque[memoryview]()
        self.put(*places)

    def __len__(self) -> int:
        return len(self._places)

    def put(self, *places: memoryview) -> None:
        self._places.extend(place for place in places if len(place))

    def move(self, how: Callable[[memoryview], int], budget: int) -> int:
        """Number of bytes moved by `how` (`receive` or `send` of a stream), at most about `budget`.
        Raises OSError, ConnectionClosed.
        """
        moved = 0
        while self._places and moved < budget:
            count = how(self._places[0])
            if not count:
                break
            moved += count
            rest = self._places.popleft()[count:]
            if len(rest):
                self._places.appendleft(rest)
        return moved


class TcpReader:
    """A peer that reads from and writes to this node, over a stream that is open at its turns."""

    def __init__(self, stream: Stream, source: NDArray[np.uint8], landing: Landing | None) -> None:
        self.stream, self._view = stream, memoryview(source.data)
        self._landing = landing or Landing(0, np.empty(0, np.uint8))
        self._out = _Places()
        self._unanswered: deque[int] = deque()
        """For each answer that is not sent: total of bytes sent once it is."""
        self._put = self._given = 0
        self._expect_header()

    def turn(self) -> bool:
        """Receive requests and send answers. Returns whether there may be more to do at once.
        Raises OSError, ConnectionClosed.
        """
        moved = self._in.move(self.stream.receive, TURN_BYTES)
        while not self._in:
            self._heard()
            moved += self._in.move(self.stream.receive, TURN_BYTES)
        given = self._out.move(self.stream.send, TURN_BYTES)
        self._given += given
        while self._unanswered and self._unanswered[0] <= self._given:
            self._unanswered.popleft()
        return given >= TURN_BYTES or moved >= TURN_BYTES

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def _expect_header(self) -> None:
        self._header, self._pieces, self._is_body = bytearray(HEADER.size), bytearray(), False
        self._in = _Places(memoryview(self._header))

    def _heard(self) -> None:
        magic, count, number, size_bytes = HEADER.unpack(self._header)
        if self._is_body:  # of a write, which is in its places
            self._answer(number, [])
            return
        if not self._pieces:
            if magic not in (REQUEST, WRITE) or not 0 < count <= PIECES_MAX:
                raise ConnectionClosed("its request is invalid")
            self._pieces = bytearray(PIECE_BYTES * count)
            self._in = _Places(memoryview(self._pieces))
            return
        if len(self._unanswered) >= REQUESTS_MAX:
            raise ConnectionClosed("it asks for too much")
        begin, length = np.frombuffer(self._pieces, "<u8").reshape(-1, 2).T.astype(np.uint64)
        first, view = 0, self._view
        if magic == WRITE:
            first, view = self._landing.begin, memoryview(self._landing.memory.data)
        try:
            check_within(begin, length, first, len(view), "what a peer may use")
        except TransportError as error:
            raise ConnectionClosed(str(error)) from None
        if total_bytes(Pieces(begin, begin, length)) != size_bytes:
            raise ConnectionClosed("its request is invalid")
        ranges = zip((begin - np.uint64(first)).tolist(), length.tolist(), strict=True)
        places = [view[at : at + size] for at, size in ranges]
        if magic == WRITE:
            self._is_body, self._in = True, _Places(*places)
        else:
            self._answer(number, places)

    def _answer(self, number: int, parts: list[memoryview]) -> None:
        size_bytes = sum(map(len, parts))
        self._out.put(memoryview(HEADER.pack(ANSWER, 0, number, size_bytes)), *parts)
        self._put += HEADER.size + size_bytes
        self._unanswered.append(self._put)
        self._expect_header()


class TcpOwner:
    """A peer that this node reads from and writes to; its requests are answered in order."""

    def __init__(self, name: str, found: Descriptor, address: Address) -> None:
        self.name, self.found, self.address = name, found, address
        self.stream: Stream | None = None
        """Connection; None until the first transfer, and after a failure until the next."""
        self.waiting: deque[tuple[int, Pieces, Direction, list[memoryview]]] = deque()
        self.asked: deque[tuple[int, int, list[memoryview]]] = deque()
        """(number, bytes that will come, their places) of each request without a whole answer, in
        order.
        """
        self._out = _Places()
        self._expect_header()

    def turn(self) -> tuple[list[int], bool]:
        """Send requests and receive answers. Returns (transfers that are done, whether there may be
        more to do at once). Raises OSError, ConnectionClosed.
        """
        assert self.stream is not None
        done: list[int] = []
        if not self.stream.shake():
            return done, False
        moved = 0
        while moved < TURN_BYTES:
            self._ask()
            self._out.move(self.stream.send, TURN_BYTES)
            moved += self._in.move(self.stream.receive, TURN_BYTES)
            if self._in:
                return done, moved >= TURN_BYTES
            done += self._heard()
        return done, True

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def lose(self) -> list[int]:
        """Return the numbers of all transfers that have not ended, and forget them."""
        found = [each[0] for each in self.asked] + [each[0] for each in self.waiting]
        self.asked.clear()
        self.waiting.clear()
        self._out = _Places()
        self._expect_header()
        return found

    def _ask(self) -> None:
        while self.waiting and len(self.asked) < REQUESTS_MAX:
            number, pieces, direction, places = self.waiting.popleft()
            size_bytes = total_bytes(pieces)
            table = np.stack([pieces.remote, pieces.length], axis=1).astype("<u8").tobytes()
            magic = REQUEST if direction is Direction.READ else WRITE
            header = HEADER.pack(magic, len(pieces.length), number, size_bytes)
            self._out.put(memoryview(header + table))
            if direction is Direction.READ:
                self.asked.append((number, size_bytes, places))
            else:
                self._out.put(*places)
                self.asked.append((number, 0, []))

    def _expect_header(self) -> None:
        self._header, self._is_body = bytearray(HEADER.size), False
        self._in = _Places(memoryview(self._header))

    def _heard(self) -> list[int]:
        if self._is_body:
            number, *_ = self.asked.popleft()
            self._expect_header()
            return [number]
        magic, _, number, size_bytes = HEADER.unpack(self._header)
        if not self.asked or (magic, number, size_bytes) != (ANSWER, *self.asked[0][:2]):
            raise ConnectionClosed("its response is invalid")
        self._is_body, self._in = True, _Places(*self.asked[0][2])
        return []
