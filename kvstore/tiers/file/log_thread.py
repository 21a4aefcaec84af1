"""The thread that owns the end of the log: writes and voids in their order, reclaims before them,
and the deletion of segments.

Covers the queue of the writer, its bounds and deadlines, when a segment is reclaimed, and what
becomes of its records:

    free < 3 segments                → ask the engine about the oldest one
    an ordinary write needs a segment and only the spare one is left
                                     → it waits for the reclaim under way, until its deadline

Records that the engine keeps are read, verified, and appended like new ones, newer than everything
before; then the segment is deleted.

Does not cover: how records are laid out (`writer.py`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.tier_events import (
    FileEvent,
    FileGone,
    FileKnown,
    FileLate,
    FileMoved,
    FileReclaim,
    FileWritten,
    ReclaimFile,
    Suspended,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.catalog import Catalog, Segment
from kvstore.tiers.file.contents import is_intact, record_sets
from kvstore.tiers.file.directory import Directory
from kvstore.tiers.file.disk import Pages, forget_cached
from kvstore.tiers.file.parts import Parts
from kvstore.tiers.file.reader import PAGE_MASK, RUN_BYTES_MAX, RUN_RECORDS_MAX
from kvstore.tiers.file.writer import AppendOutcome, Writer
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_MS
from kvstore.wire.record import BlockPage, Void, record_pages
from kvstore.wire.segment import Table

_BUG: Final = "a bug of the node ended its writing: see the log, and restart the node"

FREE_SEGMENTS_MIN: Final = 3


@dataclass(slots=True, eq=False)
class WriteJob:
    """A WriteFile that waits or runs. `places`: locations of its leading blocks, those written so
    far."""

    order: WriteFile
    deadline_ns: int
    taken_bytes: int
    places: list[int] = field(default_factory=list)
    running: bool = False
    late: bool = False


_Job = WriteJob | Callable[[], None]


class LogThread:
    """Queue and body of the thread that owns the end of the log."""

    def __init__(self, parts: Parts, memory: memoryview, writer: Writer) -> None:
        """`memory`: where slots lie. `writer`: of this thread from now on."""
        self._memory = memory
        self._config, self._clock, self._lock = parts.config, parts.clock, parts.lock
        self._directory, self._catalog = parts.directory, parts.catalog
        self._outbox, self._health = parts.outbox, parts.health
        self._segment_bytes = parts.config.segment_size
        self.writer = writer
        """Its `voids` may be asked from any thread."""
        self._reclaimer = Reclaimer(parts.directory, parts.catalog, writer)
        self._queue: deque[_Job] = deque()
        self._control: deque[Callable[[], None]] = deque()
        """Work that goes before all queued writes."""
        self._note: bytes | None = None
        """The last note given, until the thread takes it, ahead of all queued writes."""
        self._jobs: dict[int, WriteJob] = {}
        self._queued_bytes = 0
        self._asked: FileReclaim | None = None
        """The question that the engine has not answered."""
        self._hidden: deque[tuple[int, str, int]] = deque()
        self._voids_waiting = 0
        self._is_stalled = False
        self.is_recovered = False
        """Whether all old segments are known, and what of them was cleared."""
        self._is_closing = False
        self._close_by_ns = 0

    # ── called with the lock held ────────────────────────────────────────────────────────────────

    def submit(self, job: WriteJob, now_ns: int) -> bool:
        """Queue a write. False: it is refused."""
        if self._is_closing or len(self._jobs) >= self._config.queued_jobs_max:
            return False
        if self._queued_bytes + job.taken_bytes > self._config.queued_bytes_max:
            return False
        if not self._health.allows_write(now_ns):
            return False
        assert job.order.job not in self._jobs, "a job's number is unique among those under way"
        self._jobs[job.order.job] = job
        self._queued_bytes += job.taken_bytes
        self._queue.append(job)
        self._lock.notify_all()
        return True

    @property
    def is_wanted(self) -> bool:
        """Whether a write waits or runs."""
        return bool(self._jobs)

    def void(self, job: VoidFile) -> None:
        self._queue.append(partial(self._void, job))
        self._voids_waiting += 1
        self._lock.notify_all()

    def reclaim(self, job: ReclaimFile) -> None:
        self._first(partial(self._move, job))

    def recovered(self, voids: Sequence[Void]) -> None:
        """All old segments are known; these voids were found in them, and new segments have to
        repeat them."""
        self._first(partial(self._carry, voids))

    def _first(self, work: Callable[[], None]) -> None:
        self._control.append(work)
        self._lock.notify_all()

    def close(self, now_ns: int) -> None:
        self._is_closing = True
        self._close_by_ns = now_ns + self._config.close_deadline_ms * NS_PER_MS // 2

    def expire(self, now_ns: int) -> None:
        """Act on deadlines that have passed: end writes that have not begun, report those that run
        as late."""
        for job in [job for job in self._jobs.values() if job.deadline_ns <= now_ns]:
            if job.running and not job.late:
                job.late = True
                self._outbox.put(*self._health.failed_writing(now_ns, None))
                self._outbox.put(FileLate(job.order.job))
            elif not job.running:
                self._queue.remove(job)
                self._end(job)

    # ── called without it ────────────────────────────────────────────────────────────────────────

    def wait_for_voids(self, timeout_s: float) -> bool:
        """Wait, at most `timeout_s`, until all voids so far are on the disk. Returns whether they
        are."""
        with self._lock:
            done = self._lock.wait_for(lambda: not self._voids_waiting, timeout_s)
            return done and self.writer.voids_are_durable

    def keep_note(self, note: bytes) -> None:
        with self._lock:
            self._note = note
            self._lock.notify_all()

    def purge(self) -> None:
        """Shared mode: delete reclaimed segments that were hidden long enough ago, for good."""
        while True:
            with self._lock:
                if not self._hidden or self._hidden[0][0] > self._clock.now_ns():
                    return
                _, name, taken_bytes = self._hidden.popleft()
            self._directory.remove(name)
            with self._lock:
                self._catalog.hidden_bytes -= taken_bytes
                self._first(partial(self._carry, ()))  # wakes whoever waits for room

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve the queue until closing, then close the open segment."""
        try:
            while (job := self._next()) is not None:
                if isinstance(job, WriteJob):
                    self._write(job)
                else:
                    job()
                self._make_room()
            self._report(self.writer.close_segment())
        except Exception:
            self._outbox.put(Suspended(_BUG, writes_only=True))
            raise
        finally:
            # After a bug of ours too: what is left ends, and nothing more is taken.
            with self._lock:
                self._is_closing = True
                self._queue.clear()
                for left in list(self._jobs.values()):
                    self._end(left)

    def _void(self, job: VoidFile) -> None:
        self._report(self.writer.void(job.tenant, job.space))
        with self._lock:
            self._voids_waiting -= 1
            self._lock.notify_all()

    def _next(self) -> _Job | None:
        with self._lock:
            while True:
                if self._control:
                    return self._control.popleft()
                if self._note is not None:
                    note, self._note = self._note, None
                    return partial(self._directory.keep_note, note)
                if self._is_closing and (
                    not self._queue or self._is_stalled or self._clock.now_ns() >= self._close_by_ns
                ):
                    return self._drain()
                if self._queue and not (self._is_stalled and self._waits(self._queue[0])):
                    job = self._queue.popleft()
                    if isinstance(job, WriteJob):
                        job.running = True
                    return job
                self._lock.wait()

    def _waits(self, job: _Job) -> bool:
        """Whether it is a write for which there may be room once a reclaim or recovery is over."""
        is_hidden = self._catalog.hidden_bytes > 0  # until it is deleted, not only due
        room_may_come = self._asked is not None or is_hidden or not self.is_recovered
        return isinstance(job, WriteJob) and room_may_come

    def _drain(self) -> _Job | None:
        """At the end: end queued writes unwritten up to the next void, which is returned to be
        written; None: nothing is left."""
        while self._queue:
            job = self._queue.popleft()
            if not isinstance(job, WriteJob):
                return job
            self._end(job)
        return None

    def _write(self, job: WriteJob) -> None:
        outcome = self.writer.append(job.order, self._memory, first=len(job.places))
        # The end of the job comes after the word that these are gone, and would outlive it.
        lost = set(np.frombuffer(b"".join(g.locations for g in outcome.lost), np.uint64).tolist())
        with self._lock:
            job.places += [0 if place in lost else place for place in outcome.places]
            job.running = False
            self._report(outcome)
            if outcome.places and outcome.error is None and not job.late:
                self._outbox.put(*self._health.wrote())
            if outcome.is_full and not job.late:
                self._is_stalled = True
                self._queue.appendleft(job)
            else:
                self._end(job)
        if outcome.is_full:
            self._make_room()
            with self._lock:
                if not self._waits(job) and self._queue and self._queue[0] is job:
                    self._queue.popleft()
                    self._end(job)

    def _carry(self, voids: Sequence[Void]) -> None:
        self.writer.carry([*voids, *self.writer.voids] if voids else ())
        self._report(self.writer.write_carried())
        with self._lock:
            self.is_recovered = True
            self._is_stalled = False
            self._lock.notify_all()

    def _move(self, job: ReclaimFile) -> None:
        asked = self._asked
        if asked is None or job.segment != asked.segment:
            return
        segment = self._catalog.get(job.segment)
        if segment is not None:
            events, _ = self._reclaimer.move(segment, asked.parts, job.keep)
            self._outbox.put(*events)
            self._delete(segment)
        with self._lock:
            self._asked = None
            self._is_stalled = False
            self._outbox.put(*self._health.room_again())

    def _delete(self, segment: Segment) -> None:
        self._catalog.remove(segment.number)
        if not self._config.shared:
            self._directory.remove(segment.name)
            return
        hidden = self._directory.hide(segment.name)
        with self._lock:
            due_ns = self._clock.now_ns() + self._config.grace_ms * NS_PER_MS
            self._hidden.append((due_ns, hidden, segment.taken_bytes))
            self._catalog.hidden_bytes += segment.taken_bytes

    def _make_room(self) -> None:
        """Ask about the oldest segment if room runs short; delete at once what holds nothing."""
        needed = FREE_SEGMENTS_MIN * self._segment_bytes
        while self.is_recovered and self._asked is None:
            coming = self._catalog.hidden_bytes  # frees itself when its grace is over
            if self._catalog.taken_bytes - coming + needed <= self._catalog.capacity_bytes:
                return
            closed = [segment for segment in self._catalog.own() if segment.found is None]
            if not closed:
                return
            segment = closed[0]
            try:
                asked = self._reclaimer.ask(segment, self.writer.voids)
            except OSError as error:
                self._report(AppendOutcome([], error))
                return  # until the next job: what may be good is not deleted unread
            if asked.parts:
                self._asked = asked
                self._outbox.put(asked)
                return
            self._delete(segment)
            self._is_stalled = False

    def _report(self, outcome: AppendOutcome) -> None:
        if outcome.error is not None:
            with self._lock:
                self._outbox.put(*self._health.failed_writing(self._clock.now_ns(), outcome.error))
        self._outbox.put(*outcome.lost)

    def _end(self, job: WriteJob) -> None:
        """Answer a write: what was written has its place, the rest 0."""
        del self._jobs[job.order.job]
        self._queued_bytes -= job.taken_bytes
        locations = np.zeros(len(job.order.slots), np.uint64)
        locations[: len(job.places)] = job.places
        self._outbox.put(FileWritten(job.order.job, locations.tobytes()))
        self._lock.notify_all()


