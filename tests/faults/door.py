"""A node in this process: all of it but its thread. What is sent to its socket is read by `pump`.

door = Door(tmp_path)
guest = Guest(door, "good")
guest.open()
guest.store(1, 2)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from kvstore.arena import Arena
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.node.attach import Attach
from kvstore.node.driver import Driver, Executor
from kvstore.supervisor.sockets import Listener
from kvstore.tiers.dram import DramTier
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Incarnation
from kvstore.wire.messages import (
    Grant,
    LeaseAsk,
    LeaseRelease,
    LeaseReply,
    NodeMessage,
    Quiesce,
    Quiet,
    Seal,
    SessionOpen,
    decode_from_node,
    encode,
)
from tests.kit.memory_tier import until_populated
from tests.kit.set_clock import SetClock
from tests.unit.engine.harness import Hellos, arrays, checksum, keys, pairs

ARENA_SLOTS: Final = 32
DATAGRAM_ROOM: Final = 1 << 18


class Door:
    """`clock` stands still until it is moved."""

    def __init__(self, directory: Path, *, slots: int = ARENA_SLOTS) -> None:
        self.path = directory / "node.sock"
        self.clock = SetClock()
        arena = Arena(arena_bytes=slots * SLOT_BYTES_MIN, incarnation=Incarnation(7))
        self.tier = DramTier(arena)
        self.tier.start()
        until_populated(self.tier)
        self.attach = Attach(
            Listener(self.path, others_may_connect=False),
            allow_uids=frozenset({os.geteuid()}),
            connection_count_max=64,
            clock=self.clock,
        )
        self.engine = Engine(
            EngineConfig(
                incarnation=7,
                arena_bytes=arena.arena_bytes,
                slab_bytes=4 * SLOT_BYTES_MIN,
                generation_bytes=arena.generation_bytes,
                block_count_max=256,
                credit_share=0.25,
            )
        )
        self.driver = Driver(
            self.engine,
            Executor(arena=arena, tier=self.tier, attach=self.attach),
            self.clock,
        )
        self.lines: list[Line] = []
        """Those that are open, to be closed at the end."""
        self.tick()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in list(self.lines):
            line.socket.close()
        self.attach.close()
        self.tier.close()
        self.driver._queries.close()

    def pump(self) -> None:
        """Read and answer everything that was sent; a failure of the node's own fails the test."""
        while ready := self.attach.ready(0):
            for fd, mask in ready:
                if (source := self.attach.source(fd)) is not None:
                    self.driver._serve(source, mask)
        assert not self.driver.counters.failures, "a bug in the node, see the log"

    def tick(self, ms: int = 100) -> None:
        """Time passes."""
        self.clock.ns += ms * 1_000_000
        self.driver._tick(self.clock.ns)
        self.pump()


class Line:
    """One socket to the door, from a process that may say anything."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.socket.connect(str(door.path))
        self.is_open = True
        door.lines.append(self)

    def say(self, datagram: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send; the node reads and answers before this returns."""
        try:
            if descriptors:
                socket.send_fds(self.socket, [datagram], descriptors)
            else:
                self.socket.send(datagram)
        except (BrokenPipeError, ConnectionResetError):
            self.is_open = False
        self._door.pump()

    def introduce(self, hello: bytes) -> None:
        """Send a hello, good or bad, with this process's pidfd."""
        pidfd = os.pidfd_open(os.getpid())
        self.say(hello, [pidfd])
        os.close(pidfd)

    def hear(self) -> list[NodeMessage]:
        """Everything that the node said since; a hung up socket ends it."""
        heard = []
        while self.is_open:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, DATAGRAM_ROOM, 8)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                self.is_open = False
                break
            heard.append(decode_from_node(data))
        return heard

    def close(self) -> None:
        self.is_open = False
        self.socket.close()
        self._door.lines.remove(self)
        self._door.pump()


class Guest:
    """An engine of one rank at the door, in an open session."""

    def __init__(self, door: Door, name: str, *, tenant: str = "t") -> None:
        self.door = door
        self.hellos = Hellos(name, tenant=tenant)
        self.scheduler, self.rank = Line(door), Line(door)
        self.session = 0
        self.credits: list[tuple[int, int]] = []
        self.replies: dict[int, LeaseReply] = {}
        self.scheduler.introduce(encode(self.hellos.scheduler_hello()))
        self.rank.introduce(encode(self.hellos.rank_hello(0)))
        self.hear()
        assert self.session, "no session"

    @property
    def is_open(self) -> bool:
        return self.scheduler.is_open and self.rank.is_open

    def hear(self) -> None:
        """Take note of what the node said."""
        for message in [*self.rank.hear(), *self.scheduler.hear()]:
            match message:
                case Quiesce(session=session):
                    self.rank.say(encode(Quiet(session)))
                    self.hear()
                case SessionOpen(session=session):
                    self.session = session
                case Grant():
                    self.credits += pairs(message)
                case LeaseReply():
                    self.replies[message.lease] = message
                case _:
                    pass

    def seal(self, *numbers: int) -> Seal:
        """The words for blocks in the oldest credits."""
        slots, generations = arrays(self.credits[: len(numbers)])
        del self.credits[: len(numbers)]
        sums = b"".join(map(checksum, numbers))
        return Seal(self.session, keys(*numbers), slots, generations, sums)

    def store(self, *numbers: int) -> None:
        """Write blocks, whose bytes are their keys over and over, and seal them."""
        for number, (slot, _) in zip(numbers, self.credits, strict=False):
            block = keys(number) * (SLOT_BYTES_MIN // 32)
            begin = slot * PAGE_BYTES
            self.door.tier.arena.array.data[begin : begin + SLOT_BYTES_MIN] = block
        self.rank.say(encode(self.seal(*numbers)))
        self.hear()

    def lease(self, lease: int, *numbers: int) -> LeaseReply:
        self.scheduler.say(encode(LeaseAsk(lease, keys(*numbers))))
        self.hear()
        return self.replies.pop(lease)

    def release(self, lease: int) -> None:
        self.scheduler.say(encode(LeaseRelease([lease])))

    def read(self, reply: LeaseReply) -> list[bytes]:
        """The first page of every leased block."""
        array = self.door.tier.arena.array
        return [array[slot * PAGE_BYTES :][:PAGE_BYTES].tobytes() for slot, _ in pairs(reply)]

    def close(self) -> None:
        self.scheduler.close()
        self.rank.close()
