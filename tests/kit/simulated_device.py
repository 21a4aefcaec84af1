"""A device without hardware, which does what a device may do at worst: `kernels.port.Device`.

Streams are queues. Whenever it is asked something, it takes a random number of turns (seeded); in a
turn the head of a random queue is done, if what it waits for has happened. So any legal order can
occur, a copy reads its source when it is done and not when it is ordered, and nothing is done that
nobody asks for. Memory of its own cannot be touched by the host but in its turns: a stray access
ends the process. A kernel moves its pieces in any order and in several turns, between which other
streams go on.

What CUDA refuses it refuses, as a DeviceError: a copy whose host side is not pinned or lies in two
registrations (cudaErrorInvalidValue: seen by LMCache, issue 2413, and SGLang, issue 36798), of
which earlier pieces may be done all the same; pages that are registered twice
(cudaErrorHostMemoryAlreadyRegistered); anything after an error that is sticky (`failure`).

Memory that is allocated can be shared: each process has a device of this class with queues of its
own. A handle ends with the process that made it; its bytes last as long as somebody has them open.

Does not cover: time (`virtual_device.py`), graphs, order between processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import os
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.host import PagedCache
from kvstore.kernels.launches import sums_bytes
from kvstore.kernels.port import HANDLE_BYTES, Addresses, DeviceError
from kvstore.types import CHECKSUM_BYTES, PAGE_BYTES
from kvstore.wire.record import PIECE_BYTES

ENGINE_STREAM = 0
"""The engine's, whichever thread asks."""
TURNS_MAX = 3
EAGERNESS = (0.05, 0.3, 1.0)
"""Share of the calls that find that something was done since the last one."""
SEED = 20_261_124
UUID = uuid.UUID("0e5ca1ab-0000-4000-8000-000000000001")
INVALID = "cudaErrorInvalidValue"
TWICE = "cudaErrorHostMemoryAlreadyRegistered"
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_Work = Callable[[], object]


class Kind(enum.Enum):
    """What does some work."""

    LOAD = "the copy engine to the device"
    STORE = "the copy engine from it"
    MOVE = "a kernel that moves bytes"
    DIGEST = "kernels that hash"
    FORWARD = "the engine's"


class Cost(NamedTuple):
    """What work takes of a device, for one that has time."""

    kind: Kind
    piece_count: int
    size_bytes: int


