"""The engine's end of the attach socket: mechanism only.

Covers: connecting, the Hello with the own pidfd, datagrams both ways without ever blocking, the
descriptors that come with Welcome, and forks (the child keeps neither socket nor memory). Does not
cover: messages and their times, heartbeat age, back-off (`kvstore.client.core`).

One thread at a time. Nothing here raises after `connect`: a failure of the node arrives as one
`Lost` from `receive`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec

from kvstore.arena import ArenaView, GenerationView, in_children
from kvstore.descriptors import receive_datagram, send_datagram
from kvstore.errors import AttachError, ProtocolError
from kvstore.wire import messages as wire
from kvstore.wire.space import Slab

SEND_BUFFER_BYTES = 1 << 20
"""Send buffer asked for, so that a few of the largest datagrams fit; the kernel may give less."""
RECEIVE_COUNT_MAX = 256
"""Datagrams taken by one `receive`; the rest waits for the next call."""
_DESCRIPTORS_MAX = 8
_NON_BLOCKING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Lost(msgspec.Struct, frozen=True):
    """The link has ended: the last message that `receive` returns, once."""

    reason: str
    """One clear sentence for the log."""


class Link:
    """One attached socket of a scheduler or rank.

    `generations` is there once Welcome has been received, `arena` too on a rank, and `places` on
    one that can map the node's slab. They were checked, and stay usable after `close` as long as
    there is a reference to them.
    """

    def __init__(self, sock: socket.socket | None = None) -> None:
        """`sock`: connected; None: a link that is closed from the start."""
        self._socket = sock
        self._buffer = bytearray(wire.DATAGRAM_BYTES_MAX + 1)
        self._failure = ""
        self.arena: ArenaView | None = None
        self.generations: GenerationView | None = None
        self.places: GenerationView | None = None
        """Page of places in the slab: a word for each slot of dram (`kvstore.wire.space`)."""
        self.slab: Slab | None = None
        in_children[self] = Link.close

    @classmethod
    def connect(
        cls, path: str | os.PathLike[str], hello: wire.HelloScheduler | wire.HelloRank
    ) -> Link:
        """Connect to the node at `path` and introduce this process, without blocking.

        Raises:
            AttachError: no answer at `path`; the text says why.
        """
        sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            sock.connect(os.fspath(path))
            own = os.pidfd_open(os.getpid())
            try:
                send_datagram(sock, wire.encode(hello), [own])
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before we spoke: `receive` has the reason
            finally:
                os.close(own)
        except OSError as error:
            sock.close()
            raise AttachError(f"no kvstore node at {os.fspath(path)}: {error.strerror}") from None
        return cls(sock)

    @property
    def closed(self) -> bool:
        return self._socket is None

    def fileno(self) -> int:
        """For select and epoll; -1 once closed."""
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, message: wire.Message) -> bool:
        """Send one datagram now. False: not sent, because the node reads too slowly or is gone."""
        if self._socket is None:
            return False
        try:
            self._socket.send(wire.encode(message), _NON_BLOCKING)
        except BlockingIOError:
            return False
        except OSError as error:
            # Messages sent before the node hung up, such as a Refused, are still to be read.
            self._failure = f"the node hung up: {error.strerror}"
            return False
        return True

    def receive(self) -> Sequence[wire.NodeMessage | Lost]:
        """The messages that have arrived, oldest first; may be empty. Never blocks.

        A `Lost` is always last, and the link is closed when it is returned.
        """
        if self._socket is None:
            return ()
        got: list[wire.NodeMessage | Lost] = []
        try:
            while len(got) < RECEIVE_COUNT_MAX:
                try:
                    message = self._receive_one(self._socket)
                except ConnectionResetError as error:
                    # Reported once, ahead of what is still queued.
                    self._failure = f"the node hung up: {error.strerror}"
                    continue
                if message is None:
                    return got + self._lose("the node closed the connection")
                got.append(message)
        except BlockingIOError:
            return got + self._lose(self._failure) if self._failure else got
        except OSError as error:
            return got + self._lose(f"the node cannot be read: {error.strerror}")
        except (ProtocolError, AttachError) as error:
            return got + self._lose(str(error))
        return got

    def close(self) -> None:
        """End the connection. Idempotent; the memory is unmapped with the last reference to it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.arena = self.generations = self.places = self.slab = None

    def _receive_one(self, sock: socket.socket) -> wire.NodeMessage | None:
        """The next message; None at the end. Raises OSError, ProtocolError, AttachError."""
        if self.generations is not None:  # no descriptors any more: the kernel drops them for us
            size = sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            return wire.decode_from_node(memoryview(self._buffer)[:size]) if size else None
        descriptors: list[int] = []
        try:
            size, descriptors, _ = receive_datagram(
                sock, self._buffer, _DESCRIPTORS_MAX, flags=socket.MSG_DONTWAIT
            )
            if not size:
                return None
            message = wire.decode_from_node(memoryview(self._buffer)[:size])
            if isinstance(message, wire.Welcome):
                self._map(message, descriptors)
            return message
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, welcome: wire.Welcome, descriptors: list[int]) -> None:
        """Map the descriptors of Welcome: [generation page], or [arena, generation page], behind
        them with a slab the page of places."""
        pages, places = descriptors[:2], descriptors[2:]
        if len(pages) not in (1, 2) or len(places) != (welcome.hbm is not None):
            raise AttachError(f"the node sent {len(descriptors)} descriptors with its Welcome")
        generations, *others = (
            GenerationView(
                descriptor,
                size_bytes=welcome.generation_bytes,
                arena_bytes=welcome.arena_bytes,
                incarnation=welcome.incarnation,
            )
            for descriptor in (pages[-1], *places)
        )
        for view in others:
            self.places, self.slab = view, welcome.hbm
        if len(pages) == 2:
            self.arena = ArenaView(
                descriptors[0], size_bytes=welcome.arena_bytes, generations=generations
            )
        self.generations = generations

    def _lose(self, reason: str) -> list[wire.NodeMessage | Lost]:
        self.close()
        return [Lost(reason)]
