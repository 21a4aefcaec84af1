"""What the tests of the file tier share: an arena, blocks of known content, a driver that waits."""

from __future__ import annotations

import itertools
import mmap
import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.ports import FileStore
from kvstore.tier_events import (
    FileKnown,
    FileMoved,
    FileRead,
    FileReclaim,
    FileTierEvent,
    FileWritten,
    ReadFile,
    ReclaimFile,
    RecoveryDone,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.disk import Disk
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES, Shard
from kvstore.units import KIB, MIB
from kvstore.wire.record import Scope
from tests.kit import reference
from tests.kit.set_clock import SetClock

BLOCK_BYTES = 64 * KIB
SEGMENT_BYTES = 512 * KIB
"""Holds seven blocks of BLOCK_BYTES."""
SCOPE = Scope("t", b"s" * 32, Shard(0, 4, 0, 2), BLOCK_BYTES)
ARENA_SLOTS = 64
PATIENCE_S = 60.0
E = TypeVar("E")


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def payload(number: int, length: int = BLOCK_BYTES) -> bytes:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, length, np.uint8).tobytes()


def checksum(scope: Scope, name: bytes, data: bytes) -> bytes:
    return reference.checksum(scope.prefix() + name, data)


def u64(packed: bytes) -> list[int]:
    return list(np.frombuffer(packed, np.uint64).tolist())