# ── reclaims ──────────────────────────────────────────────────────────────────────────────────────


class Reclaimer:
    """Reclaims one segment at a time: asks which records to keep, then moves them."""

    def __init__(self, directory: Directory, catalog: Catalog, writer: Writer) -> None:
        self._directory = directory
        self._catalog = catalog
        self._writer = writer

    def ask(self, segment: Segment, voids: Sequence[Void]) -> FileReclaim:
        """The question to the engine which of the segment's records to keep. A segment that cannot
        be read, though the disk can be, counts as empty.

        Raises:
            OSError: the disk cannot be read now, so nothing is known of the segment.
        """
        if (table := self._table(segment) or self._table(segment)) is None:  # it may just be back
            return FileReclaim(segment.number, ())
        number = segment.number
        return FileReclaim(number, tuple(record_sets(table, number, number, voids=voids)))

    def _table(self, segment: Segment) -> Table | None:
        """Table of the segment; None: it cannot be read, though the disk can be."""
        try:
            with self._catalog.reading(segment) as file:
                return file.contents().table
        except OSError:
            if not self._directory.is_readable():
                raise
            return None

    def move(
        self, segment: Segment, parts: Sequence[FileKnown], keep: bytes
    ) -> tuple[list[FileEvent], OSError | None]:
        """Copy records of `keep` to the end of the log; `parts`: of the question. Returns the
        events to report, and the writer's first error, if there was one."""
        events: list[FileEvent] = []
        errors: list[OSError] = []
        for records in parts:
            places = np.frombuffer(records.locations, np.uint64)
            rows = np.flatnonzero(np.isin(places, np.frombuffer(keep, np.uint64)))
            size = record_pages(records.scope) * PAGE_BYTES
            step = max(1, min(RUN_RECORDS_MAX, RUN_BYTES_MAX // size))
            for begin in range(0, len(rows), step):
                events += self._move_chunk(segment, records, rows[begin : begin + step], errors)
        return events, next(iter(errors), None)

    def _move_chunk(
        self, segment: Segment, records: FileKnown, rows: NDArray[np.int64], errors: list[OSError]
    ) -> list[FileEvent]:
        scope, pages = records.scope, record_pages(records.scope)
        size = pages * PAGE_BYTES
        scratch = Pages(len(rows) * size).view
        places = np.frombuffer(records.locations, np.uint64)[rows]
        keys, sums = np.frombuffer(records.keys, "V32"), np.frombuffer(records.checksums, "V16")
        keys, sums = keys[rows], sums[rows]
        good = []
        for row, place in enumerate(places.tolist()):
            block = BlockPage(scope, keys[row].tobytes(), sums[row].tobytes())
            record = scratch[row * size : (row + 1) * size]
            with contextlib.suppress(OSError), self._catalog.reading(segment) as file:
                if is_intact(file, place & PAGE_MASK, block, record):
                    good.append(row)
                if not self._directory.direct:
                    forget_cached(file.fd, (place & PAGE_MASK) * PAGE_BYTES, size)
        slots = np.array(good, np.uint32) * np.uint32(pages) + np.uint32(1)
        order = WriteFile(0, scope, keys[good].tobytes(), slots, sums[good].tobytes())
        outcome = self._writer.append(order, scratch, spare=True)
        errors += [outcome.error] if outcome.error is not None else []
        done = good[: len(outcome.places)]
        events: list[FileEvent] = []
        if done:
            new = np.array(outcome.places, np.uint64).tobytes()
            events.append(FileMoved(scope, keys[done].tobytes(), places[done].tobytes(), new))
        if len(lost := np.delete(np.arange(len(rows)), done)):
            events.append(FileGone(scope, keys[lost].tobytes(), places[lost].tobytes()))
        return events + outcome.lost
