"""The end of the log: where blocks are appended, segments closed, voids written, records moved.

One thread calls it. Blocks go to the disk in runs, straight from where they lie:

    one pwritev   │page of block 0│payload 0 …│page of block 1│payload 1 …│

A segment is never appended to after an error or a restart: the next write begins a new one. Every
new segment repeats the voids that still cover something, so deleting the segment that held one
first does not bring back what it covered.

Room: the open segment counts whole. `append` leaves one segment of the capacity free, which only
what a reclaimed segment keeps may use, so that reclaiming always comes to an end.

Does not cover: queues, deadlines and the breaker (`tier.py`), which segment is reclaimed
(`log_thread.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.tier_events import (
    FileEvent,
    FileGone,
    FileKnown,
    FileMoved,
    FileReclaim,
    ReadFile,
    WriteFile,
)
from kvstore.tiers.file.catalog import Catalog, Segment
from kvstore.tiers.file.contents import SegmentFile, record_sets, walk
from kvstore.tiers.file.directory import Directory, segment_name
from kvstore.tiers.file.disk import (
    Disk,
    Pages,
    close_at_last,
    forget_cached,
    open_regular,
    write_all,
)
from kvstore.tiers.file.reader import Reader, ReadVerdict, run_max, split
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB
from kvstore.wire.record import (
    Void,
    payload_pages,
    record_pages,
    void_page,
    write_block_page,
)
from kvstore.wire.segment import (
    ID_BYTES,
    Gathered,
    SegmentHead,
    footer,
    footer_bytes_max,
    place_of,
    segment_page,
)

RUN_BYTES_MAX: Final = 8 * MIB
"""Most bytes written in one call: long enough for any disk, short enough for the deadline."""
RUN_RECORDS_MAX: Final = 256
VOIDS_MAX: Final = 64
"""Most voids that new segments repeat; with the footer they also take at most an eighth of a
segment. Beyond either, one void of all blocks replaces them: clearing too much costs hits only."""


class AppendOutcome(msgspec.Struct):
    """Places of a batch's leading blocks, those written; and why the rest is not."""

    places: list[int]
    error: OSError | None = None
    is_full: bool = False
    """The capacity is used up until a segment is reclaimed."""
    lost: list[FileGone] = []
    """Blocks that a failed sync lost."""


@dataclass(slots=True, eq=False)
class _OpenSegment:
    """The segment that is appended to. Its file is as long as it may become."""

    file: SegmentFile
    found: Gathered = field(default_factory=Gathered)
    synced_records: int = 0
    is_unsure: bool = False
    """A sync has not returned, or failed: the kernel may have dropped data that it had accepted."""