class FaultyDisk(Disk):
    """The real disk, with calls that fail or hang when told to.

    `fail[name]` is asked before each call; an error it returns is raised. A call named in `hang`
    waits for `release`.
    """

    def __init__(self) -> None:
        self.fail: dict[str, Callable[[int], OSError | None]] = {}
        self.hang: set[str] = set()
        self.hanging = threading.Semaphore(0)
        self.release = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def _before(self, name: str, offset: int) -> None:
        self.calls.append((name, offset))
        if name in self.hang:
            self.hanging.release()
            assert self.release.wait(PATIENCE_S)
        if name in self.fail and (error := self.fail[name](offset)) is not None:
            raise error

    def go_on(self) -> None:
        """Nothing hangs any more."""
        self.hang.clear()
        self.release.set()

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self._before("open", 0)
        return super().open(name, flags, dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("preadv", offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("pwritev", offset)
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self._before("fsync", 0)
        super().fsync(fd)


def failing(code: int, *, first: int = 1, times: int = 1 << 30) -> Callable[[int], OSError | None]:
    """From the call of this number on so many fail, then no more."""
    calls = itertools.count(1)

    def fail(_offset: int) -> OSError | None:
        is_one = first <= next(calls) < first + times
        return OSError(code, os.strerror(code)) if is_one else None

    return fail


class OpenFails(FaultyDisk):
    """One name cannot be opened."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__()
        self.name, self.code = name, code

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        if name == self.name:
            raise OSError(self.code, os.strerror(self.code))
        return super().open(name, flags, dir_fd)


OPENED: list[Driver] = []
"""Of this test; closed at its end (conftest.py)."""


class StoreDriver:
    """A store with an arena, driven the way a node does it: by its eventfd."""

    tier: FileStore

    def __init__(self) -> None:
        """`tier` is still to be set."""
        self.arena: NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(-1, ARENA_SLOTS * BLOCK_BYTES), np.uint8
        )
        self.known: dict[tuple[Scope, bytes], int] = {}
        self.checksums: dict[int, bytes] = {}
        self.seen: list[FileTierEvent] = []
        self.on_reclaim: Callable[[FileReclaim], None] | None = None
        """Answers for the engine, if a test wants it at once."""
        self._job = 0

    def slot(self, index: int) -> NDArray[np.uint8]:
        return self.arena[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    def take(self) -> list[FileTierEvent]:
        taken: list[FileTierEvent] = []
        while events := list(self.tier.take_events()):
            for event in events:
                self._note(event)
            self.seen += events
            taken += events
        return taken

    def void(self, tenant: str | None, space: bytes | None) -> None:
        self.tier.submit(VoidFile(tenant, space))

    def reclaim(self, segment: int, keep: Sequence[int]) -> None:
        self.tier.submit(ReclaimFile(segment, np.array(keep, np.uint64).tobytes()))

    def _note(self, event: FileTierEvent) -> None:
        if isinstance(event, FileReclaim) and self.on_reclaim is not None:
            self.on_reclaim(event)
        if isinstance(event, FileKnown | FileMoved):
            places = event.new_locations if isinstance(event, FileMoved) else event.locations
            for index, place in enumerate(u64(places)):
                name = (event.scope, event.keys[index * 32 : (index + 1) * 32])
                self.known[name] = max(place, self.known.get(name, 0))
                if isinstance(event, FileKnown):
                    self.checksums[place] = event.checksums[index * 16 : (index + 1) * 16]

    def wait(self, kind: type[E], condition: Callable[[E], bool] = lambda _: True) -> E:
        """The first event of a kind that comes, or came."""
        poll = select.poll()
        poll.register(self.tier.fileno(), select.POLLIN)
        begin = 0
        while True:
            for event in self.seen[begin:]:
                if isinstance(event, kind) and condition(event):
                    return event
            begin = len(self.seen)
            if not self.take():
                assert poll.poll(PATIENCE_S * 1000), f"no {kind.__name__}: {self.seen[-5:]}"

    def recovered(self) -> Self:
        self.wait(RecoveryDone)
        return self

    def start_write(
        self, numbers: Sequence[int], scope: Scope = SCOPE, *, first_slot: int = 0
    ) -> int:
        """Begin to store blocks of known content; slots from the first one on are theirs."""
        self._job += 1
        sums = []
        for index, number in enumerate(numbers, start=first_slot):
            data = payload(number, scope.block_bytes)
            self.slot(index)[: len(data)] = np.frombuffer(data, np.uint8)
            sums.append(checksum(scope, key(number), data))
        slots = np.arange(len(numbers), dtype=np.uint32) + np.uint32(first_slot)
        slots *= np.uint32(BLOCK_BYTES // PAGE_BYTES)
        keys = b"".join(map(key, numbers))
        accepted = self.tier.submit(WriteFile(self._job, scope, keys, slots, b"".join(sums)))
        return self._job if accepted else 0

    def write(self, numbers: Sequence[int], scope: Scope = SCOPE) -> list[int]:
        """Store blocks of known content and wait. Returns their locations."""
        job = self.start_write(numbers, scope)
        if not job:
            return [0] * len(numbers)
        places = u64(self.wait(FileWritten, lambda e: e.job == job).locations)
        for number, place in zip(numbers, places, strict=True):
            if place:
                self.known[scope, key(number)] = place
        return places

    def start_read(
        self,
        numbers: Sequence[int],
        scope: Scope = SCOPE,
        *,
        places: Sequence[int] | None = None,
        sums: bytes = b"",
    ) -> int:
        self._job += 1
        self.arena[:] = 0xEE
        where = [self.known[scope, key(n)] for n in numbers] if places is None else list(places)
        slots = np.arange(len(numbers), dtype=np.uint32) * (BLOCK_BYTES // PAGE_BYTES)
        keys = b"".join(map(key, numbers))
        locations = np.array(where, np.uint64).tobytes()
        accepted = self.tier.submit(ReadFile(self._job, scope, keys, slots, sums, locations))
        return self._job if accepted else 0

    def read(self, numbers: Sequence[int], scope: Scope = SCOPE, **more: Any) -> list[bool]:
        """Read blocks and check that each that is called good is what was stored."""
        job = self.start_read(numbers, scope, **more)
        if not job:
            return [False] * len(numbers)
        good = [bool(b) for b in self.wait(FileRead, lambda e: e.job == job).good]
        for index, (number, is_good) in enumerate(zip(numbers, good, strict=True)):
            data = payload(number, scope.block_bytes)
            if is_good:
                assert self.slot(index)[: len(data)].tobytes() == data, "a wrong byte"
        return good

    def has(self, number: int, scope: Scope = SCOPE) -> bool:
        return (scope, key(number)) in self.known and self.read([number], scope) == [True]

    def close(self) -> None:
        self.tier.close()
        self.take()


class Driver(StoreDriver):
    """A file tier."""

    tier: FileTier

    def __init__(
        self,
        directory: Path,
        *,
        disk: Disk | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: of the tier, and `look` (`FileTier`)."""
        super().__init__()
        look = settings.pop("look", None)
        values = {"capacity_bytes": 8 * MIB, "segment_bytes": SEGMENT_BYTES, **settings}
        self.config = FileConfig(directory, **values)
        self.clock, self.disk = SetClock(), disk
        self.tier = FileTier(self.config, self.arena, self.clock, disk=disk, look=look).start()
        OPENED.append(self)

    def look(self) -> list[FileTierEvent]:
        """At what other nodes have; what is told then."""
        self.tier.look_at_peers()
        return self.take()


def reopen(driver: Driver, **more: Any) -> Driver:
    """Close in order and open again, with all found."""
    driver.close()
    return Driver(driver.config.directory, **more).recovered()
