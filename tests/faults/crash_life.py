"""Short lives of a real file tier, recorded: every write, sync and unlink, and what was promised.

The tier is the real one, on real files; its threads take turns (`sim_threads`), so that a life is
the same each time, and ids are counted instead of drawn. A life is a word of at most three letters:

    S  store one block             R  end in order, begin again
    T  store three in one batch    K  die, begin again
    O  store one of another tenant V  clear all
    A  store the first again       W  clear the other tenant
    F  store eight: old segments are reclaimed, of each the first block is kept

Does not cover: what a crash leaves of it (`crash_images`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from kvstore.tier_events import (
    FileMoved,
    FileReclaim,
    FileWritten,
    ReclaimFile,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file import config, parts, tier
from kvstore.tiers.file.catalog import FIXED_BYTES
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.directory import segment_number
from kvstore.tiers.file.disk import Disk
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.record import Scope
from tests.kit.set_clock import SetClock
from tests.sim.world.threads import Threads
from tests.unit.tiers.file.kit import checksum, key, payload, u64

LETTERS: Final = "STOAVWRKF"
SEGMENT_PAGES: Final = 10
"""Two blocks of OURS, or three of OTHERS, with header and footer."""
CAPACITY_BYTES: Final = FIXED_BYTES + 6 * SEGMENT_PAGES * PAGE_BYTES
OURS: Final = Scope("t", b"s" * 32, Shard(0, 4, 0, 2), 5_000)
OTHERS: Final = Scope("other", b"o" * 32, Shard(0, 1, 0, 1), 300)
SLOT_PAGES: Final = 2

Address = tuple[Scope, int]
"""A block: the number says its key and its bytes."""


class Write(NamedTuple):
    """These bytes went to a segment, not synced yet."""

    number: int
    offset: int
    data: bytes


class Sync(NamedTuple):
    """A segment and its name were made durable; number 0: the directory, all unlinks so far."""

    number: int


class Unlink(NamedTuple):
    """A segment was deleted; durable not before later ones, nor for certain."""

    number: int


class Asked(NamedTuple):
    """From here on these may be found: they are being stored."""

    addresses: frozenset[Address]


class Stored(NamedTuple):
    """The tier said that these are written, or moved: address → place."""

    places: dict[Address, int]


class Dropped(NamedTuple):
    """From here on nobody is owed these: they are being cleared, or reclaimed."""

    addresses: frozenset[Address]


class Cleared(NamedTuple):
    """From here on nobody may find these: their clear was said to be durable."""

    addresses: frozenset[Address]


class Died(NamedTuple):
    """The process was killed: what it had not synced nobody will."""


Step = Write | Sync | Unlink | Asked | Stored | Dropped | Cleared | Died


class RecordingDisk(Disk):
    """The real disk, but that it never syncs: what is lost is decided later, by the record."""

    def __init__(self, directory: Path) -> None:
        self.steps: list[Step] = []
        self._directory = directory
        self._there: set[int] = set()
        self._opened: dict[int, str] = {}

    def look(self) -> None:
        """Note which segments have been deleted since the last look."""
        names = os.listdir(self._directory) if self._directory.exists() else []
        there = {number for name in names if (number := segment_number(name)) is not None}
        self.steps += [Unlink(number) for number in sorted(self._there - there)]
        self._there = there

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self.look()
        fd = super().open(name, flags, dir_fd)
        self._opened[fd] = _path(fd)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._note(fd, lambda number: Write(number, offset, b"".join(buffers)))
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self._note(fd, Sync)

    def _note(self, fd: int, step: Callable[[int], Step]) -> None:
        self.look()
        path = Path(_path(fd))
        number = 0 if path == self._directory else segment_number(path.name)
        if number is not None:
            self.steps.append(step(number))

    def close_all(self) -> None:
        """Close what a dead process left open."""
        for fd, path in self._opened.items():
            with contextlib.suppress(OSError):
                if _path(fd) == path:
                    os.close(fd)
        self._opened.clear()


class Life:
    """One directory and the tiers that own it one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = RecordingDisk(directory)
        self._arena: NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(-1, 8 * SLOT_PAGES * PAGE_BYTES), np.uint8
        )
        self._ids = itertools.count()
        self._jobs = itertools.count(1)
        self._numbers = itertools.count()
        self._places: dict[Address, int] = {}
        """What an engine would believe."""
        self._first: int | None = None
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch("secrets.token_bytes", self._token))
        self._patches.enter_context(mock.patch.object(config, "CAPACITY_BYTES_MIN", 0))
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._patches.close()

    @property
    def steps(self) -> list[Step]:
        return self.disk.steps

    @property
    def store_id(self) -> bytes:
        return self._tier._directory.store_id

    def live(self, letter: str) -> None:
        """One operation, to its end."""
        match letter:
            case "S":
                self._store(OURS, 1)
            case "T":
                self._store(OURS, 3)
            case "O":
                self._store(OTHERS, 1)
            case "A":
                self._store(OURS, 1, again=True)
            case "V":
                self._clear(None)
            case "W":
                self._clear(OTHERS.tenant)
            case "R":
                self._tier.close()
                self._open()
            case "K":
                self._kill()
                self.steps.append(Died())
                self._open()
            case _:
                for _ in range(4):
                    self._store(OURS, 2)
        self.disk.look()

    def _open(self) -> None:
        self._threads = Threads(random.Random(0), lambda: self._clock.ns, lambda: None)
        self._clock = SetClock()
        settings = FileConfig(
            self.directory,
            capacity_bytes=CAPACITY_BYTES,
            segment_bytes=SEGMENT_PAGES * PAGE_BYTES,
            direct=False,
            reader_count=1,
        )
        with (
            mock.patch.object(tier, "threading", self._threads),
            mock.patch.object(parts, "threading", self._threads),
        ):
            self._tier = FileTier(settings, self._arena, self._clock, disk=self.disk)
        self._threads.start()
        self._settle()

    def _token(self, length: int) -> bytes:
        return hashlib.sha256(str(next(self._ids)).encode()).digest()[:length]

    def _kill(self) -> None:
        self._threads.kill()
        self._tier.close()
        self.disk.close_all()

    def _settle(self) -> None:
        """Until nobody has anything to do."""
        while self._threads.run_one():
            while events := list(self._tier.take_events()):
                for event in events:
                    self._hear(event)

    def _hear(self, event: object) -> None:
        match event:
            case FileReclaim(segment=segment, parts=parts):
                held = [
                    ((its.scope, _number(its.keys, row)), place)
                    for its in parts
                    for row, place in enumerate(u64(its.locations))
                    if self._places.get((its.scope, _number(its.keys, row))) == place
                ]
                gone = frozenset(address for address, _ in held[1:])
                self._drop(gone)
                keep = np.array([place for _, place in held[:1]], np.uint64)
                self._tier.submit(ReclaimFile(segment, keep.tobytes()))
            case FileMoved(scope=scope, keys=keys, new_locations=locations):
                moved = {(scope, _number(keys, row)): p for row, p in enumerate(u64(locations))}
                self._said(moved)
            case _:
                pass

    def _store(self, scope: Scope, count: int, *, again: bool = False) -> None:
        if again and self._first is not None:
            numbers = [self._first]
        else:
            numbers = list(itertools.islice(self._numbers, count))
            self._first = numbers[0] if self._first is None and scope is OURS else self._first
        sums = []
        for index, number in enumerate(numbers):
            data = payload(number, scope.block_bytes)
            begin = index * SLOT_PAGES * PAGE_BYTES
            self._arena[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
            sums.append(checksum(scope, key(number), data))
        slots = np.arange(len(numbers), dtype=np.uint32) * SLOT_PAGES
        job = next(self._jobs)
        keys = b"".join(map(key, numbers))
        self.steps.append(Asked(frozenset((scope, number) for number in numbers)))
        assert self._tier.submit(WriteFile(job, scope, keys, slots, b"".join(sums)))
        places: list[int] = []
        while not places:
            assert self._threads.run_one(), "the write never ends"
            for event in self._tier.take_events():
                self._hear(event)
                if isinstance(event, FileWritten) and event.job == job:
                    places = u64(event.locations)
        self._said({(scope, n): p for n, p in zip(numbers, places, strict=True) if p})
        self._settle()

    def _clear(self, tenant: str | None) -> None:
        gone = frozenset(a for a in self._places if tenant in (None, a[0].tenant))
        self._drop(gone)
        self._tier.submit(VoidFile(tenant, None))
        self._settle()
        assert self._tier._log.writer.voids_are_durable
        self.steps.append(Cleared(gone))

    def _said(self, places: dict[Address, int]) -> None:
        self.disk.look()
        self._places.update(places)
        self.steps.append(Stored(places))

    def _drop(self, addresses: frozenset[Address]) -> None:
        self.steps.append(Dropped(addresses))
        for address in addresses:
            del self._places[address]


def words(length: int) -> Iterator[str]:
    """All words of that length."""
    return map("".join, itertools.product(LETTERS, repeat=length))


def _number(keys: bytes, row: int) -> int:
    return int.from_bytes(keys[row * 32 : row * 32 + 4], "big")


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
