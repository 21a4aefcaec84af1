"""`FileTier`: blocks between slots of the arena and a disk. All that others call is here.

    config = FileConfig(Path("/var/lib/kvstore"), capacity_bytes=2 << 40)
    tier = FileTier(config, arena, clock).start()
    tier.submit(WriteFile(7, scope, keys, slots, checksums))      # → FileWritten
    tier.submit(ReadFile(8, scope, keys, slots, b"", locations))  # → FileRead

The contract is that of `kvstore.ports.FileStore`. Threads: one writer (`log_thread.py`), some
readers, one that recovers and then looks after other nodes' segments, one that watches deadlines,
one that scrubs (`scrub.py`). One lock guards queues and jobs; no I/O happens under it.

A job that is late keeps its slots: the kernel may still write to them at any time.

Does not cover: what is worth keeping (`kvstore.engine`), the map of the parts (`__init__.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from functools import partial
from typing import Any, Final, Self

import numpy as np

from kvstore.breaker import BreakerState
from kvstore.ports import Clock
from kvstore.tier_events import (
    FileCommand,
    FileGone,
    FileLate,
    FileRead,
    ReadFile,
    ReclaimFile,
    RecoveryDone,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.catalog import Catalog
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.directory import cannot_be_read, open_directory
from kvstore.tiers.file.discovery import Peers, Restart
from kvstore.tiers.file.disk import Disk
from kvstore.tiers.file.log_thread import LogThread
from kvstore.tiers.file.parts import FileJob, FileJobs, Health, Leaving, Outbox, Parts
from kvstore.tiers.file.reader import Look, Reader, ReadVerdict, RecordRun, RunResult, split
from kvstore.tiers.file.scrub import Scrub
from kvstore.tiers.file.writer import Writer
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES
from kvstore.units import NS_PER_S
from kvstore.wire.record import payload_pages

WATCH_S: Final = 0.05
"""How late a deadline is noticed at most."""
LOOK_PAUSES: Final = 10
"""The pause after a look at other nodes' directories is at least this many times as long as the
look: where there are very many segments, all nodes would look at them without end."""
LOOK_PAUSE_MAX_S: Final = 60.0
"""Longest pause by that rule: a look that a disk or the machine held up for an hour says nothing
about the next one."""
_BUG: Final = OSError(errno.EIO, "a bug in the disk tier")

_log = logging.getLogger(__name__)


class FileTier:
    """One open directory. Calls come from one thread."""

    def __init__(
        self,
        config: FileConfig,
        arena: Any,
        clock: Clock,
        *,
        disk: Disk | None = None,
        lock_fd: int = -1,
        outbox: Outbox | None = None,
        look: Look = None,
    ) -> None:
        """Open or make the directory.

        Args:
            config: where, and how much.
            arena: all of the memory that holds slots, writable, 4 KiB aligned.
            clock: for deadlines.
            disk: the system calls; tests give their own.
            lock_fd: the directory's lock, if an earlier process left it.
            outbox: where events go, if that is watched already; the tier's from now on.
            look: copies bytes of the arena (`Arena.read`), where engines share it.

        Raises:
            ConfigError: the directory cannot be used; the text says why and what to do.
        """
        self._config = config
        self._clock = clock
        self._memory = memoryview(arena).cast("B")
        self._lock = threading.Condition()
        self._health = Health(config)
        self._runs: deque[tuple[FileJob[ReadFile], RecordRun]] = deque()
        self._leaving = threading.Event()
        self._ended = threading.Event()
        disk = disk or Disk()
        self._directory = open_directory(config, disk, lock_fd)
        self._outbox = outbox or Outbox()
        self.fileno, self.take_events = self._outbox.fileno, self._outbox.take
        try:
            self._make_parts(disk, look)
        except OSError as error:
            self._directory.close()
            raise cannot_be_read(config.home, error) from error
        except BaseException:
            self._directory.close()
            raise

    def _make_parts(self, disk: Disk, look: Look) -> None:
        """Make parts and threads of the tier, for the directory that was opened. Raises OSError."""
        config, directory = self._config, self._directory
        self.path, self.note = directory.path, directory.note()
        self.is_direct = direct = directory.direct
        self._catalog = Catalog(disk, capacity_bytes=config.capacity_bytes, direct=direct)
        its = self._catalog, self._outbox, self._health, self._lock, self._leaving
        parts = Parts(config, self._clock, disk, directory, *its)
        self._reads = FileJobs[ReadFile](parts, config.read_deadline_ms)
        self._restart = Restart(parts)
        writer = Writer(
            *(directory, self._catalog, disk),
            segment_bytes=config.segment_size,
            number=self._restart.next_number,
            follows_closed=self._restart.newest_is_closed,
        )
        self._log = LogThread(parts, self._memory, writer)
        self.wait_for_voids, self.keep_note = self._log.wait_for_voids, self._log.keep_note
        self._peers = Peers(parts) if config.shared else None
        thread = partial(threading.Thread, daemon=True)
        self._watcher = thread(target=self._watch, name="file-watch")
        self._threads = [
            thread(target=self._log.run, name="file-log"),
            thread(target=self._recover, name="file-recovery"),
        ]
        for _ in range(config.reader_count):
            reader = Reader(self._catalog, self._memory, direct=direct, look=look)
            self._threads.append(thread(target=self._serve, args=(reader,), name="file-read"))
        if config.scrub is not None:
            scrub = Scrub(config.scrub, parts, self._log, self._reads)
            self._threads.append(thread(target=scrub.run, name="file-scrub"))

    def start(self) -> Self:
        """Begin to look for what is in the directory, and to serve."""
        for thread in (*self._threads, self._watcher):
            thread.start()
        return self

    # ── what the driver calls ────────────────────────────────────────────────────────────────────

    @property
    def taken_bytes(self) -> int:
        """Bytes in use, of the capacity; the open segment is counted whole."""
        return self._catalog.taken_bytes

    @property
    def lock_fd(self) -> int:
        """Descriptor of the directory's lock: whoever holds a copy of it keeps others out."""
        return self._directory.lock_fd

    @property
    def breakers(self) -> tuple[BreakerState, BreakerState]:
        return self._health.states

    def submit(self, command: FileCommand) -> bool:
        if isinstance(command, WriteFile | ReadFile):
            self._check(command)
        with self._lock:
            match command:
                case WriteFile():
                    return self._log.submit(command)
                case ReadFile():
                    return self._read(command)
                case VoidFile(tenant=tenant, space=space):
                    self._outbox.void(tenant, space)
                    self._log.void(command)
                case ReclaimFile():
                    self._log.reclaim(command)
        return True

    def _read(self, order: ReadFile) -> bool:
        """Queue a read, with the lock held. False: it is refused."""
        if (job := self._reads.begin(order, self._health.allows_read)) is None:
            return False
        job.results = [0] * len(order.slots)
        runs = split(order)
        job.runs = len(runs)
        self._runs += [(job, run) for run in runs]
        self._end_if_done(job)
        return True

    def close(self) -> None:
        """The open segment is closed and synced. A disk that hangs is waited for no longer than
        `close_deadline_ms`."""
        with self._lock:
            if self._reads.is_closed:
                return
            self._reads.is_closed = True
            self._log.close(self._clock.now_ns())
            for job, _ in self._runs:
                job.runs -= 1
                self._end_if_done(job)
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
            _log.warning("the disk hangs: its thread is abandoned at exit")
            return
        if self._peers is not None:
            self._peers.close()
        self._catalog.close()
        self._directory.close()
        self._outbox.close()

    def expire(self) -> None:
        """Act on deadlines that have passed. The watching thread calls it; a test may too."""
        with self._lock:
            now_ns = self._clock.now_ns()
            for job in self._reads.overdue(now_ns):
                self._late(job, now_ns)
            self._log.expire(now_ns)

    def look_at_peers(self) -> int:
        """Shared mode: see what other nodes have now. Returns how long it took, in ns. Its thread
        calls it; a test may while that pauses. Raises Leaving."""
        begin_ns = self._clock.now_ns()
        if self._peers is not None:
            self._peers.look()
            self._log.purge()
        return self._clock.now_ns() - begin_ns

    # ── threads ──────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> None:
        with contextlib.suppress(Leaving):
            try:
                self._restart.recover()
            finally:
                with self._lock:
                    self._log.recovered(self._restart.voids)
                self._outbox.recovered()
            took_ns = self.look_at_peers()
            self._outbox.put(RecoveryDone())
            poll_s = self._config.poll_interval_ms / 1000
            while self._peers is not None and not self._leaving.wait(look_pause_s(poll_s, took_ns)):
                took_ns = self.look_at_peers()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            self.expire()

    def _serve(self, reader: Reader) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._runs or self._reads.is_closed)
                if not self._runs:
                    return
                job, run = self._runs.popleft()
            result = RunResult([ReadVerdict.UNREAD] * len(run.indexes), _BUG)
            try:
                result = reader.read(run.number, job.order, run.indexes)
            finally:
                self._account(job, run, result)  # a bug of ours keeps no slot either

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────

    def _account(self, job: FileJob[ReadFile], run: RecordRun, result: RunResult) -> None:
        order = job.order
        with self._lock:
            found = list(zip(run.indexes, result.verdicts, strict=True))
            for index, verdict in found:
                job.results[index] = verdict is ReadVerdict.GOOD
            if result.error is not None:
                self._outbox.put(*self._health.failed_reading(self._clock.now_ns(), result.error))
            elif ReadVerdict.GOOD in result.verdicts and not job.late:
                self._outbox.put(*self._health.read())
            for lost in (ReadVerdict.DAMAGED, ReadVerdict.UNREAD):
                rows = [index for index, verdict in found if verdict is lost]
                is_damaged = lost is ReadVerdict.DAMAGED
                if rows and (is_damaged or result.error is None):
                    keys = np.frombuffer(order.keys, "V32")[rows].tobytes()
                    places = np.frombuffer(order.locations, np.uint64)[rows].tobytes()
                    self._outbox.put(FileGone(order.scope, keys, places, is_damaged))
            job.runs -= 1
            self._end_if_done(job)

    def _late(self, job: FileJob[ReadFile], now_ns: int) -> None:
        """Act on a read that is late: take back its runs that have not begun; the others are in the
        kernel's hands."""
        job.runs -= sum(its is job for its, _ in self._runs)
        self._runs = deque((its, run) for its, run in self._runs if its is not job)
        job.late = True
        self._outbox.put(*self._health.failed_reading(now_ns, None))
        if job.runs:
            self._outbox.put(FileLate(job.order.job))
        self._end_if_done(job)

    def _end_if_done(self, job: FileJob[ReadFile]) -> None:
        if job.runs == 0:
            self._reads.end(job, FileRead(job.order.job, bytes(job.results)))

    def _check(self, order: WriteFile | ReadFile) -> None:
        """Assert that an order makes sense."""
        count, is_read = len(order.slots), isinstance(order, ReadFile)
        assert len(order.keys) == count * KEY_BYTES
        assert len(order.checksums) == count * CHECKSUM_BYTES or (is_read and not order.checksums)
        assert order.scope.block_bytes > 0
        pages = payload_pages(order.scope.block_bytes)
        end = (int(order.slots.max()) + pages) * PAGE_BYTES if count else 0
        assert end <= len(self._memory), "a slot outside the arena"
        if isinstance(order, ReadFile):
            assert len(order.locations) == 8 * count
            assert np.frombuffer(order.locations, np.uint64).all(), "0 is no location"


def look_pause_s(poll_s: float, took_ns: int) -> float:
    """Pause from a look at other nodes' directories, which took `took_ns`, to the next one."""
    return max(poll_s, min(LOOK_PAUSES * took_ns / NS_PER_S, LOOK_PAUSE_MAX_S))
