"""Between the supervisor and its node process: one SOCK_SEQPACKET pair, one struct a datagram.

    supervisor                               node process
      │◀─────────────────────── Prepared ──────│   the code is loaded; nothing is touched yet
      │── Held + fd, … Writer + pidfd, … ──────▶│   memory and ranks of the process before
      │── Begin + listening socket ────────────▶│
      │◀── Begun ──────────────────────────────│   everything received
      │◀── Page + fd ──────────────────────────│   the old generation page is void now …
      │── PageTaken ───────────────────────────▶│   … and the new one may be sealed
      │◀── Keep + fd, … ───────────────────────│   arena, journal: to be held from now on
      │◀── Serving ────────────────────────────│
      │◀── Attached + pidfd, Released, … ──────│   ranks, before anything is granted to them

A sent message arrives even if its sender is killed at once. Covers: the messages, sending and
receiving one, descriptors that came with them. Does not cover: their effects (`supervisor`,
`handover`).
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final, TypeVar

import msgspec

from kvstore.descriptors import receive_datagram, send_datagram

CONTROL_VERSION: Final = 2
"""Code of another version cannot serve under a running supervisor."""
METRICS, STORE = "metrics", "store"
PLACES: Final = frozenset({METRICS, STORE})
"""Descriptors held even when memory is dropped: a listening socket and a lock that no other program
is to get while one process follows another."""
EXIT_REFUSED: Final = 2
"""Status of a process that cannot start and has logged why: a port, a directory, a flag."""
DATAGRAM_BYTES_MAX: Final = 64 << 10
"""Longest datagram: with room for the longest Hello of a rank (`wire.messages.HELLO_BYTES_MAX`)."""


class Control(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class Prepared(Control, frozen=True):
    """The node process can begin."""

    control: int
    layout: int
    """Layout of its journal."""
    version: str


class Held(Control, frozen=True):
    """Memory or a place of an earlier process. With its descriptor."""

    name: str


class RegisteredWriter(Control, tag="Writer", frozen=True):
    """A rank that attached to an earlier process. With its pidfd."""

    number: int
    hello: bytes
    """Its HelloRank, as it came."""


class Addresses(Control, tag="Places", frozen=True):
    """Ports and endpoints of a node, chosen by the kernel where the operator left them open."""

    metrics_port: int = 0
    events: str = ""
    events_replay: str = ""
    index_port: int = 0
    peer_port: int = 0


class BeginServing(Control, tag="Begin", frozen=True):
    """End of the hand-over. With the listening attach socket."""

    settings: dict[str, Any]
    """Input of `config.load_config`."""
    dram_bytes: int
    dram_note: str
    life: int = 0
    """Number of earlier processes, without refused starts that never served (they have given out no
    generation): 0 is the first."""
    died_ns: int = 0
    """End of the previous process, on the monotonic clock; 0: none."""
    places: Addresses = Addresses()


class Begun(Control, frozen=True):
    """The node process has received everything and goes on: from here the longer limit of a start
    applies, and not that for the answer of a standby, which may be swapped out."""


class DiskHangs(Control, frozen=True):
    """Whether the disk tier hangs: a process that waits for it cannot end."""

    hangs: bool


class GenerationPage(Control, tag="Page", frozen=True):
    """A new generation page. With its descriptor, not sealed yet. The one before becomes void."""


class PageTaken(Control, frozen=True):
    """Answer to Page."""


class Keep(Control, frozen=True):
    """Memory or a place to hold, in place of an older one of this name. With its descriptor."""

    name: str


class DropKept(Control, tag="Drop", frozen=True):
    """Memory of earlier processes is of no use: drop it, writers included."""


class Serving(Control, frozen=True):
    """Engines can attach."""

    places: Addresses
    blocks: int
    """Blocks in memory taken over."""
    size_bytes: int


class Attached(Control, frozen=True):
    """A rank that may be granted slots from now on. With its pidfd."""

    number: int
    hello: bytes


class Released(Control, frozen=True):
    """Nothing depends on this rank any more."""

    number: int


FromNode = (
    Prepared | Begun | DiskHangs | GenerationPage | Keep | DropKept | Serving | Attached | Released
)
FromSupervisor = Held | RegisteredWriter | BeginServing | PageTaken

_T = TypeVar("_T", bound=Control)


class HeldDescriptors:
    """Descriptors that outlive a node process, on either side: memory, places, pidfds of ranks."""

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.places: dict[str, int] = {}
        """Those of PLACES."""
        self.writers: dict[int, tuple[bytes, int]] = {}
        """Number of each rank → its HelloRank, as it came, and its pidfd."""

    def hold(self, name: str, fd: int) -> None:
        """Own this descriptor, in place of an older one of this name."""
        held = self.places if name in PLACES else self.memory
        old, held[name] = held.get(name), fd
        if old is not None:
            os.close(old)

    def forget(self) -> None:
        """Close memory and writers."""
        for fd in (*self.memory.values(), *(fd for _, fd in self.writers.values())):
            os.close(fd)
        self.memory.clear()
        self.writers.clear()

    def close(self) -> None:
        """Close every descriptor."""
        self.forget()
        for fd in self.places.values():
            os.close(fd)
        self.places.clear()


class DescriptorLost(OSError):
    """A message came without its descriptor: the process or the machine has no room for it."""

    def __init__(self, message: Control) -> None:
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))
        self.message = message


from_node: Final = msgspec.msgpack.Decoder(FromNode)
from_supervisor: Final = msgspec.msgpack.Decoder(FromSupervisor)


def send(sock: socket.socket, message: Control, fd: int | None = None, *, flags: int = 0) -> None:
    """Send a message, with a descriptor or none. Raises OSError; BlockingIOError when `flags` say
    not to wait and there is no room."""
    send_datagram(sock, msgspec.msgpack.encode(message), [] if fd is None else [fd], flags=flags)


def receive(
    sock: socket.socket, decoder: msgspec.msgpack.Decoder[_T], *, flags: int = 0
) -> tuple[_T, int] | None:
    """A message and its descriptor, -1 without one; None at the end.

    Raises:
        OSError: DescriptorLost among them.
        msgspec.DecodeError: not one of these messages, or too long for one.
    """
    buffer = bytearray(DATAGRAM_BYTES_MAX)
    size, fds, is_cut = receive_datagram(sock, buffer, 1, flags=flags)
    if not size:
        return None
    try:
        message = decoder.decode(memoryview(buffer)[:size])
        if is_cut:
            raise DescriptorLost(message)
    except (DescriptorLost, msgspec.DecodeError):
        for fd in fds:
            os.close(fd)
        raise
    return message, fds[0] if fds else -1