class SimulatedDevice:
    """See the module. Any thread may call."""

    def __init__(self, seed: int, memory_bytes: int = 0) -> None:
        """`memory_bytes`: of its own; 0: what it copies lies in memory of the host's, which stands
        for its own."""
        self._random = random.Random(seed)
        self._eagerness = self._random.choice(EAGERNESS)
        self._lock = threading.RLock()
        self._queues: dict[int, deque[_Work | tuple[int, int] | int]] = {ENGINE_STREAM: deque()}
        """Work; or an event and the number of the record of it that is waited for; or an event that
        happens."""
        self._recorded: dict[int, int] = {}
        """How often each event was recorded."""
        self._happened: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._own: dict[int, tuple[mmap.mmap, int]] = {}
        """Memory of its own, by address, with the descriptor of what can be shared, else -1."""
        self._is_apart = memory_bytes > 0
        self.address = 0
        """Where its first memory begins."""
        self.pin_failures: list[str] = []
        """Why the next pins fail."""
        self.copy_failures: dict[int, str] = {}
        """Why later copies fail, by how many succeed before."""
        self.failure = ""
        """Why every call fails from now on; empty: none does."""
        self.no_kernels = ""
        """Why there are none; empty: there are."""
        self.is_closed = False
        self.bus_bytes = 0
        """Bytes copied between its own memory and the host's so far; 0 if it has none."""
        self.allocations_max = 1 << 30
        """How many blocks of its memory there are room for."""
        if memory_bytes:
            self.address = self._add(mmap.mmap(-1, memory_bytes), -1)

    # ── the port ─────────────────────────────────────────────────────────────────────────────────

    def stream(self, *, is_urgent: bool) -> int:
        with self._asked():
            self._queues[len(self._queues)] = deque()
            return len(self._queues) - 1

    def event(self) -> int:
        with self._asked():
            event = len(self._recorded)
            self._recorded[event] = self._happened[event] = 0
            return event

    def record(self, event: int, stream: int | None) -> None:
        with self._asked():
            self._recorded[event] += 1
            self._queues[ENGINE_STREAM if stream is None else stream].append(event)

    def wait(self, stream: int, event: int) -> None:
        with self._asked():
            self._queues[stream].append((event, self._recorded[event]))

    def has_happened(self, event: int) -> bool:
        with self._asked():
            return self._happened[event] >= self._recorded[event]

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        with self._asked():
            count = len(pieces) if self._is_apart else 0
            refused = next((n for n in range(count) if not self._is_copied(*pieces[n])), -1)
            reason = INVALID if refused >= 0 else self._copy_failure()
            if reason:
                # How many of the others are done is not said.
                done = self._random.randint(0, max(refused, 0))
                self._copy_all(stream, pieces[:done])
                raise DeviceError(reason)
            self._copy_all(stream, pieces)

    def _copy_all(self, stream: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        is_store = any(not self._is_own(target, size) for target, _, size in pieces)
        kind = Kind.STORE if is_store else Kind.LOAD
        cost = Cost(kind, len(pieces), sum(size for _, _, size in pieces))
        self._give(stream, functools.partial(_move_all, pieces), cost)

    def _copy_failure(self) -> str:
        self.copy_failures = {left - 1: why for left, why in self.copy_failures.items()}
        return self.copy_failures.pop(-1, "")

    def _is_copied(self, target: int, source: int, size: int) -> bool:
        """Whether copy engines take it."""
        host = [at for at in (target, source) if not self._is_own(at, size)]
        self.bus_bytes += size * len(host)
        return len(host) < 2 and all(self._is_pinned(at, size) for at in host)

    def kernel_trouble(self) -> str:
        with self._asked():
            return self.no_kernels

    def move(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        with self._asked():
            assert not self.no_kernels
            for target, source, size in pieces if self._is_apart else ():
                assert self._is_own(target, size), "a kernel reaches over the bus"
                assert self._is_own(source, size), "a kernel reaches over the bus"
            self._random.shuffle(pieces)
            turns = self._random.randint(1, TURNS_MAX)
            for turn in range(turns):
                some = pieces[turn::turns]
                cost = Cost(Kind.MOVE, len(some), sum(size for _, _, size in some))
                self._give(stream, functools.partial(_move_all, some), cost)

    def digest(self, stream: int, payloads: Addresses, size: int, *, sums: int, found: int) -> None:
        parts = [
            (address + at, min(PIECE_BYTES, size - at))
            for address in payloads.tolist()
            for at in range(0, size, PIECE_BYTES)
        ]

        def begin() -> None:
            made = (xxhash.xxh3_128_digest(ctypes.string_at(*part)) for part in parts)
            ctypes.memmove(sums, b"".join(made), CHECKSUM_BYTES * len(parts))

        def end() -> None:
            ctypes.memmove(found, sums, CHECKSUM_BYTES * len(parts))

        with self._asked():
            assert not self.no_kernels
            count = len(payloads)
            for at in payloads.tolist():
                assert not at % 16, "not aligned"
                assert not self._is_apart or self._is_own(at, size), "not the device's"
            for at, length in ((sums, sums_bytes(count, size)), (found, 16 * len(parts))):
                assert not self._is_apart or self._is_own(at, length), "not the device's"
            whole = sum(length for _, length in parts)
            self._give(stream, begin, Cost(Kind.DIGEST, len(parts), whole))
            self._give(stream, end, Cost(Kind.MOVE, 1, CHECKSUM_BYTES * len(parts)))

    def clear(self, stream: int, targets: Addresses, sizes: Addresses) -> None:
        pieces = list(zip(targets.tolist(), sizes.tolist(), strict=True))

        def work() -> None:
            for target, size in pieces:
                ctypes.memset(target, 0, size)

        with self._asked():
            whole = sum(size for _, size in pieces)
            self._give(stream, work, Cost(Kind.MOVE, len(pieces), whole))

    def pin(self, address: int, size_bytes: int) -> None:
        with self._asked():
            if self.pin_failures:
                raise DeviceError(self.pin_failures.pop(0))
            pages = _pages(address, size_bytes)
            for begin, size in self._pinned.items():
                others = _pages(begin, size)
                if pages.start < others.stop and others.start < pages.stop:
                    raise DeviceError(TWICE)
            self._pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        with self._asked():
            del self._pinned[address]

    @property
    def name(self) -> str:
        return str(UUID)

    def allocate(self, size_bytes: int) -> int:
        with self._asked():
            if len(self._own) >= self.allocations_max:
                return 0
            fd = os.memfd_create("simulated-device", os.MFD_CLOEXEC)
            os.ftruncate(fd, size_bytes)
            return self._add(mmap.mmap(fd, size_bytes), fd)

    def free(self, address: int) -> None:
        with self._asked():
            others = (queue for stream, queue in self._queues.items() if stream != ENGINE_STREAM)
            assert not any(others), "memory in use goes back"
            memory, fd = self._own.pop(address)
            _set_protection(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE)
            os.close(fd)

    def share(self, address: int) -> bytes:
        fd = self._own[address][1]
        return f"/proc/{os.getpid()}/fd/{fd}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        with self._asked():
            try:
                fd = os.open(handle.rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise DeviceError("invalid handle") from error
            return self._add(mmap.mmap(fd, os.fstat(fd).st_size), fd)

    def leave(self, address: int) -> None:
        self.free(address)

    def close(self) -> None:
        with self._asked():
            assert not any(self._queues[stream] for stream in self._queues if stream), "in use"
            self.is_closed = True

    # ── what a test sees of it ───────────────────────────────────────────────────────────────────

    @property
    def pinned_bytes(self) -> int:
        """Memory of the host's that is pinned."""
        return sum(self._pinned.values())

    @property
    def allocation_count(self) -> int:
        """Blocks of its memory that are allocated, or opened."""
        return len(self._own)

    @property
    def event_count(self) -> int:
        """Events made so far."""
        return len(self._recorded)

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do."""
        return not any(self._queues.values())

    def launch(self, work: Callable[[NDArray[np.uint8]], None]) -> None:
        """Give the engine's stream something to do with the device's memory."""

        def done() -> None:
            work(np.frombuffer(self._own[self.address][0], np.uint8))

        with self._lock:
            self._give(ENGINE_STREAM, done, Cost(Kind.FORWARD, 1, 0))

    def turn(self) -> bool:
        """Do one thing, of a random stream. False: nothing can be done."""
        with self._lock:
            ready = [queue for queue in self._queues.values() if queue and self._may_go(queue[0])]
            if not ready:
                return False
            match self._random.choice(ready).popleft():
                case int() as event:
                    self._happened[event] += 1
                case tuple():
                    pass
                case work:
                    self._do(work)
            return True

    def _give(self, stream: int, work: _Work, cost: Cost) -> None:
        """Put work into the queue of a stream."""
        self._queues[stream].append(work)

    def _do(self, work: _Work) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            work()
        finally:
            self._protect(_PROT_NONE)

    def finish(self) -> None:
        """Do all that is left."""
        while self.turn():
            pass
        assert self.is_idle, "streams wait for one another"

    def _may_go(self, head: Any) -> bool:
        return not isinstance(head, tuple) or self._happened[head[0]] >= head[1]

    def _add(self, memory: mmap.mmap, fd: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._own[address] = memory, fd
        self._protect(_PROT_NONE)
        return address

    def _protect(self, protection: int) -> None:
        for address, (memory, _) in self._own.items():
            _set_protection(address, len(memory), protection)

    def _is_own(self, address: int, size: int) -> bool:
        return any(
            begin <= address and address + size <= begin + len(memory)
            for begin, (memory, _) in self._own.items()
        )

    def _is_pinned(self, address: int, size: int) -> bool:
        """All of it, in one pin."""
        return any(
            begin <= address and address + size <= begin + length
            for begin, length in self._pinned.items()
        )

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """A call: some time has passed since the last one."""
        with self._lock:
            if self.failure:
                raise DeviceError(self.failure)
            self._pass_time()
            yield

    def _pass_time(self) -> None:
        if self._random.random() < self._eagerness:
            for _ in range(self._random.randint(1, TURNS_MAX)):
                self.turn()


def _pages(address: int, size: int) -> range:
    return range(address // PAGE_BYTES, -(-(address + size) // PAGE_BYTES))


def _set_protection(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def _move_all(pieces: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size in pieces:
        ctypes.memmove(target, source, size)


def simulated_copies(
    caches: Sequence[PagedCache],
    *,
    on: SimulatedDevice | None = None,
    by_pieces: bool = False,
) -> DeviceCopies:
    """Copies on a simulated device, whose memory these caches are from now on."""
    device = SimulatedDevice(SEED) if on is None else on
    return DeviceCopies(device, caches, by_pieces=by_pieces)
