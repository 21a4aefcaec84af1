"""The thread that owns the end of the log: writes and voids in their order, reclaims before them,
and the deletion of segments.

Covers the queue of the writer, its bounds and deadlines, when a segment is reclaimed, and what
becomes of its records:

    free < 3 segments                → ask the engine about the oldest one
    an ordinary write needs a segment and only the spare one is left
                                     → it waits for the reclaim under way, until its deadline

Records that the engine keeps are moved to the end of the log; then the segment is deleted.

Does not cover: how records are laid out and moved (`writer.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from kvstore.tier_events import (
    FileLate,
    FileReclaim,
    FileWritten,
    ReclaimFile,
    Suspended,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.catalog import Segment
from kvstore.tiers.file.parts import FileJob, FileJobs, Parts
from kvstore.tiers.file.writer import AppendOutcome, Writer
from kvstore.units import NS_PER_MS
from kvstore.wire.record import Void

_BUG: Final = "a bug of the node ended its writing: see the log, and restart the node"

FREE_SEGMENTS_MIN: Final = 3


_Work = FileJob[WriteFile] | Callable[[], None]


class LogThread:
    """Queue and body of the thread that owns the end of the log."""

    def __init__(self, parts: Parts, memory: memoryview, writer: Writer) -> None:
        """`memory`: where slots lie. `writer`: of this thread from now on."""
        self._memory = memory
        self._config, self._clock, self._lock = parts.config, parts.clock, parts.lock
        self._directory, self._catalog = parts.directory, parts.catalog
        self._outbox, self._health = parts.outbox, parts.health
        self.writer = writer
        """Its `voids` may be asked from any thread."""
        self._queue: deque[_Work] = deque()
        self._control: dict[str, Callable[[], None]] = {}
        """Work that goes before all queued writes, by name: of one name only the last counts."""
        self.jobs = FileJobs[WriteFile](parts, parts.config.write_deadline_ms)
        """Writes that wait or run."""
        self._asked: FileReclaim | None = None
        """The question that the engine has not answered."""
        self._hidden: deque[tuple[int, str, int]] = deque()
        self._voids_waiting = 0
        self._is_stalled = False
        self.is_recovered = False
        """Whether all old segments are known, and what of them was cleared."""
        self._close_by_ns = 0

    # ── called with the lock held ────────────────────────────────────────────────────────────────

    def submit(self, order: WriteFile) -> bool:
        """Queue a write. False: it is refused."""
        job = self.jobs.begin(order, self._health.allows_write)
        self._queue += [job] if job is not None else []
        return job is not None

    def void(self, job: VoidFile) -> None:
        self._queue.append(partial(self._void, job))
        self._voids_waiting += 1
        self._lock.notify_all()

    def reclaim(self, job: ReclaimFile) -> None:
        self._first(f"reclaim {job.segment}", partial(self._move, job))

    def recovered(self, voids: Sequence[Void]) -> None:
        """All old segments are known; these voids were found in them, and new segments have to
        repeat them."""
        self._first("recovered", partial(self._carry, voids))

    def _first(self, name: str, work: Callable[[], None]) -> None:
        self._control[name] = work
        self._lock.notify_all()

    def close(self, now_ns: int) -> None:
        self.jobs.is_closed = True
        self._close_by_ns = now_ns + self._config.close_deadline_ms * NS_PER_MS // 2

    def expire(self, now_ns: int) -> None:
        """Act on deadlines that have passed: end writes that have not begun, report those that run
        as late."""
        for job in self.jobs.overdue(now_ns):
            if job.runs:
                job.late = True
                self._outbox.put(*self._health.failed_writing(now_ns, None))
                self._outbox.put(FileLate(job.order.job))
            else:
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
            self._first("note", partial(self._directory.keep_note, note))

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
                self._first("room", partial(self._carry, ()))  # wakes whoever waits for it

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve the queue until closing, then close the open segment."""
        try:
            while (job := self._next()) is not None:
                if isinstance(job, FileJob):
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
                self.jobs.is_closed = True
                self._queue.clear()
                for left in list(self.jobs.values()):
                    self._end(left)

    def _void(self, job: VoidFile) -> None:
        self._report(self.writer.void(job.tenant, job.space))
        with self._lock:
            self._voids_waiting -= 1
            self._lock.notify_all()

    def _next(self) -> _Work | None:
        with self._lock:
            while True:
                if self._control:
                    return self._control.pop(next(iter(self._control)))
                if self.jobs.is_closed and (
                    not self._queue or self._is_stalled or self._clock.now_ns() >= self._close_by_ns
                ):
                    return self._drain()
                if self._queue and not (self._is_stalled and self._waits(self._queue[0])):
                    job = self._queue.popleft()
                    if isinstance(job, FileJob):
                        job.runs = 1
                    return job
                self._lock.wait()

    def _waits(self, job: _Work) -> bool:
        """Whether it is a write for which there may be room once a reclaim or recovery is over."""
        is_hidden = self._catalog.hidden_bytes > 0  # until it is deleted, not only due
        room_may_come = self._asked is not None or is_hidden or not self.is_recovered
        return isinstance(job, FileJob) and room_may_come

    def _drain(self) -> _Work | None:
        """At the end: end queued writes unwritten up to the next void, which is returned to be
        written; None: nothing is left."""
        while self._queue:
            job = self._queue.popleft()
            if not isinstance(job, FileJob):
                return job
            self._end(job)
        return None

    def _write(self, job: FileJob[WriteFile]) -> None:
        outcome = self.writer.append(job.order, self._memory, first=len(job.results))
        # The end of the job comes after the word that these are gone, and would outlive it.
        lost = set(np.frombuffer(b"".join(g.locations for g in outcome.lost), np.uint64).tolist())
        if outcome.is_full:
            self._is_stalled = True  # until a segment is deleted, here or later
            self._make_room()
        with self._lock:
            job.results += [0 if place in lost else place for place in outcome.places]
            job.runs = 0
            self._report(outcome)
            if outcome.places and outcome.error is None and not job.late:
                self._outbox.put(*self._health.wrote())
            room_may_come = not self._is_stalled or self._waits(job)
            if outcome.is_full and not job.late and room_may_come:
                self._queue.appendleft(job)
            else:
                self._is_stalled = False
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
            events, _ = self.writer.move(asked.parts, job.keep)
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
        needed = FREE_SEGMENTS_MIN * self._config.segment_size
        while self.is_recovered and self._asked is None:
            coming = self._catalog.hidden_bytes  # frees itself when its grace is over
            if self._catalog.taken_bytes - coming + needed <= self._catalog.capacity_bytes:
                return
            segment = next((each for each in self._catalog.own() if each.found is None), None)
            if segment is None:
                return
            try:
                asked = self.writer.ask(segment, self.writer.voids)
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

    def _end(self, job: FileJob[WriteFile]) -> None:
        """Answer a write: what was written has its place, the rest 0."""
        locations = np.zeros(len(job.order.slots), np.uint64)
        locations[: len(job.results)] = job.results
        self.jobs.end(job, FileWritten(job.order.job, locations.tobytes()))
