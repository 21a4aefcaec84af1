"""A scheduler or a rank as a process of its own: does what it is told, halts where it is told to.

    python actor.py FD     the nursery: forks one actor for each socket it is sent

An actor follows the attach protocol and decides nothing. It can be told to halt in the middle of a
copy, so that somebody may be killed at that very moment; halted, it hears nobody else, as a thread
in a copy would. Blocks have the bytes that `contents` makes of their key; what was read is answered
as a digest, and whether it is right is not judged here.

Does not cover: who is told what, and the truth about bytes (`tests.kit.troupe`).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.client.link import Link, Lost
from kvstore.errors import AttachError
from kvstore.testing.tied import PR_SET_PDEATHSIG
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES, BlockKey
from kvstore.wire.messages import (
    Grant,
    HelloRank,
    HelloScheduler,
    LeaseAsk,
    LeaseMore,
    LeaseRelease,
    LeaseReply,
    NodeMessage,
    Quiesce,
    Quiet,
    Refused,
    Seal,
    SessionClosed,
    SessionOpen,
    generations_array,
    slots_array,
)
from kvstore.wire.record import Scope, checksum_of, header
from kvstore.wire.space import ShardColumn, fingerprint

ORDER_BYTES_MAX: Final = 192 << 10
WAIT_S: Final = 20.0
"""How long an actor waits for the node before it says that it failed."""
_ODD: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1

Halt = Literal["", "filling", "sealing", "copying"]
"""Where to stop until told to go on: half of a block written; all written and not sealed yet; half
of the blocks read."""


def contents(key: bytes, column: int, length: int) -> NDArray[np.uint8]:
    """The bytes of a block, [length]: every 8 bytes differ by key, column and place."""
    factor = int.from_bytes(key[:8], "little") | 1
    start = (int.from_bytes(key[8:16], "little") + column * _ODD) & _WORD
    words = np.arange(-(-length // 8), dtype=np.uint64)
    words = words * np.uint64(factor) + np.uint64(start)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:length]


class Order(msgspec.Struct, frozen=True, tag=True):
    """To an actor. Each is answered once, and once more for each halt."""


class Attach(Order, frozen=True):
    """Hang up, and attach anew."""

    socket: str
    hello: HelloScheduler | HelloRank


class Look(Order, frozen=True):
    """Hear what has arrived, and wait so long for a session to be open. → State."""

    wait_s: float = 0.0


class Take(Order, frozen=True):
    """Scheduler: give up to so many credits away, waiting for one at least. → Credits."""

    count: int


class Ask(Order, frozen=True):
    """Scheduler: lease these keys, waiting for what comes from disk. → Leased."""

    keys: bytes
    while_promoting: bool = False
    """Answer as soon as something is on its way, not when it is there."""


class Release(Order, frozen=True):
    """Scheduler: give a lease back. → State."""

    lease: int


class Write(Order, frozen=True):
    """Rank: fill these slots and seal them. → Written."""

    session: int
    keys: bytes
    slots: bytes
    generations: bytes
    halt: Halt = ""


class Read(Order, frozen=True):
    """Rank: copy these slots, then look at their generations. → Copied."""

    slots: bytes
    generations: bytes
    halt: Halt = ""


class Go(Order, frozen=True):
    """Go on where you halted."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Of an actor."""


class State(Answer, frozen=True):
    """How it stands."""

    session: int
    credits: int
    attached: bool


class Credits(Answer, frozen=True):
    """Slots to write: [n][S], as the node granted them."""

    session: int
    slots: bytes
    generations: bytes


class Leased(Answer, frozen=True):
    """Slots to read: [n][S]."""

    lease: int
    slots: bytes
    generations: bytes
    promoting: int


class Halted(Answer, frozen=True):
    """Waits for Go."""


class Written(Answer, frozen=True):
    """Filled, and the seal was sent."""


class Copied(Answer, frozen=True):
    """What was read."""

    valid: bytes
    """One byte a slot: 1 when its generation was the leased one after the copy."""
    digests: bytes
    """xxh3-128 of each slot's bytes."""


class Failed(Answer, frozen=True):
    """It cannot be done, and the node is why."""

    reason: str


OrderMessage = Attach | Look | Take | Ask | Release | Write | Read | Go
AnswerMessage = State | Credits | Leased | Halted | Written | Copied | Failed
_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[OrderMessage] = msgspec.msgpack.Decoder(OrderMessage)


