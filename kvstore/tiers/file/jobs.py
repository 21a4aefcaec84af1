"""Reads and writes that wait or run: their state, how reads split into runs, when they are late.

Not thread safe: `FileTier` holds its lock around everything here.

A read is split into runs, which threads take one by one. It ends when every run has ended or was
taken back before it began; its deadline takes back what has not begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.file.reader import RUN_BYTES_MAX, RUN_RECORDS_MAX, WantedBlock
from kvstore.tiers.file.writer import RecordBatch
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES
from kvstore.wire.record import Scope, Void, record_pages
from kvstore.wire.segment import PAGE_SHIFT

_PAGE_MASK: Final = (1 << PAGE_SHIFT) - 1


def u32(values: Any) -> NDArray[np.uint32]:
    """Slots as an array, from packed bytes, an array, or any sequence of numbers."""
    if isinstance(values, bytes | bytearray | memoryview):
        return np.frombuffer(values, np.uint32)
    return np.asarray(values, np.uint32)


def u64(values: Any) -> NDArray[np.uint64]:
    """Locations as an array, from packed bytes, an array, or any sequence of numbers."""
    if isinstance(values, bytes | bytearray | memoryview):
        return np.frombuffer(values, np.uint64)
    return np.asarray(values, np.uint64)


@dataclass(slots=True, eq=False)
class ReadJob:
    """`good` has a byte per block."""

    job: int
    scope: Scope
    keys: bytes
    locations: NDArray[np.uint64]
    deadline_ns: int
    taken_bytes: int
    good: bytearray
    runs_left: int = 0
    late: bool = False


@dataclass(slots=True, eq=False)
class RecordRun:
    """Neighbours of one read. `indices` are those of the job's blocks."""

    job: ReadJob
    number: int
    indices: list[int]
    wanted: list[WantedBlock]


@dataclass(slots=True, eq=False)
class WriteJob:
    """`places` grows as runs are written."""

    job: int
    batch: RecordBatch
    deadline_ns: int
    taken_bytes: int
    places: list[int] = field(default_factory=list)
    running: bool = False
    late: bool = False


@dataclass(slots=True, eq=False)
class VoidJob:
    """A clear, in its turn among the writes."""

    tenant: str | None
    space: bytes | None


@dataclass(slots=True, eq=False)
class CarryJob:
    """Recovery is over; these voids were found."""

    voids: tuple[Void, ...]


@dataclass(slots=True, eq=False)
class NoteJob:
    """Keep the node's note."""

    note: bytes


@dataclass(slots=True, eq=False)
class ReclaimJob:
    """The engine's answer: locations to keep."""

    segment: int
    keep: NDArray[np.uint64]


def split(job: ReadJob, slots: NDArray[np.uint32], checksums: bytes) -> Iterator[RecordRun]:
    """Runs of neighbours, in the order in which they lie on disk."""
    pages = record_pages(job.scope)
    run_max = max(1, min(RUN_RECORDS_MAX, RUN_BYTES_MAX // (pages * PAGE_BYTES)))
    run: RecordRun | None = None
    expected = -1
    for index in np.argsort(job.locations, kind="stable").tolist():
        location = int(job.locations[index])
        wanted = WantedBlock(
            location & _PAGE_MASK,
            int(slots[index]),
            job.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES],
            checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] or None,
        )
        if run is not None and location == expected and len(run.indices) < run_max:
            run.indices.append(index)
            run.wanted.append(wanted)
        else:
            if run is not None:
                yield run
            run = RecordRun(job, location >> PAGE_SHIFT, [index], [wanted])
        expected = location + pages
    if run is not None:
        yield run
