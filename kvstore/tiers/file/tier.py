"""`FileTier`: blocks between slots of the arena and a disk. All that others call is here.

    tier = FileTier.open(FileConfig(Path("/var/lib/kvstore"), capacity_bytes=2 << 40), arena, clock)
    tier.write(7, scope, keys, slots, checksums)      # → Written(7, locations)
    tier.read(8, scope, keys, locations, slots, b"")  # → Read(8, good)

The engine decides what is written, read and kept; this moves bytes and finds them again. No call
blocks. Threads: one writer (`log_thread.py`), some readers, one that recovers and then looks after
other nodes' segments, one that watches deadlines, one that scrubs (`scrub.py`). One lock guards
queues and jobs; no I/O happens under it.

Slots belong to the tier from `write` or `read` until the job's `Written` or `Read`. A job that is
late (`Late`) keeps them: the kernel may still write to them at any time.

Does not cover: what is worth keeping (`kvstore.engine`), the map of the parts (`__init__.py`).
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstore.breaker import BreakerState
from kvstore.ports import Clock
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.events import FileEvent, Gone, Late, Read, RecoveryDone
from kvstore.tiers.file.health import Health
from kvstore.tiers.file.jobs import (
    NoteJob,
    ReadJob,
    ReclaimJob,
    RecordRun,
    VoidJob,
    WriteJob,
    split,
    u32,
    u64,
)
from kvstore.tiers.file.log_thread import LogThread
from kvstore.tiers.file.outbox import Outbox
from kvstore.tiers.file.reader import Reader, ReadVerdict, RunResult
from kvstore.tiers.file.scrub import Scrub
from kvstore.tiers.file.segments.catalog import Catalog
from kvstore.tiers.file.segments.directory import Directory, cannot_be_read, open_directory
from kvstore.tiers.file.segments.disk import Disk, PosixDisk
from kvstore.tiers.file.segments.restart import Restart
from kvstore.tiers.file.segments.shared import Peers
from kvstore.tiers.file.writer import Payloads, RecordBatch
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.record import Scope, Void, payload_pages

WATCH_S: Final = 0.05
"""How late a deadline is noticed at most."""
LOOK_PAUSES: Final = 10
"""After a look at other nodes' directories, a pause of at least so many times as long as it took:
where there are very many segments, all nodes would look at them without end."""
_ANYTHING_OLDER: Final = (1 << 63) - 1

_BUG: Final = OSError(errno.EIO, "a bug in the disk tier")

_log = logging.getLogger(__name__)


class FileTier:
    """One open directory. Made by `open`; calls come from one thread."""

    def __init__(
        self,
        config: FileConfig,
        arena: Any,
        clock: Clock,
        *,
        disk: Disk,
        directory: Directory,
        outbox: Outbox | None = None,
        look: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._memory = memoryview(arena).cast("B")
        self._directory = directory
        self.note = directory.note()
        """As `keep_note` kept it before this start; empty: nothing."""
        self._outbox = outbox or Outbox()
        self._lock = threading.Condition()
        self._health = Health(config)
        self._runs: deque[RecordRun] = deque()
        self._reads: dict[int, ReadJob] = {}
        self._read_bytes = 0
        self._closing = False
        self._catalog = Catalog(disk, capacity_bytes=config.capacity_bytes, direct=directory.direct)
        self._restart = Restart(directory, self._catalog, disk, segment_bytes=config.segment_size)
        self._log = LogThread(
            config,
            clock,
            disk,
            directory,
            self._catalog,
            outbox=self._outbox,
            health=self._health,
            lock=self._lock,
            number=self._restart.next_number,
            follows_closed=self._restart.newest_is_closed,
        )
        readers = [
            Reader(self._catalog, disk, self._memory, direct=directory.direct, look=look)
            for _ in range(config.reader_count)
        ]
        self._peers = self._make_peers(disk)
        self._peers_lock = threading.Lock()
        self._leaving = threading.Event()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="file-watch", daemon=True)
        self._threads = [
            threading.Thread(target=self._log.run, name="file-log", daemon=True),
            threading.Thread(target=self._recover, name="file-recovery", daemon=True),
            *(
                threading.Thread(target=self._serve, args=(r,), name="file-read", daemon=True)
                for r in readers
            ),
        ]
        if (scrub := self._make_scrub(disk)) is not None:
            self._threads.append(threading.Thread(target=scrub.run, name="file-scrub", daemon=True))

    @classmethod
    def open(
        cls,
        config: FileConfig,
        arena: Any,
        clock: Clock,
        *,
        disk: Disk | None = None,
        lock_fd: int = -1,
        outbox: Outbox | None = None,
        look: Callable[[int, memoryview], None] | None = None,
    ) -> FileTier:
        """Open or make the directory, and begin to look for what is in it.

        Args:
            config: where, and how much.
            arena: all of the memory that holds slots, writable, 4 KiB aligned.
            clock: for deadlines.
            disk: the system calls; tests give their own.
            lock_fd: the directory's lock, if an earlier process left it; the tier's from now on.
            outbox: where events go, if that is watched already; the tier's from now on.
            look: copies bytes of the arena (`Arena.read`), where engines share it.

        Raises:
            ConfigError: the directory cannot be used; the text says why and what to do.
        """
        posix = disk or PosixDisk()
        directory = open_directory(config, posix, lock_fd)
        try:
            tier = cls(
                config, arena, clock, disk=posix, directory=directory, outbox=outbox, look=look
            )
        except OSError as error:
            directory.close()
            raise cannot_be_read(config.home, error) from error
        except BaseException:
            directory.close()
            raise
        for thread in (*tier._threads, tier._watcher):
            thread.start()
        return tier

    # ── what the driver calls ────────────────────────────────────────────────────────────────────

    def fileno(self) -> int:
        """An eventfd that is readable while `take_events` has something."""
        return self._outbox.fd

    def take_events(self) -> list[FileEvent]:
        """Everything that happened since the last call, in order."""
        return self._outbox.take()

    @property
    def taken_bytes(self) -> int:
        """What the directory takes of the capacity, the open segment counted whole."""
        return self._catalog.taken_bytes

    @property
    def lock_fd(self) -> int:
        """Descriptor of the directory's lock: whoever holds a copy of it keeps others out."""
        return self._directory.lock_fd

    @property
    def path(self) -> Path:
        """The directory of this node."""
        return self._directory.path

    @property
    def is_direct(self) -> bool:
        """Whether I/O goes round the page cache."""
        return self._directory.direct

    @property
    def breakers(self) -> tuple[BreakerState, BreakerState]:
        """Of reads and of writes."""
        return self._health.reads, self._health.writes

    def write(self, job: int, scope: Scope, keys: bytes, slots: Any, checksums: bytes) -> bool:
        """Store blocks of one scope.

        Args:
            job: names the answer; unique among the jobs under way.
            scope: of all of them; says how long a block is.
            keys: 32 bytes each.
            slots: u32, first 4 KiB page of each in the arena; sealed, nobody writes to them.
            checksums: 16 bytes each, as made by the rank that stored the block.

        Returns: False: refused, nothing was taken: the queue is full or the disk suspended.
        """
        which = u32(slots)
        count = self._check(scope, keys, which)
        assert len(checksums) == count * CHECKSUM_BYTES
        now_ns = self._clock.now_ns()
        batch = RecordBatch(
            scope, bytes(keys), bytes(checksums), Payloads(self._memory, which.copy())
        )
        deadline_ns = now_ns + self._config.write_deadline_ms * NS_PER_MS
        taken = count * payload_pages(scope.block_bytes) * PAGE_BYTES
        with self._lock:
            return self._log.submit(WriteJob(job, batch, deadline_ns, taken), now_ns)

    def read(
        self,
        job: int,
        scope: Scope,
        keys: bytes,
        locations: Any,
        slots: Any,
        checksums: bytes = b"",
    ) -> bool:
        """Bring blocks of one scope into slots.

        Args:
            job, scope, keys, slots: as of `write`; the slots are this job's alone.
            locations: u64, from `Known`, `Written` or `Moved`.
            checksums: 16 bytes each; empty: those in the records.

        Returns: False: refused, nothing was taken: the queue is full or the disk suspended.
        """
        which = u32(slots)
        count = self._check(scope, keys, which)
        places = u64(locations).copy()
        assert len(places) == count
        assert places.all(), "0 is no location"
        assert len(checksums) in (0, count * CHECKSUM_BYTES)
        now_ns = self._clock.now_ns()
        taken = count * payload_pages(scope.block_bytes) * PAGE_BYTES
        deadline_ns = now_ns + self._config.read_deadline_ms * NS_PER_MS
        made = ReadJob(job, scope, bytes(keys), places, deadline_ns, taken, bytearray(count))
        with self._lock:
            if self._closing or len(self._reads) >= self._config.queued_jobs_max:
                return False
            if self._read_bytes + taken > self._config.queued_bytes_max:
                return False
            if not self._health.allows_read(now_ns):
                return False
            assert job not in self._reads, "a job's number is unique among those under way"
            runs = list(split(made, which, bytes(checksums)))
            made.runs_left = len(runs)
            self._runs.extend(runs)
            self._reads[job] = made
            self._read_bytes += taken
            if not runs:
                self._end(made)
            self._lock.notify_all()
        return True

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """Clear: whatever of this tenant and space (None: of any) was written is gone for good."""
        with self._lock:
            self._outbox.void(Void(tenant, space, _ANYTHING_OLDER))
            self._log.void(VoidJob(tenant, space))

    def wait_for_voids(self, timeout_s: float) -> bool:
        """Whether all voids so far are on the disk, waiting no longer than that. The one call that
        blocks, and the one that may come from any thread."""
        with self._lock:
            return self._log.wait_for_voids(timeout_s)

    def reclaim(self, segment: int, keep: Any) -> None:
        """Answer `Reclaim`: copy the records at `keep` (u64 locations), then delete the segment."""
        with self._lock:
            self._log.reclaim(ReclaimJob(segment, u64(keep).copy()))

    def keep_note(self, note: bytes) -> None:
        """Keep a few pages for the next start. Only the last one counts; may be lost."""
        with self._lock:
            self._log.note(NoteJob(note))

    def close(self) -> None:
        """Orderly end: queued writes are written, the open segment is closed and synced.

        Reads that have not begun fail. A disk that hangs is waited for no longer than
        `close_deadline_ms`. What happened last can still be taken. Idempotent.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._log.close(self._clock.now_ns())
            for run in self._runs:
                run.job.runs_left -= 1
                self._end_if_done(run.job)
            self._runs.clear()
            self._leaving.set()
            self._lock.notify_all()
        self._outbox.stop()
        patience_s = self._config.close_deadline_ms / 1000
        for thread in self._threads:
            thread.join(patience_s)
            if thread.is_alive():
                patience_s = WATCH_S  # one hangs: the others had as long as it
        self._ended.set()
        self._watcher.join()
        if any(thread.is_alive() for thread in self._threads):
            # The kernel still has descriptors and slots in hand: they end with the process.
            _log.warning("the disk of the disk tier hangs: it is left to the end of the process")
            return
        if self._peers is not None:
            self._peers.close()
        self._catalog.close()
        self._directory.close()
        self._outbox.close()

    def _make_peers(self, disk: Disk) -> Peers | None:
        if not self._config.shared:
            return None
        return Peers(
            self._config.directory,
            self._config.node,
            self._catalog,
            disk,
            direct=self._directory.direct,
            segments_max=self._config.foreign_segments_max,
        )

    def _make_scrub(self, disk: Disk) -> Scrub | None:
        if self._config.scrub is None:
            return None
        return Scrub(
            self._config.scrub,
            self._catalog,
            disk,
            self._clock,
            outbox=self._outbox,
            health=self._health,
            lock=self._lock,
            leaving=self._leaving,
            is_wanted=lambda: bool(self._reads) or self._log.is_wanted,
            is_recovered=lambda: self._log.is_recovered,
            voids=lambda: self._log.voids,
            table_of=self._log.table_of,
            direct=self._directory.direct,
        )

    def expire(self) -> None:
        """Act on deadlines that have passed. The watching thread calls it; a test may too."""
        with self._lock:
            now_ns = self._clock.now_ns()
            late = [job for job in self._reads.values() if job.deadline_ns <= now_ns]
            for job in late:
                if not job.late:
                    self._late(job, now_ns)
            self._log.expire(now_ns)

    def look_at_peers(self) -> None:
        """Shared mode: see what other nodes have now. Its thread calls it; a test may too."""
        if self._peers is None:
            return
        with self._peers_lock:
            self._peers.look(lambda known: self._outbox.known(known, own=False), self._outbox.put)
        with self._lock:
            due = self._log.due(self._clock.now_ns())
        for name, taken_bytes in due:
            self._directory.remove(name)
            with self._lock:
                self._log.purged(taken_bytes)

    # ── threads ──────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> None:
        try:
            if not self._restart.recover(
                lambda known: self._outbox.known(known, own=True), self._leaving.wait
            ):
                return
        finally:
            with self._lock:
                self._log.recovered(self._restart.voids)
            self._outbox.recovered()
        took_ns = self._look_once()
        self._outbox.put([RecoveryDone()])
        while self._peers is not None and not self._leaving.wait(
            max(self._config.poll_interval_ms / 1000, LOOK_PAUSES * took_ns / NS_PER_S)
        ):
            took_ns = self._look_once()

    def _look_once(self) -> int:
        """How long a look took."""
        begin_ns = self._clock.now_ns()
        self.look_at_peers()
        return self._clock.now_ns() - begin_ns

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            self.expire()

    def _serve(self, reader: Reader) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._runs or self._closing)
                if not self._runs:
                    return
                run = self._runs.popleft()
            result = RunResult([ReadVerdict.UNREAD] * len(run.wanted), _BUG)
            try:
                result = reader.read(run.number, run.job.scope, run.wanted)
            finally:
                self._account(run, result)  # a bug of ours keeps no slot either

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────

    def _account(self, run: RecordRun, result: RunResult) -> None:
        job = run.job
        with self._lock:
            lost: dict[ReadVerdict, list[int]] = {ReadVerdict.DAMAGED: []}
            if result.error is None:
                lost[ReadVerdict.UNREAD] = []
            for index, verdict in zip(run.indices, result.verdicts, strict=True):
                job.good[index] = verdict is ReadVerdict.GOOD
                if verdict in lost:
                    lost[verdict].append(index)
            now_ns = self._clock.now_ns()
            if result.error is not None:
                self._outbox.put(self._health.failed_reading(now_ns, result.error))
            elif ReadVerdict.GOOD in result.verdicts and not job.late:
                self._outbox.put(self._health.read())
            for verdict, indices in lost.items():
                if indices:
                    keys = b"".join(job.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in indices)
                    places = job.locations[indices].tobytes()
                    self._outbox.put(
                        [Gone(job.scope, keys, places, verdict is ReadVerdict.DAMAGED)]
                    )
            job.runs_left -= 1
            self._end_if_done(job)

    def _late(self, job: ReadJob, now_ns: int) -> None:
        """Take back what has not begun; the rest is in the kernel's hands."""
        waiting = [run for run in self._runs if run.job is job]
        if waiting:
            self._runs = deque(run for run in self._runs if run.job is not job)
            job.runs_left -= len(waiting)
        job.late = True
        self._outbox.put(self._health.late_reading(now_ns))
        if job.runs_left:
            self._outbox.put([Late(job.job)])
        self._end_if_done(job)

    def _end_if_done(self, job: ReadJob) -> None:
        if job.runs_left == 0:
            self._end(job)

    def _end(self, job: ReadJob) -> None:
        if self._reads.pop(job.job, None) is not None:
            self._read_bytes -= job.taken_bytes
            self._outbox.put([Read(job.job, bytes(job.good))])
            self._lock.notify_all()

    def _check(self, scope: Scope, keys: bytes, slots: Any) -> int:
        count = len(slots)
        assert len(keys) == count * KEY_BYTES
        assert scope.block_bytes > 0
        pages = payload_pages(scope.block_bytes)
        end = (int(slots.max()) + pages) * PAGE_BYTES if count else 0
        assert end <= len(self._memory), "a slot outside the arena"
        return count
