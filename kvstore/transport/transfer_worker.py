"""The loop of a transfer worker child: messages of the node in, transfers of a back end, outcomes
out.

The child holds no state that the node does not, waits for no peer, and ends with its socket. Does
not cover: how the process is made (`peers.transfer_worker_process`), when it must be killed
(`peers.transfer_worker`).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import fill_page_tables, map_arena
from kvstore.descriptors import receive_datagram
from kvstore.errors import AttachError, ConfigError, ProtocolError, TransportError
from kvstore.ports import Landing, Pieces, Transport, TransportMemory
from kvstore.transport.backends import open_transport
from kvstore.transport.pieces import check_within
from kvstore.transport.reads import Reads
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_S
from kvstore.wire import transfer_worker as wire

# ── page tables ───────────────────────────────────────────────────────────────────────────────────
# The page tables of a transfer worker's mappings, filled ahead of use.
#
# The pages of an arena are there (`tiers.dram` takes them), but not in the tables of a process that
# was just started: without this the first read into each costs a fault for every 4 KiB, on either
# side, which takes about as long as the bytes themselves do over tcp.
#
# The tables take 8 bytes a page and mapping: 1/256 of the arena, if it has no huge pages. Then
# there is nothing to fill.

PART_BYTES: Final = 4 << 20
"""Bytes whose tables are filled at a time: about a millisecond, by which a read that comes
meanwhile is late.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class PageTables:
    """Page tables of several mappings of one arena, each of all of it."""

    def __init__(self, fd: int, *mappings: NDArray[np.uint8]) -> None:
        """`fd`: descriptor of the arena."""
        self._mappings = mappings
        self._size_bytes = len(mappings[0])
        has_huge_pages = os.fstat(fd).st_blksize > PAGE_BYTES
        self.filled_bytes = self._size_bytes if has_huge_pages else 0

    def fill(self) -> bool:
        """Fill the next part, as far as its pages are present. False: for now there is no more."""
        begin = self.filled_bytes
        if begin >= self._size_bytes:
            return False
        try:
            # Never what is not there: its pages would be this process's to take.
            most = min(begin + PART_BYTES, self._size_bytes)
            end = begin + present_bytes(self._mappings[0], begin, most)
            if end == begin:
                return False
            for mapped in self._mappings:
                fill_page_tables(mapped, begin, end)
        except OSError:
            # No memory for tables, or a kernel that does not say: reads fault them in, one by one.
            end = self._size_bytes
        self.filled_bytes = end
        return True