class Writer:
    """Appends records to the segments of one directory."""

    def __init__(
        self,
        directory: Directory,
        catalog: Catalog,
        disk: Disk,
        *,
        segment_bytes: int,
        number: int,
        follows_closed: bool = False,
    ) -> None:
        """Args:
        directory, catalog, disk: where, and what is there already.
        segment_bytes: a segment's size at most.
        number: of the first segment that will be begun.
        follows_closed: whether the one before that has its footer.
        """
        self._directory = directory
        self._catalog = catalog
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._number = number
        self._follows_closed = follows_closed
        self._open: _OpenSegment | None = None
        self.voids: tuple[Void, ...] = ()
        """Voids that may still cover something, oldest first. From any thread."""
        self.voids_are_durable = True
        """Whether every carried void is on the disk: cleared blocks stay so after a restart."""
        self._headers = Pages(RUN_RECORDS_MAX * PAGE_BYTES)
        self._tails = Pages(RUN_RECORDS_MAX * PAGE_BYTES)
        self._direct = directory.direct
        self._voids_max = min(VOIDS_MAX, max(1, segment_bytes // PAGE_BYTES // 16))

    def _has_room(self, *, spare: bool) -> bool:
        """Whether another segment may be begun."""
        needed = self._segment_bytes * (1 if spare else 2)
        return self._catalog.taken_bytes + needed <= self._catalog.capacity_bytes

    def _fits(self, found: Gathered, count: int, pages: int = 0, *, void_count: int = 0) -> bool:
        """Whether `count` more records of `pages` pages, `void_count` more voids and the footer
        have room in a segment with these records."""
        footer_bytes = footer_bytes_max(
            record_count=len(found.rows) + count,
            scope_count=len(found.scopes) + 1,
            void_count=len(found.voids) + void_count,
        )
        end_page = found.end_page + count * pages + void_count
        return end_page * PAGE_BYTES + footer_bytes <= self._segment_bytes

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────

    def append(
        self, order: WriteFile, memory: memoryview, *, first: int = 0, spare: bool = False
    ) -> AppendOutcome:
        """Write the blocks from `first` on, as far as room and disk allow.

        Args:
            order: what to write.
            memory: where its slots lie: u8, page aligned.
            first: blocks before this one are done already.
            spare: may use the segment that is kept free for reclaiming.
        """
        pages = record_pages(order.scope)
        is_small = self._fits(Gathered(), 1, pages, void_count=self._voids_max)
        count = len(order.slots) if is_small else 0  # else it fits into no segment
        run_count = max(1, min(RUN_RECORDS_MAX, RUN_BYTES_MAX // (pages * PAGE_BYTES)))
        with self._attempt() as outcome:
            self._stay()
            while (begin := first + len(outcome.places)) < count:
                end = min(begin + run_count, count)
                opened = self._opened_for(pages, spare=spare)
                if opened is None:
                    outcome.is_full = True
                    break
                while not self._fits(opened.found, end - begin, pages):
                    end -= 1
                outcome.places += self._write_run(opened, order, memory, range(begin, end))
        return outcome

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[AppendOutcome]:
        """The outcome that the `with` block fills in. An OSError in the block goes into it, and the
        open segment is abandoned."""
        outcome = AppendOutcome([])
        try:
            yield outcome
        except OSError as error:
            outcome.error = error
            outcome.lost = self.abandon()

    def _stay(self) -> None:
        """Begin anew if the directory was removed, and forget the segments that went with it.

        Raises:
            OSError: it cannot be made again.
        """
        if self._directory.is_whole:
            return
        self.abandon()
        self._directory.make_again()
        for segment in self._catalog.own():
            if not os.access(segment.name, os.F_OK, dir_fd=segment.dir_fd):
                self._catalog.remove(segment.number)

    def _opened_for(self, pages: int, *, spare: bool) -> _OpenSegment | None:
        """A segment with room for one more record of that many pages; None: no room for a new one.

        Raises:
            OSError: the old one could not be closed, the new one not be begun.
        """
        if self._open is not None and self._fits(self._open.found, 1, pages):
            return self._open
        self._close_open()
        if not self._has_room(spare=spare):
            return None
        opened = self._begin()
        return opened if self._fits(opened.found, 1, pages) else None

    def _begin(self) -> _OpenSegment:
        number = self._number
        self._number += 1
        name = segment_name(number)
        store_id, segment_id = self._directory.store_id, secrets.token_bytes(ID_BYTES)
        head = SegmentHead(store_id, segment_id, number, self._follows_closed)
        self._follows_closed = False
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self._direct else 0)
        fd, _ = open_regular(self._disk, name, flags, self._directory.fd)
        opened = _OpenSegment(SegmentFile(self._disk, fd, head, self._segment_bytes))
        where = name, self._directory.fd
        self._catalog.add(Segment(number, head, *where, self._segment_bytes, opened.found))
        self._open = opened
        first = place_of(self._catalog.first_number(), 0)
        self.voids = tuple(void for void in self.voids if void.before > first)
        self._write_voids(opened, self.voids, segment_page(head))
        return opened

    def _write_voids(self, opened: _OpenSegment, voids: Sequence[Void], *before: bytes) -> None:
        """Write a page for each void behind what is there, and pages `before` them; synced."""
        head, found = opened.file.head, opened.found
        pages = [
            void_page(void, segment_id=head.segment_id, place=place_of(head.number, page))
            for page, void in enumerate(voids, found.end_page)
        ]
        self._write_pages(opened, b"".join([*before, *pages]), found.end_page - len(before))
        found.end_page += len(voids)
        found.voids += voids
        if voids:
            self._sync(opened)
        self.voids_are_durable = True

    def _write_pages(self, opened: _OpenSegment, pages: bytes, page: int) -> None:
        whole = Pages(len(pages))
        whole.view[:] = pages
        write_all(self._disk, opened.file.fd, [whole.view], page * PAGE_BYTES)

    def _write_run(
        self, opened: _OpenSegment, order: WriteFile, memory: memoryview, run: range
    ) -> list[int]:
        scope, prefix, found = order.scope, order.scope.prefix(), opened.found
        head, pages = opened.file.head, record_pages(scope)
        first_page = found.end_page
        buffers, written = [], []
        for row, index in enumerate(run):
            page, header = first_page + row * pages, self._headers.page(row)
            key, checksum = order.key(index), order.checksum(index)
            write_block_page(
                header,
                prefix=prefix,
                key=key,
                checksum=checksum,
                segment_id=head.segment_id,
                place=place_of(head.number, page),
            )
            begin = int(order.slots[index]) * PAGE_BYTES
            buffers += [header, *self._payload(memory[begin : begin + scope.block_bytes], row)]
            written.append((page, key, checksum))
        write_all(self._disk, opened.file.fd, buffers, first_page * PAGE_BYTES)
        for page, key, checksum in written:
            found.add(page, scope, key, checksum)
        found.end_page = first_page + len(run) * pages
        return [place_of(head.number, page) for page, _, _ in written]

    def _payload(self, block: memoryview, row: int) -> list[memoryview]:
        """The block's pages; a last one that it does not fill comes zero-padded from `_tails`."""
        rest = len(block) % PAGE_BYTES
        if not rest:
            return [block]
        whole, tail = block[: len(block) - rest], self._tails.page(row)
        tail[:rest] = block[len(whole) :]
        tail[rest:] = bytes(PAGE_BYTES - rest)
        return [whole, tail] if len(whole) else [tail]

    # ── reclaims ─────────────────────────────────────────────────────────────────────────────────

    def ask(self, segment: Segment, voids: Sequence[Void]) -> FileReclaim:
        """The question to the engine which of the segment's records to keep. A segment that cannot
        be read, though the disk can be, counts as empty.

        Raises:
            OSError: the disk cannot be read now, so nothing is known of the segment.
        """
        number = segment.number
        for _ in range(2):  # the disk may just be back
            try:
                with self._catalog.reading(segment) as file:
                    parts = record_sets(file.contents().table, number, number, voids=voids)
                    return FileReclaim(number, tuple(parts))
            except OSError:
                if not self._directory.is_readable():
                    raise
        return FileReclaim(number, ())

    def move(
        self, parts: Sequence[FileKnown], keep: bytes
    ) -> tuple[list[FileEvent], OSError | None]:
        """Read and verify the records of `keep`, and append them like new ones, newer than all
        before; `parts`: of the question. Returns the events to report, and the first error of
        writing, if there was one."""
        events: list[FileEvent] = []
        errors: list[OSError] = []
        for records in parts:
            places = np.frombuffer(records.locations, np.uint64)
            rows = np.flatnonzero(np.isin(places, np.frombuffer(keep, np.uint64)))
            step = run_max(records.scope)
            for begin in range(0, len(rows), step):
                events += self._move_chunk(records, rows[begin : begin + step], errors)
        return events, next(iter(errors), None)

    def _move_chunk(
        self, records: FileKnown, rows: NDArray[np.int64], errors: list[OSError]
    ) -> list[FileEvent]:
        scope, pages = records.scope, payload_pages(records.scope.block_bytes)
        columns = (records.keys, "V32"), (records.checksums, "V16"), (records.locations, "u8")
        keys, sums, places = (np.frombuffer(column, kind)[rows] for column, kind in columns)
        slots = np.arange(len(rows), dtype=np.uint32) * np.uint32(pages)
        scratch = Pages(len(rows) * pages * PAGE_BYTES).view
        wanted = ReadFile(0, scope, keys.tobytes(), slots, sums.tobytes(), places.tobytes())
        reader, good = Reader(self._catalog, scratch, direct=self._direct), []
        for run in split(wanted):
            verdicts = reader.read(run.number, wanted, run.indexes).verdicts
            good += [
                i for i, its in zip(run.indexes, verdicts, strict=True) if its is ReadVerdict.GOOD
            ]
        order = WriteFile(0, scope, keys[good].tobytes(), slots[good], sums[good].tobytes())
        outcome = self.append(order, scratch, spare=True)
        errors += [outcome.error] if outcome.error is not None else []
        done = good[: len(outcome.places)]
        events: list[FileEvent] = []
        if done:
            new = np.array(outcome.places, np.uint64).tobytes()
            events.append(FileMoved(scope, keys[done].tobytes(), places[done].tobytes(), new))
        if len(lost := np.delete(np.arange(len(rows)), done)):
            events.append(FileGone(scope, keys[lost].tobytes(), places[lost].tobytes()))
        return events + outcome.lost

    # ── voids ────────────────────────────────────────────────────────────────────────────────────

    def void(self, tenant: str | None, space: bytes | None) -> AppendOutcome:
        """Make all blocks of this tenant and space that were written so far unfindable, for good.

        If the disk fails or has no room, the next segment that is begun carries it.
        """
        before = place_of(self._number, 0)
        if self._open is not None:
            before = place_of(self._open.file.head.number, self._open.found.end_page)
        void = Void(tenant, space, before)
        self.carry([void])
        self.voids_are_durable = False
        with self._attempt() as outcome:
            self._stay()
            if self._open is not None and not self._fits(self._open.found, 0, void_count=1):
                self._close_open()
            if self._open is not None:
                self._write_voids(self._open, [void])
            elif self._has_room(spare=True):
                self._begin()
        return outcome

    def carry(self, voids: Sequence[Void]) -> None:
        """Have new segments repeat these voids from now on; each replaces older ones that it
        covers."""
        for void in voids:
            kept = [v for v in self.voids if v.before > void.before or not void.covers(v)]
            self.voids = (*kept, void)
        if len(self.voids) > self._voids_max:
            self.voids = (Void(None, None, max(void.before for void in self.voids)),)

    def write_carried(self) -> AppendOutcome:
        """Repeat the carried voids in the open segment, which was begun before they were known."""
        opened = self._open
        with self._attempt() as outcome:
            if opened is not None and any(v not in opened.found.voids for v in self.voids):
                self._close_open()
                if self._has_room(spare=True):
                    self._begin()
        return outcome

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def close_segment(self) -> AppendOutcome:
        """Close the open segment with its footer, synced; the next write begins a new one."""
        with self._attempt() as outcome:
            self._close_open()
            self._disk.fsync(self._directory.fd)
        return outcome

    def _close_open(self) -> None:
        opened = self._open
        if opened is None:
            return
        head, end_page, body = opened.file.head, opened.found.end_page, b""
        if opened.found.has_records:
            body = footer(head, opened.found.table(), first_page=end_page)
            self._write_pages(opened, body, end_page)
            self._sync(opened)
            if not self._direct:
                forget_cached(opened.file.fd)
            self._follows_closed = True
        self._leave(opened, end_page * PAGE_BYTES + len(body))

    def _sync(self, opened: _OpenSegment) -> None:
        opened.is_unsure = True
        self._disk.fsync(opened.file.fd)
        opened.is_unsure, opened.synced_records = False, len(opened.found.rows)

    def abandon(self) -> list[FileGone]:
        """Stop appending to the open segment, as it is. Returns blocks that are lost: after a
        failed sync, what was not synced before is read back from the medium."""
        opened = self._open
        if opened is None:
            return []
        lost = self._lost(opened) if opened.is_unsure else []
        size = self._segment_bytes
        with contextlib.suppress(OSError):
            size = os.fstat(opened.file.fd).st_size
        self._leave(opened, size)
        return lost

    def _leave(self, opened: _OpenSegment, size_bytes: int) -> None:
        """Forget the open segment, and delete it if nothing is in it."""
        number = opened.file.head.number
        if opened.found.has_records:
            self._catalog.closed(number, size_bytes)
        else:
            self._catalog.remove(number)
            self._directory.remove(segment_name(number))
        self._open = None
        close_at_last(opened.file.fd)

    def _lost(self, opened: _OpenSegment) -> list[FileGone]:
        """Records since the last good sync that do not read back."""
        with contextlib.suppress(OSError):
            forget_cached(opened.file.fd)
        number, found = opened.file.head.number, opened.found
        rows = range(opened.synced_records, len(found.rows))
        walked = walk(opened.file, found.table(), Pages(MIB).view, rows=rows)
        return [
            FileGone(block.scope, block.key, np.uint64(place_of(number, page)).tobytes())
            for page, block, good, _ in walked
            if not good
        ]
