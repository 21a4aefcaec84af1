"""What a crash may leave of a recorded life: images of a directory, and what each still owes.

    cut        the process dies in a write: the sectors of 512 bytes before this one are there
    lost       the machine dies: of pages that were not synced any may read as zeros or lie behind
               the file's end, and deletions that were not synced may be undone, last ones first
    flipped    a bit of some page changed while nobody looked

Owed: after a cut all that the tier had called written and nobody cleared or reclaimed; after a loss
what of that was synced, which is what lies in closed segments or before a clear; after a flip what
lies in other segments. Never found: what a clear that was called durable covers.

Names follow the files: a synced segment has its name, deletions become durable in their order (as
on ext4 and XFS).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.types import PAGE_BYTES
from kvstore.wire.record import record_pages
from kvstore.wire.segment import PAGE_SHIFT
from tests.faults.crash_life import (
    Address,
    Asked,
    Cleared,
    Died,
    Dropped,
    Step,
    Stored,
    Sync,
    Unlink,
    Write,
)

SECTOR_BYTES: Final = 512
SUBSETS_ALL_MAX: Final = 5
"""So many unsynced pages are lost in every combination, more in a sample of them."""
SUBSETS_SAMPLED: Final = 24
FLIPS_PER_PAGE: Final = 14
_NOBODY: Final[frozenset[Address]] = frozenset()


class Image(NamedTuple):
    """Segments by number; blocks that must be found in them, and blocks that must not."""

    files: dict[int, bytes]
    owed: frozenset[Address]
    never: frozenset[Address]


class Model:
    """A disk while steps are taken. Contents are never changed in place."""

    def __init__(self) -> None:
        self._files: dict[int, bytes] = {}
        self._durable: dict[int, bytes] = {}
        self._unsynced: dict[int, set[int]] = {}
        """Pages, by segment."""
        self._abandoned: set[int] = set()
        """Segments whose process was killed."""
        self._unlinked: list[tuple[int, bytes]] = []
        self._places: dict[Address, set[int]] = {}
        self._owed: frozenset[Address] = _NOBODY
        self._never: frozenset[Address] = _NOBODY

    def take(self, step: Step) -> None:
        """One step more."""
        match step:
            case Write(number=number, offset=offset, data=data):
                if number not in self._files:
                    left = self._unsynced.keys() - self._abandoned
                    assert not left, f"segments {left} were left behind without a sync"
                self._files[number] = _written(self._files.get(number, b""), offset, data)
                pages = range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES))
                self._unsynced.setdefault(number, set()).update(pages)
            case Sync(number=0):
                self._unlinked.clear()
            case Sync(number=number):
                self._durable[number] = self._files.get(number, b"")
                self._unsynced.pop(number, None)
            case Unlink(number=number):
                self._unlinked.append((number, self._files.pop(number, b"")))
                self._durable.pop(number, None)
                self._unsynced.pop(number, None)
            case Stored(places=places):
                for address, place in places.items():
                    self._places.setdefault(address, set()).add(place)
                self._owed |= frozenset(places)
            case Asked(addresses=addresses):
                self._never -= addresses
            case Dropped(addresses=addresses):
                self._owed -= addresses
                for address in addresses:
                    del self._places[address]
            case Cleared(addresses=addresses):
                self._never |= addresses
            case Died():
                self._abandoned.update(self._unsynced)

    def whole(self) -> Image:
        """The process dies between two steps."""
        return Image(dict(self._files), self._owed_in(self._files), self._never)

    def cuts(self, write: Write) -> Iterator[Image]:
        """The process dies in this write."""
        owed = self._owed_in(self._files)
        before = self._files.get(write.number, b"")
        for length in range(SECTOR_BYTES, len(write.data), SECTOR_BYTES):
            cut = _written(before, write.offset, write.data[:length])
            yield Image(self._files | {write.number: cut}, owed, self._never)

    def losses(self, source: random.Random) -> Iterator[Image]:
        """The machine dies."""
        owed = self._owed_in(self._durable)
        unsynced = [(n, page) for n in sorted(self._unsynced) for page in sorted(self._unsynced[n])]
        for kept in _subsets(unsynced, source):
            files = dict(self._durable)
            for number, page in kept:
                part = self._files[number][page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
                files[number] = _written(files.get(number, b""), page * PAGE_BYTES, part)
            yield Image(files, owed, self._never)
            full = {
                number: data + bytes(len(self._files[number]) - len(data))
                for number, data in files.items()
            }
            if full != files:
                yield Image(full, owed, self._never)
        for count in range(1, len(self._unlinked) + 1):
            undone = dict(self._unlinked[-count:])
            yield Image(self._files | undone, owed, self._never)
            yield Image(self._durable | undone, owed, self._never)

    def flips(self, source: random.Random) -> Iterator[Image]:
        """Bits that changed."""
        for number, data in self._files.items():
            others = {n: its for n, its in self._files.items() if n != number}
            owed = self._owed_in(others)
            for page in range(0, len(data), PAGE_BYTES):
                for _ in range(FLIPS_PER_PAGE):
                    at = page + source.randrange(min(PAGE_BYTES, len(data) - page))
                    flipped = bytes([data[at] ^ 1 << source.randrange(8)])
                    yield Image(others | {number: _written(data, at, flipped)}, owed, _NOBODY)

    def _owed_in(self, files: dict[int, bytes]) -> frozenset[Address]:
        """Of what is owed, that of which these files hold a whole record."""

        def holds(address: Address, place: int) -> bool:
            number, page = place >> PAGE_SHIFT, place & ((1 << PAGE_SHIFT) - 1)
            end = (page + record_pages(address[0])) * PAGE_BYTES
            return len(files.get(number, b"")) >= end

        return frozenset(
            address
            for address in self._owed
            if any(holds(address, place) for place in self._places[address])
        )


def images(model: Model, steps: Sequence[Step], source: random.Random) -> Iterator[Image]:
    """Every image that a crash within these steps is tried with; the model takes them."""
    for step in steps:
        if isinstance(step, Write):
            yield from model.cuts(step)
        model.take(step)
        yield model.whole()
        if isinstance(step, Write | Sync | Unlink):
            yield from model.losses(source)
    yield from model.flips(source)


def _written(data: bytes, offset: int, new: bytes) -> bytes:
    hole = bytes(max(0, offset - len(data)))
    return b"".join((data[:offset], hole, new, data[offset + len(new) :]))


def _subsets(
    pages: list[tuple[int, int]], source: random.Random
) -> Iterator[Sequence[tuple[int, int]]]:
    """Which of these pages reached the disk."""
    if len(pages) <= SUBSETS_ALL_MAX:
        for count in range(len(pages) + 1):
            yield from itertools.combinations(pages, count)
        return
    yield ()
    for page in pages:
        yield [page]
        yield [other for other in pages if other != page]
    for _ in range(SUBSETS_SAMPLED):
        share = source.random()
        yield [page for page in pages if source.random() < share]