def present_bytes(mapped: NDArray[np.uint8], begin: int, end: int) -> int:
    """Number of bytes from `begin` on, in bytes [begin, end) of an arena, page aligned, whose pages
    are present, whether this process has mapped them or not. (SEEK_HOLE would look at all that
    follows, each time.)

    Raises:
        OSError: the kernel does not say.
    """
    pages = np.empty((end - begin) // PAGE_BYTES, np.uint8)
    if _libc.mincore(mapped.ctypes.data + begin, end - begin, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore")
    missing = np.flatnonzero((pages & 1) == 0)
    return int(missing[0]) * PAGE_BYTES if len(missing) else end - begin


# ── datagrams ─────────────────────────────────────────────────────────────────────────────────────

UNSENT_MAX: Final = 1024
"""Most datagrams that should wait for the other end to read them."""
_T = TypeVar("_T")


class Datagrams(Generic[_T]):
    """Either end of the socket between a node and its transfer worker. No call waits."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], _T]) -> None:
        self.socket, self._decode = sock, decode
        self.unsent: deque[bytes] = deque()
        """Messages that the socket had no room for."""
        self.is_cut = False
        """Whether the other end has ended."""

    def say(self, *messages: wire.TransferWorkerMessage) -> bool:
        """Send messages. Returns False if more than UNSENT_MAX of them wait to be read."""
        self.unsent.extend(map(wire.encode, messages))
        self.flush()
        return len(self.unsent) <= UNSENT_MAX

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self.unsent:
            try:
                self.socket.send(self.unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.is_cut = True
                return
            self.unsent.popleft()

    def hear(self) -> Iterator[_T]:
        """Messages that have come, each received when it is asked for. Raises ProtocolError at a
        malformed one, after those before it."""
        while True:
            try:
                data = self.socket.recv(wire.DATAGRAM_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_cut = True
                return
            yield self._decode(data)


# ── transfer worker ───────────────────────────────────────────────────────────────────────────────

BEAT_NS: Final = NS_PER_S // 4
POLL_S: Final = 100e-6
"""Least pause between two polls of a back end without a descriptor to wait for."""
POLL_SHARE: Final = 16
"""The pause between polls is the time since the last news divided by this: an end is seen a
sixteenth later at most, and a long write is not polled a hundred times by a processor that could
move its bytes.
"""
DATAGRAMS_PER_TURN: Final = 64


def run(sock: socket.socket) -> int:
    """Serve the node at the other end until it ends; returns the exit status."""
    buffer = bytearray(wire.DATAGRAM_BYTES_MAX)
    size, descriptors, _ = receive_datagram(sock, buffer, 2)
    if not size:
        return 1
    begin = wire.decode_from_node(bytes(buffer[:size]))
    assert isinstance(begin, wire.Begin), begin
    # The second one stays open until the end: by it the node knows that this process may write to
    # the arena.
    fd, _ = descriptors
    try:
        arena = map_arena(fd, size_bytes=begin.arena_bytes, writable=True)
        source = map_arena(fd, size_bytes=begin.arena_bytes, writable=False)
        landing, at = None, begin.landing_begin
        if begin.landing_bytes:  # a mapping of its own: peers' writes are registered apart
            written = map_arena(fd, size_bytes=begin.arena_bytes, writable=True)
            landing = Landing(at, written[at : at + begin.landing_bytes])
        memory = TransportMemory(arena, source, landing)
        transport = open_transport(begin.backend, begin.name, memory, begin.options)
    except (AttachError, ConfigError) as error:
        sock.send(wire.encode(wire.Unable(str(error)[: wire.REASON_CHARS_MAX])))
        return 2
    TransferWorkerLoop(sock, transport, begin, idle=PageTables(fd, arena, source).fill).run()
    return 0


class TransferWorkerLoop:
    """Runs one transport for one node."""

    def __init__(
        self,
        sock: socket.socket,
        transport: Transport,
        begin: wire.Begin,
        *,
        idle: Callable[[], bool] = lambda: False,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`idle`: called again and again while there is nothing to read, does a little work, and
        returns whether there is more.
        """
        self._idle, self._has_more = idle, False
        self._node = Datagrams(sock, wire.decode_from_node)
        self._transport, self._now_ns = transport, now_ns
        self._reads = Reads(paced=begin.paced)
        self._arena_bytes = begin.arena_bytes
        self._parts: dict[int, list[wire.MovePieces]] = {}
        """Transfer → its messages so far, until the last one has come."""
        self._next_beat_ns = 0
        self._news_ns = 0
        """Time of the last post or end of a post, in ns."""
        self._node.say(
            wire.Registered(
                descriptor=transport.describe(),
                ends_forgotten=transport.capabilities.ends_forgotten,
            )
        )

    def run(self) -> None:
        """Serve until the node has ended."""
        while not self._node.is_cut:
            self._wait()
            self.turn()

    def turn(self) -> None:
        """Do all that can be done without waiting."""
        for message in itertools.islice(self._node.hear(), DATAGRAMS_PER_TURN):
            self._take(message)
        for outcome in self._transport.poll():
            self._news_ns = self._now_ns()
            self._node.say(*self._reads.ended(outcome, self._now_ns()))
        self._post()
        self._has_more = not self._reads.under_way and self._idle()
        if self._now_ns() >= self._next_beat_ns:
            self._next_beat_ns = self._now_ns() + BEAT_NS
            if not self._node.unsent:  # otherwise it does not read, and beats say nothing to it
                self._node.say(wire.Beat(self._transport.refused_count))
        self._node.flush()

    def _wait(self) -> None:
        now_ns = self._now_ns()
        until_ns = min(filter(None, (self._next_beat_ns, self._reads.pause_ns(now_ns))), default=0)
        timeout_s = max(0.0, (until_ns - now_ns) / NS_PER_S)
        if self._has_more:
            timeout_s = 0.0
        readable: list[int] = [self._node.socket.fileno()]
        if (fd := self._transport.fileno()) >= 0:
            readable.append(fd)
        elif self._reads.under_way:
            quiet_s = (now_ns - self._news_ns) / NS_PER_S
            timeout_s = min(timeout_s, max(POLL_S, quiet_s / POLL_SHARE))
        # Not epoll, which counts in milliseconds; a transfer worker has few descriptors.
        select.select(readable, readable[:1] if self._node.unsent else [], [], timeout_s)

    # ── from the node ────────────────────────────────────────────────────────────────────────────

    def _take(self, message: wire.FromNode) -> None:
        match message:
            case wire.Connect(peer=peer, descriptor=descriptor):
                self._connect(peer, descriptor)
            case wire.MovePieces(transfer=transfer):
                parts = self._parts.setdefault(transfer, [])
                parts.append(message)
                if message.last:
                    self._begin_transfer(self._parts.pop(transfer))
            case wire.Forget(peer=peer):
                self._node.say(*self._reads.forget(peer))
                self._transport.forget(peer)
            case wire.Begin():
                raise ProtocolError("a transfer worker begins once")

    def _connect(self, peer: str, descriptor: bytes) -> None:
        try:
            self._transport.connect(peer, descriptor)
        except TransportError as error:
            self._node.say(wire.Unreachable(peer, str(error)[: wire.REASON_CHARS_MAX]))

    def _begin_transfer(self, parts: list[wire.MovePieces]) -> None:
        first = parts[0]
        columns = (b"".join(getattr(part, name) for part in parts) for name in Pieces._fields)
        pieces = Pieces(*map(wire.array_of, columns))
        try:
            # Of the whole, before its first part; what a peer has, the transport knows.
            check_within(pieces.local, pieces.length, 0, self._arena_bytes, "this node's arena")
        except TransportError as error:
            self._node.say(wire.Failed(first.transfer, str(error)))
        else:
            its = first.transfer, first.peer, pieces, first.direction
            self._node.say(*self._reads.begin(*its))

    # ── reads ────────────────────────────────────────────────────────────────────────────────────

    def _post(self) -> None:
        while (post := self._reads.next_post(self._now_ns())) is not None:
            self._news_ns = self._now_ns()
            try:
                self._transport.post(post.number, post.peer, post.pieces, post.direction)
            except TransportError as error:
                refused = wire.Failed(post.number, str(error))
                self._node.say(*self._reads.ended(refused, self._now_ns()))
