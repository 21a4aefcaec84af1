"""Making room: what the oldest segment holds, and moving what the engine keeps of it.

Runs on the writer's thread. Kept records are read, verified, and appended like new ones, newer than
everything before; then the segment is deleted. Which ones are kept the engine decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.tier_events import FileEvent, FileGone, FileKnown, FileMoved, FileReclaim
from kvstore.tiers.file.reader import (
    PAGE_MASK,
    RUN_BYTES_MAX,
    RUN_RECORDS_MAX,
    Reader,
    ReadVerdict,
    WantedBlock,
)
from kvstore.tiers.file.segments.catalog import Catalog, Segment
from kvstore.tiers.file.segments.directory import Directory
from kvstore.tiers.file.segments.disk import Disk, Pages
from kvstore.tiers.file.segments.recovery import SegmentFile, record_sets
from kvstore.tiers.file.writer import RecordBatch, Writer
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import Void, payload_pages
from kvstore.wire.segment import Table


class Reclaimer:
    """Reclaims one segment at a time: asks which records to keep, then moves them."""

    def __init__(self, directory: Directory, catalog: Catalog, disk: Disk, writer: Writer) -> None:
        self._directory = directory
        self._catalog = catalog
        self._disk = disk
        self._writer = writer
        self._asked: dict[int, tuple[FileKnown, ...]] = {}

    def ask(self, segment: Segment, voids: Sequence[Void]) -> FileReclaim:
        """The question to the engine which of the segment's records to keep. A segment that cannot
        be read, though the disk can be, counts as empty.

        Raises:
            OSError: the disk cannot be read now, so nothing is known of the segment.
        """
        if (table := self._table(segment) or self._table(segment)) is None:  # it may just be back
            return FileReclaim(segment.number, ())
        number = segment.number
        parts = tuple(record_sets(table, number, own_number=number, voids=voids))
        self._asked = {number: parts}
        return FileReclaim(number, parts)

    def _table(self, segment: Segment) -> Table | None:
        """Table of the segment; None: it cannot be read, though the disk can be."""
        try:
            with self._catalog.reading(segment) as fd:
                file = SegmentFile(self._disk, fd, segment.head, segment.taken_bytes)
                return file.contents().table
        except OSError:
            if not self._directory.is_readable():
                raise
            return None

    def move(self, segment: Segment, keep: bytes) -> tuple[list[FileEvent], OSError | None]:
        """Copy records of `keep` to the end of the log. Returns the events to report, and the
        writer's first error, if there was one."""
        events: list[FileEvent] = []
        errors: list[OSError] = []
        for records in self._asked.pop(segment.number, ()):
            places = np.frombuffer(records.locations, np.uint64)
            rows = np.flatnonzero(np.isin(places, np.frombuffer(keep, np.uint64)))
            for chunk in self._chunks(records, rows):
                events += self._move_chunk(segment, records, chunk, errors)
        return events, next(iter(errors), None)

    def _chunks(self, records: FileKnown, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        pages = payload_pages(records.scope.block_bytes)
        step = max(1, min(RUN_RECORDS_MAX, RUN_BYTES_MAX // (pages * PAGE_BYTES)))
        for begin in range(0, len(rows), step):
            yield rows[begin : begin + step]

    def _move_chunk(
        self, segment: Segment, records: FileKnown, rows: NDArray[np.int64], errors: list[OSError]
    ) -> list[FileEvent]:
        scope = records.scope
        pages = payload_pages(scope.block_bytes)
        scratch = Pages(len(rows) * pages * PAGE_BYTES)
        reader = Reader(self._catalog, self._disk, scratch.view, direct=self._directory.direct)
        places = np.frombuffer(records.locations, np.uint64)[rows]
        keys, sums = np.frombuffer(records.keys, "V32"), np.frombuffer(records.checksums, "V16")
        keys, sums = keys[rows], sums[rows]
        good = []
        for row, place in enumerate(places.tolist()):
            page, slot = place & PAGE_MASK, row * pages
            wanted = WantedBlock(page, slot, keys[row].tobytes(), sums[row].tobytes())
            if reader.read(segment.number, scope, [wanted]).verdicts == [ReadVerdict.GOOD]:
                good.append(row)
        slots = np.array(good, np.uint32) * np.uint32(pages)
        of_good = keys[good].tobytes(), sums[good].tobytes()
        batch = RecordBatch(scope, *of_good, scratch.view, slots)
        outcome = self._writer.append(batch, spare=True)
        errors += [outcome.error] if outcome.error is not None else []
        done = good[: len(outcome.places)]
        events: list[FileEvent] = []
        if done:
            new = np.array(outcome.places, np.uint64).tobytes()
            events.append(FileMoved(scope, keys[done].tobytes(), places[done].tobytes(), new))
        if len(lost := np.delete(np.arange(len(rows)), done)):
            events.append(FileGone(scope, keys[lost].tobytes(), places[lost].tobytes()))
        return events + outcome.lost
