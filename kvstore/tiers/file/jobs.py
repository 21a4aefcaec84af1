"""Reads and writes that wait or run: their state, how reads split into runs, when they are late.

Not thread safe: `FileTier` holds its lock around everything here.

A read is split into runs, which threads take one by one, and ends when every run has ended or was
taken back before it began; its deadline takes back the runs that have not begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.tier_events import ReadFile
from kvstore.tiers.file.reader import RUN_BYTES_MAX, RUN_RECORDS_MAX, WantedBlock
from kvstore.tiers.file.writer import RecordBatch
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES
from kvstore.wire.record import Void, record_pages
from kvstore.wire.segment import PAGE_SHIFT

_PAGE_MASK: Final = (1 << PAGE_SHIFT) - 1


@dataclass(slots=True, eq=False)
class ReadJob:
    """A ReadFile that waits or runs. `good`: a byte per block, 1 once it was read and is intact."""

    order: ReadFile
    deadline_ns: int
    taken_bytes: int
    good: bytearray
    runs_left: int = 0
    late: bool = False


@dataclass(slots=True, eq=False)
class RecordRun:
    """Records of one read that lie side by side in segment `number`. `indices`: of these blocks in
    the job's order."""

    job: ReadJob
    number: int
    indices: list[int]
    wanted: list[WantedBlock]


@dataclass(slots=True, eq=False)
class WriteJob:
    """A WriteFile that waits or runs. `places`: locations of its leading blocks, those written so
    far."""

    job: int
    batch: RecordBatch
    deadline_ns: int
    taken_bytes: int
    places: list[int] = field(default_factory=list)
    running: bool = False
    late: bool = False


@dataclass(slots=True, eq=False)
class CarryJob:
    """Recovery is over, and found these voids, which new segments have to repeat."""

    voids: tuple[Void, ...]


def split(job: ReadJob) -> Iterator[RecordRun]:
    """Runs of neighbours, in the order in which they lie on disk."""
    order = job.order
    pages, locations = record_pages(order.scope), np.frombuffer(order.locations, np.uint64)
    run_max = max(1, min(RUN_RECORDS_MAX, RUN_BYTES_MAX // (pages * PAGE_BYTES)))
    run: RecordRun | None = None
    expected = -1
    for index in np.argsort(locations, kind="stable").tolist():
        location = int(locations[index])
        wanted = WantedBlock(
            location & _PAGE_MASK,
            int(order.slots[index]),
            order.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES],
            order.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] or None,
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
