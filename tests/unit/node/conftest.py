"""A door with a fake clock, and peers that attach to it from this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.engine.events import Event
from kvstore.net.process import process_of
from kvstore.node.attach import Attach
from kvstore.supervisor.sockets import Listener
from kvstore.types import Shard
from kvstore.wire.messages import HelloRank, Message, encode
from tests.kit.hello import group_of, rank_hello
from tests.kit.set_clock import SetClock
from tests.unit.client.rank_kit import SPACE


def hello_rank(name: str = "e", rank: int = 0) -> HelloRank:
    group = group_of(SPACE, Shard(0, 2, 0, 2))
    return rank_hello(group, name=name, rank=rank, process=f"r{rank}")


class Peer:
    """A raw socket that says what it is told to, right or wrong."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(5)
        self.socket.connect(str(path))

    def say(self, datagram: bytes | Message, descriptors: Sequence[int] = ()) -> None:
        data = datagram if isinstance(datagram, bytes) else encode(datagram)
        if descriptors:
            socket.send_fds(self.socket, [data], descriptors)
        else:
            self.socket.send(data)

    def introduce(self, hello: Message, *, pid: int | None = None) -> None:
        pidfd = os.pidfd_open(os.getpid() if pid is None else pid)
        self.say(hello, [pidfd])
        os.close(pidfd)

    def hear(self) -> bytes:
        """The next datagram; empty at the end."""
        try:
            return self.socket.recv(1 << 18)
        except ConnectionResetError:  # told once, ahead of what is queued
            return self.socket.recv(1 << 18)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


MakeAttach = Callable[..., Attach]


@pytest.fixture
def make_attach(tmp_path: Path, clock: SetClock) -> Iterator[MakeAttach]:
    made: list[Attach] = []

    def make(
        *, allow_uids: frozenset[int] = frozenset({os.geteuid()}), connection_count_max: int = 8
    ) -> Attach:
        listener = Listener(tmp_path / "node.sock", others_may_connect=False)
        made.append(
            Attach(
                listener,
                allow_uids=allow_uids,
                connection_count_max=connection_count_max,
                clock=clock,
            )
        )
        return made[-1]

    yield make
    for attach in made:
        attach.close()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[], Peer]]:
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer(tmp_path / "node.sock"))
        return made[-1]

    yield make
    for peer in made:
        peer.socket.close()


def read(attach: Attach, fd: int, mask: int) -> Iterable[Event]:
    """Events of a descriptor that is ready; none if it was closed earlier in the round."""
    source = attach.source(fd)
    return () if source is None else source.read(mask)


def rounds(attach: Attach, count: int = 1) -> list[list[Event]]:
    """What each of `count` rounds of the loop reads."""
    found = []
    for _ in range(count):
        events: list[Event] = []
        for fd, mask in attach.ready(0):
            events += read(attach, fd, mask)
        found.append(events)
    return found


def this_process() -> int:
    """As the kernel has it."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        return process_of(pidfd, 0)
    finally:
        os.close(pidfd)


def all_events(attach: Attach) -> list[Event]:
    """Everything there is to read, as the loop would."""
    found: list[Event] = []
    while ready := attach.ready(0):
        for fd, mask in ready:
            found += read(attach, fd, mask)
    return found