class _Cannot(Exception):
    """Becomes a Failed."""


class Actor:
    """One process, driven by the socket `orders` until that ends."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._link: Link | None = None
        self._hello: HelloScheduler | HelloRank | None = None
        self._session = 0
        self._shards = 1
        self._column = 0
        self._checksum_prefix = b""
        self._failure = ""
        self._credits: deque[tuple[bytes, bytes]] = deque()
        self._leases: dict[int, LeaseReply] = {}
        self._next_lease = 1

    def run(self) -> None:
        """Serve orders and the node until nobody gives orders any more."""
        while True:
            waited: list[socket.socket | Link] = [self._orders]
            if self._link is not None and not self._link.closed:
                waited.append(self._link)
            ready, _, _ = select.select(waited, [], [])
            if self._link in ready:
                self._hear()
            if self._orders in ready:
                order = self._order()
                if order is None:
                    return
                try:
                    answer = self._obey(order)
                except (_Cannot, AttachError) as error:
                    answer = Failed(str(error))
                self._orders.send(_encoder.encode(answer))

    def _order(self) -> OrderMessage | None:
        data = self._orders.recv(ORDER_BYTES_MAX)
        return _orders.decode(data) if data else None

    def _obey(self, order: OrderMessage) -> AnswerMessage:
        match order:
            case Attach():
                self._attach(order)
            case Look(wait_s=wait_s):
                self._hear()
                if wait_s:
                    self._failure = ""  # a session that is over may be followed by another
                    self._until(lambda: self._session != 0, wait_s)
            case Take(count=count):
                return self._take(count)
            case Ask():
                return self._ask(order)
            case Release(lease=lease):
                self._leases.pop(lease, None)
                if self._link is not None:
                    self._link.send(LeaseRelease(leases=[lease]))
            case Write():
                return self._write(order)
            case Read():
                return self._read(order)
            case Go():
                raise _Cannot("it did not halt")
        attached = self._link is not None and not self._link.closed
        return State(self._session, len(self._credits), attached)

    # ── the node ─────────────────────────────────────────────────────────────────────────────────

    def _attach(self, order: Attach) -> None:
        if self._link is not None:
            self._link.close()
        self._session, self._failure = 0, ""
        self._credits.clear()
        self._leases.clear()
        self._hello = order.hello
        self._link = Link.connect(order.socket, order.hello)
        self._until(lambda: self._link is not None and self._link.generations is not None)

    def _until(self, done: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        """Serve the node until `done`. Raises _Cannot."""
        deadline_s = time.monotonic() + wait_s
        while not done():
            if self._failure:
                raise _Cannot(self._failure)
            if self._link is None or self._link.closed:
                raise _Cannot("not attached")
            left_s = deadline_s - time.monotonic()
            if not select.select([self._link], [], [], max(0.0, left_s))[0]:
                raise _Cannot("the node said nothing in time")
            self._hear()

    def _hear(self) -> None:
        if self._link is not None and not self._link.closed:
            for message in self._link.receive():
                self._heard(message)

    def _heard(self, message: NodeMessage | Lost) -> None:
        match message:
            case Quiesce(session=session, columns=(ShardColumn(column),)):
                assert self._link is not None
                assert isinstance(self._hello, HelloRank)
                self._session, self._column = session, column
                (group,) = self._hello.groups
                self._checksum_prefix = Scope(
                    tenant=self._hello.tenant,
                    space=fingerprint(group.space, weights_epoch=message.weights_epoch),
                    shard=group.shard,
                    block_bytes=group.block_bytes,
                ).prefix()
                self._link.send(Quiet(session=session))
            case SessionOpen(session=session, shard_counts=(shards,)):
                self._session, self._shards, self._failure = session, shards, ""
            case SessionClosed(reason=reason):
                self._over(reason)
            case Refused(reason=reason) | Lost(reason=reason):
                self._over(self._failure or reason)
            case Grant(slots=slots, generations=generations):
                size = self._shards
                for at in range(0, len(slots) // 4, size):
                    end = at + size
                    self._credits.append((slots[4 * at : 4 * end], generations[8 * at : 8 * end]))
            case LeaseReply():
                self._leases[message.lease] = message
            case LeaseMore() if message.lease in self._leases:
                reply = self._leases[message.lease]
                self._leases[message.lease] = msgspec.structs.replace(
                    reply,
                    slots=reply.slots + message.slots,
                    generations=reply.generations + message.generations,
                    promoting=message.promoting,
                )
            case _:
                pass

    def _over(self, reason: str) -> None:
        self._session, self._failure = 0, reason
        self._credits.clear()
        self._leases.clear()

    # ── scheduler ────────────────────────────────────────────────────────────────────────────────

    def _take(self, count: int) -> Credits:
        self._hear()
        self._until(lambda: bool(self._credits))
        taken = [self._credits.popleft() for _ in range(min(count, len(self._credits)))]
        slots, generations = zip(*taken, strict=True)
        return Credits(self._session, b"".join(slots), b"".join(generations))

    def _ask(self, order: Ask) -> Leased:
        self._until(lambda: self._session != 0)
        number = self._next_lease
        self._next_lease += 1
        assert self._link is not None
        if not self._link.send(LeaseAsk(lease=number, keys=order.keys)):
            raise _Cannot("the node does not read")
        self._until(
            lambda: (
                number in self._leases
                and (order.while_promoting or not self._leases[number].promoting)
            )
        )
        reply = self._leases[number]
        return Leased(number, reply.slots, reply.generations, reply.promoting)

    # ── rank ─────────────────────────────────────────────────────────────────────────────────────

    def _memory(self) -> tuple[NDArray[np.uint8], int]:
        """The arena [bytes] and the size of a block. It stays while the array is held."""
        self._hear()  # a session that is over is known to be before a plan of it is obeyed
        if self._link is None or self._link.arena is None or not isinstance(self._hello, HelloRank):
            raise _Cannot(self._failure or "not attached")
        return self._link.arena.array, self._hello.groups[0].block_bytes

    def _write(self, order: Write) -> Written:
        arena, size = self._memory()
        if order.session != self._session:
            raise _Cannot("that session is over")
        keys = [order.keys[at : at + KEY_BYTES] for at in range(0, len(order.keys), KEY_BYTES)]
        checksums = []
        for index, (key, slot) in enumerate(
            zip(keys, slots_array(order.slots).tolist(), strict=True)
        ):
            data, begin = contents(key, self._column, size), slot * PAGE_BYTES
            half = size // 2
            arena[begin : begin + half] = data[:half]
            if index == 0:
                self._halt("filling", order.halt)
            arena[begin + half : begin + size] = data[half:]
            address = header(self._checksum_prefix, BlockKey(key))
            checksums.append(checksum_of(address, [data.data]))
        self._halt("sealing", order.halt)
        seal = Seal(order.session, order.keys, order.slots, order.generations, b"".join(checksums))
        if self._link is None or not self._link.send(seal):
            raise _Cannot("the node does not read")
        return Written()

    def _read(self, order: Read) -> Copied:
        arena, size = self._memory()
        assert self._link is not None
        page = self._link.generations
        assert page is not None
        slots = slots_array(order.slots)
        begins = [slot * PAGE_BYTES for slot in slots.tolist()]
        half = len(begins) // 2
        copies = [arena[begin : begin + size].copy() for begin in begins[:half]]
        self._halt("copying", order.halt)
        copies += [arena[begin : begin + size].copy() for begin in begins[half:]]
        valid = page.generations(slots) == generations_array(order.generations)
        digests = [xxhash.xxh3_128_digest(copy.data) for copy in copies]
        assert all(len(digest) == CHECKSUM_BYTES for digest in digests)
        return Copied(valid.astype(np.uint8).tobytes(), b"".join(digests))

    def _halt(self, place: Halt, wanted: Halt) -> None:
        if place != wanted:
            return
        self._orders.send(_encoder.encode(Halted()))
        order = self._order()
        if order is None:
            raise SystemExit  # nobody gives orders any more
        assert isinstance(order, Go), order


def nursery(door: socket.socket) -> None:
    """Fork an actor for every socket that comes through `door`, and answer with its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(door, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() == parent:
                door.close()
                with socket.socket(fileno=descriptors[0]) as orders:
                    Actor(orders).run()
            os._exit(0)
        os.close(descriptors[0])
        door.send(pid.to_bytes(4, "little"))


def main(arguments: Sequence[str]) -> None:
    """Command line without the program's name: the descriptor of the nursery's door."""
    with socket.socket(fileno=int(arguments[0])) as door:
        nursery(door)


if __name__ == "__main__":
    main(sys.argv[1:])
