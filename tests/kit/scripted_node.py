"""A node that does what a test says: a listening socket, an arena, a heartbeat. No engine core."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvstore.arena import Arena
from kvstore.tiers.hbm import HbmTier
from kvstore.types import Incarnation
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    PROTOCOL_VERSION,
    HelloRank,
    HelloScheduler,
    Message,
    Pinned,
    Quiesce,
    Quiet,
    Welcome,
    decode_from_engine,
    encode,
)
from kvstore.wire.space import ShardColumn

ARENA_BYTES = 4 << 20
WAIT_S = 60.0
M = TypeVar("M", bound=Message)


class ScriptedNode:
    def __init__(self, path: Path, *, incarnation: int = 7, arena_bytes: int = ARENA_BYTES) -> None:
        self.path = path
        self.incarnation = incarnation
        self.arena = Arena(arena_bytes=arena_bytes, incarnation=Incarnation(incarnation))
        self.arena.populate(0, arena_bytes)
        self.arena.set_ready(arena_bytes)
        self.hbm: HbmTier | None = None
        """Shared with the ranks, if it is there."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path.unlink(missing_ok=True)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.settimeout(WAIT_S)
        self.connection: socket.socket | None = None
        self._stop, self.alive = threading.Event(), threading.Event()
        self.alive.set()
        self._beater = threading.Thread(target=self._beat)
        self._beater.start()

    def _beat(self) -> None:
        while not self._stop.wait(0.02):
            if self.alive.is_set():
                self.arena.beat(time.monotonic_ns())

    @property
    def peer(self) -> socket.socket:
        """Who came last."""
        assert self.connection is not None
        return self.connection

    def accept(self) -> HelloRank | HelloScheduler:
        """Wait for the next connection and its Hello."""
        self.hang_up()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(WAIT_S)
        hello = self._receive()
        assert isinstance(hello, HelloRank | HelloScheduler), hello
        return hello

    def receive(self, kind: type[M]) -> M:
        """Wait for the next datagram, which must be of that kind; news of pinned memory, which a
        rank with a device has at any time, is passed over unless it is asked for."""
        message = self._receive()
        while isinstance(message, Pinned) and kind is not Pinned:
            message = self._receive()
        assert isinstance(message, kind), message
        return message

    def _receive(self) -> Message:
        datagram, fds, _, _ = socket.recv_fds(self.peer, DATAGRAM_BYTES_MAX, 4)
        for fd in fds:
            os.close(fd)
        assert datagram, "the rank hung up"
        return decode_from_engine(datagram)

    def is_hung_up(self) -> bool:
        """Wait until the rank closes the connection, whatever it has to say before."""
        while self.peer.recv(DATAGRAM_BYTES_MAX):
            pass
        return True

    def send(self, message: Message) -> None:
        self.peer.send(encode(message))

    def welcome(
        self,
        to: socket.socket | None = None,
        *,
        descriptors: Sequence[int] | None = None,
        **changes: Any,
    ) -> None:
        """Of all its memory, unless said otherwise."""
        self.arena.beat(time.monotonic_ns())
        fields = {
            "protocol": PROTOCOL_VERSION,
            "incarnation": self.incarnation,
            "now_ns": time.monotonic_ns(),
            "arena_bytes": self.arena.arena_bytes,
            "generation_bytes": self.arena.generation_bytes,
            "hbm": self.hbm.slab if self.hbm is not None else None,
        }
        if descriptors is None:
            descriptors = [self.arena.arena_fd, self.arena.generation_fd]
            descriptors += [self.hbm.page_fd] if self.hbm is not None else []
        socket.send_fds(to or self.peer, [encode(Welcome(**fields | changes))], descriptors)

    def open_session(self, session: int) -> HelloRank:
        """Accept, welcome, quiesce; returns the Hello when the rank is quiet."""
        hello = self.accept()
        assert isinstance(hello, HelloRank)
        self.welcome()
        self.send(Quiesce(session, columns=tuple(ShardColumn() for _ in hello.groups)))
        assert self.receive(Quiet) == Quiet(session)
        return hello

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self._stop.set()
        self._beater.join()
        self.hang_up()
        self.listener.close()
        self.path.unlink(missing_ok=True)
        self.arena.close()


@contextmanager
def node_at(path: Path, *, incarnation: int = 7) -> Iterator[ScriptedNode]:
    node = ScriptedNode(path, incarnation=incarnation)
    try:
        yield node
    finally:
        node.close()
