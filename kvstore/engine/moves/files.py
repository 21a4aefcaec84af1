"""The disk tier as the engine sees it: promotions, and blocks kept from reclaimed segments.

    sealed in dram ──▶ written through, if it is worth it (`writes`)
    asked for      ──ReadFile───▶ slots held  ──FileRead─────▶ sealed in dram, waiting leases grow
    segment to go  ──FileReclaim─▶ blocks asked for since they were written stay, all others go

Rules. 1: a slot that is being read into belongs to FILE_WRITER until the read has truly ended,
however late. 2: a block that was read counts only if it is still wanted: its row is there and not
in dram. 3: at most a quarter of the arena is in motion each way.

Covers: reads, places on disk. Does not cover: writes (`writes`), leases that wait (`arrivals`), the
I/O, its deadlines and checksums (`kvstore.tiers.file`), where blocks are (`residency`), how long a
promotion takes (`pace`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import (
    FileGone,
    FileKnown,
    FileLate,
    FileMoved,
    FileRead,
    FileReclaim,
    FileWritten,
    ReadFile,
    ReclaimFile,
    VoidFile,
)
from kvstore.engine.memory.slots import FILE_WRITER
from kvstore.engine.memory.table import NO_ROWS, Keys, Rows
from kvstore.engine.moves.arrivals import Arrivals
from kvstore.engine.moves.intake import Copies, Incoming, Intake
from kvstore.engine.moves.jobs import Jobs, pieces
from kvstore.engine.moves.pace import ReadPace
from kvstore.engine.moves.writes import Writes
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.runs import has_repeats, leading
from kvstore.engine.state import State
from kvstore.engine.why.reasons import Reason
from kvstore.types import KEY_BYTES, SpaceId, Tier
from kvstore.units import MIB
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, keys_array
from kvstore.wire.record import Scope

READ_BYTES = 8 * MIB
"""Most bytes of one read: a request takes the blocks that came in time, piece by piece."""
READ_AHEAD_NS = 10**9
"""The disk is asked for no more at once than it reads in about this time, or all would be late; a
lease that waits asks for more whenever some came. Half of it is for requests that come meanwhile,
and each of them gets half of the rest: a long prompt does not block the disk."""
PROMOTED_BLOCKS_MAX = KEYS_PER_DATAGRAM_MAX
"""Most blocks, times shards, of one call of `promote`; later ones are read when they are asked
for."""
REPEATED = -1
"""Result of `promote` when the keys name one twice."""
KEEP_SHARE = 4
"""At most one part in this many of a reclaimed segment is kept."""
FOREIGN_LOCATION = np.uint64(1 << 63)
"""Locations from here on are records of other nodes."""


class _Read(Incoming):
    """A read of blocks of one shard from disk; its slots belong to FILE_WRITER until it ends."""

    rows: Rows
    checksums: NDArray[np.uint64]
    """Expected checksums, which the tier verifies: when the read ends, the row may be that of
    another copy."""
    late: bool = False
    """Whether the read was reported late: no lease waits for it any more."""


class Files:
    """Decides which blocks to read from disk and which to keep, and records their places."""

    def __init__(
        self,
        state: State,
        intake: Intake,
        arrivals: Arrivals,
        writes: Writes,
        numbers: Iterator[int],
    ) -> None:
        self._state = state
        self._intake = intake
        self._arrivals = arrivals
        self.writes = writes
        rows = state.residency.table.row_count_max
        self._reading = np.zeros(rows + 1, dtype=np.int32)
        """Number of the job that reads each row, 0 for none; row -1 reads as none."""
        self._asked_for = np.zeros(rows, dtype=bool)
        """Flag of each row: whether a request named the block since its record was written."""
        self._reads: Jobs[_Read] = Jobs(numbers, arena_bytes=state.config.arena_bytes)
        self.next_location = 1
        """A location greater than those of all own records so far: the log is written in ascending
        order."""
        self.left_out_count = 0
        """Number of blocks that the tier reported and that the table had no row for."""
        self.pace = ReadPace(state.config.learned.disk_ns_per_mib)

    @property
    def enabled(self) -> bool:
        """Whether this node has a disk tier."""
        return self._state.config.file_bytes > 0

    def written(self, event: FileWritten) -> None:
        """A write ended, well or not: record the places on disk."""
        self._place(*self.writes.ended(event))

    # ── disk to dram ─────────────────────────────────────────────────────────────────────────────

    def promote(
        self, asker: Asker, keys: Keys, *, held: Rows = NO_ROWS, is_more: bool = False
    ) -> int:
        """Begin to read those of these keys, in chain order, that are on disk and not in dram.
        Returns how many leading ones are in dram or on their way, or REPEATED, with nothing begun.
        `held`: rows of the first shard that the same request has leased already; `is_more`: the
        same prompt has had blocks read before."""
        state = self._state
        if not self.enabled:
            return 0
        keys = keys[: PROMOTED_BLOCKS_MAX // max(len(asker.scopes), 1)]
        rows = state.residency.find_all(asker.scopes, keys)
        count = leading(self.there(rows))
        rows = rows[:, :count]
        if has_repeats(np.concatenate([held, rows[0]])):
            return REPEATED
        self._asked_for[rows] = True
        away = (state.residency.words(rows) < 0) & (self._reading[rows] == 0)
        columns = np.flatnonzero(away.any(axis=1)).tolist()
        if not columns:
            return count
        size = sum(asker.slot_sizes[column] for column in columns)
        room = self._room(asker, size, is_more=is_more)
        places = np.flatnonzero(away.any(axis=0)).tolist()
        first, count = places[0], count if room >= len(places) else places[room]
        piece = max(1, READ_BYTES // max(asker.slot_sizes))
        # Piece by piece in all shards: a block is there with the last one of them.
        for begin in range(first, count, piece):
            for column in columns if begin < count else ():
                wanted = begin + np.flatnonzero(away[column, begin : min(begin + piece, count)])
                started = self._start(asker, column, keys[wanted], rows[column, wanted])
                if started < len(wanted):
                    count = int(wanted[started])
        return count

    def there(self, rows: Rows) -> NDArray[np.bool_]:
        """Flags of the rows that are in dram, on their way, or on disk."""
        residency = self._state.residency
        there: NDArray[np.bool_] = (residency.words(rows) >= 0) | (self._reading[rows] != 0)
        there |= (rows >= 0) & (residency.file[rows] != 0)
        return there

    def _room(self, asker: Asker, size: int, *, is_more: bool) -> int:
        """How many more blocks of this size may be under way."""
        ahead_bytes = int(READ_AHEAD_NS / self.pace.ns_per_byte(self._state.now_ns))
        ahead_bytes = min(ahead_bytes, self._reads.bytes_max)
        begun_bytes = self.pace.begun_bytes  # without late reads, which keep nobody from the disk
        if is_more or asker.is_ahead:
            room = (ahead_bytes // 2 - begun_bytes) // size
        else:
            room = ((ahead_bytes - begun_bytes) // size + 1) // 2
        return min(max(room, 0 if begun_bytes else 1), self._reads.room(size))

    def _start(self, asker: Asker, column: int, keys: Keys, rows: Rows) -> int:
        """Issue reads for these rows of one shard as far as there is room; returns how many."""
        its = asker.column(column)
        wanted = self._intake.room_for(its, len(rows))
        for piece in pieces(wanted, READ_BYTES // its.slot_sizes[0]):
            self._read(its, keys[piece], rows[piece])
        return wanted

    def _read(self, asker: Asker, keys: Keys, rows: Rows) -> None:
        state, (shard,), (block_bytes,) = self._state, asker.shards, asker.block_bytes
        columns = self._intake.hold(asker, len(rows), [FILE_WRITER])
        checksums = state.residency.checksum[rows]
        read = _Read(rows, checksums, asker=asker, keys=keys, columns=columns)
        job = self._reads.begin(read)
        self.pace.begun(job, read.size_bytes, state.now_ns)
        self._reading[rows] = job
        state.say(
            ReadFile(
                job=job,
                scope=Scope(*asker.address, shard, block_bytes),
                keys=keys.tobytes(),
                locations=state.residency.file[rows].tobytes(),
                slots=state.slots.slots_of(read.words),
                checksums=checksums.tobytes(),
                cause=state.cause,
            )
        )

    def read(self, event: FileRead) -> None:
        """A read has truly ended: seal its good blocks that are still wanted. The tier reports
        damaged ones itself (FileGone)."""
        state, job = self._state, self._reads.end(event.job)
        self._no_more_reading(event.job, job)
        good = np.frombuffer(event.good, dtype=np.bool_)
        was_awaited = self._arrivals.awaits(job.keys)
        (scope,) = job.asker.scopes
        self._intake.read(Copies(scope, job.keys, job.words, job.checksums), good)
        state.counters.file_blocks_read += int(good.sum())
        state.counters.file_blocks_unread += int((~good).sum())
        counts = bool(good.any())
        self.pace.ended(event.job, state.now_ns, counts=counts, was_awaited=was_awaited)

    def late(self, event: FileLate) -> None:
        """A read is late: no lease waits for it any more, and its slots stay taken until it has
        ended."""
        job = self._reads.get(event.job)
        if job is not None and not job.late:
            job.late = True
            self._state.counters.file_reads_late += 1
            self._no_more_reading(event.job, job)
            self.pace.late(event.job)
            self._arrivals.settle_keys(job.keys)

    def estimate_ms(self, asker: Asker, keys: Keys) -> int:
        """Estimated time in ms until those of these keys that are being read have come."""
        rows = self._state.residency.find_all(asker.scopes, keys)
        return self.pace.estimate_ms(int(self._reading[rows].max()), self._state.now_ns)

    def _no_more_reading(self, number: int, job: _Read) -> None:
        mine = job.rows[self._reading[job.rows] == number]
        self._reading[mine] = 0

    def coming(self, scopes: Sequence[int], keys: Keys, rows: Rows) -> NDArray[np.bool_]:
        """Flags of the rows that are being read (`arrivals.Source`)."""
        being_read: NDArray[np.bool_] = self._reading[rows] != 0
        return being_read

    # ── what the tier tells ──────────────────────────────────────────────────────────────────────

    def _number_of(self, scope: Scope) -> int:
        return self._state.residency.scope(scope.tenant, SpaceId(scope.space), scope.shard)

    def _live(self, scope: Scope, keys: bytes, locations: bytes) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of these blocks, and flags of those whose place on disk is the one in `locations`;
        with empty `locations`, flags of those that have a row."""
        residency = self._state.residency
        rows = residency.find(self._number_of(scope), keys_array(keys))
        live = rows >= 0
        if locations:
            live[live] = residency.file[rows[live]] == np.frombuffer(locations, dtype="<u8")[live]
        return rows, live

    def known(self, event: FileKnown) -> None:
        """The tier reports blocks that it holds. If it holds a block in several places, the one
        written last counts."""
        state = self._state
        if state.is_off(event.scope.tenant, SpaceId(event.scope.space), Tier.FILE):
            return
        state.forget_unused_scopes()
        scope = self._number_of(event.scope)
        _, first = np.unique(np.frombuffer(event.keys, dtype="V32"), return_index=True)
        keys = keys_array(event.keys)[first]
        locations = np.frombuffer(event.locations, dtype="<u8")[first]
        checksums = np.frombuffer(event.checksums, dtype="<u8").reshape(-1, 2)[first]
        rows = state.residency.find(scope, keys)
        absent = np.flatnonzero(rows < 0)
        fits = absent[: max(0, state.residency.spare_rows)]
        self.left_out_count += len(absent) - len(fits)
        state.counters.file_blocks_crowded += len(absent) - len(fits)
        rows[fits] = state.residency.insert(scope, keys[fits])
        state.residency.checksum[rows[fits]] = checksums[fits]
        place = rows >= 0
        place[place] = _is_newer(locations[place], state.residency.file[rows[place]])
        same = state.residency.checksum[rows[place]] == checksums[place]
        place[place] = same.all(axis=1)
        self._place(rows[place], locations[place])

    def _place(self, rows: Rows, locations: NDArray[np.uint64]) -> None:
        self._asked_for[rows] = False
        own = locations[locations < FOREIGN_LOCATION]
        self.next_location = max(self.next_location, int(own.max(initial=0)) + 1)
        self._state.residency.put_file(rows, locations)

    def moved(self, event: FileMoved) -> None:
        """Blocks kept from a reclaimed segment have new places. A block that was written again
        meanwhile keeps that later place."""
        rows, live = self._live(event.scope, event.keys, event.old_locations)
        self._place(rows[live], np.frombuffer(event.locations, dtype="<u8")[live])

    def gone(self, event: FileGone) -> None:
        """The tier holds these blocks no more, at these places."""
        rows, live = self._live(event.scope, event.keys, event.locations)
        if event.damaged:
            self._state.counters.file_blocks_damaged += len(event.keys) // KEY_BYTES
        stamp = self._state.stamp(Reason.FILE_LOST)
        self._state.residency.drop_file(np.unique(rows[live]), stamp)

    def reclaim(self, event: FileReclaim) -> None:
        """A segment is to be reclaimed: answer which blocks to keep, those asked for since they
        were written, within KEEP_SHARE and the budget. The other blocks are forgotten."""
        state = self._state
        total = sum(len(part.keys) // KEY_BYTES for part in event.parts)
        room, kept = total // KEEP_SHARE, []
        for part in event.parts:
            rows, live = self._live(part.scope, part.keys, part.locations)
            hot = np.flatnonzero(live)
            hot = hot[self._asked_for[rows[hot]]][:room]
            if state.is_off(part.scope.tenant, SpaceId(part.scope.space), Tier.FILE):
                hot = hot[:0]  # moved, they would be newer than what makes them void
            hot = hot[: self.writes.allow(len(hot), block_bytes=part.scope.block_bytes)]
            room -= len(hot)
            kept.append(np.frombuffer(part.locations, dtype="<u8")[hot])
            live[hot] = False
            gone = np.unique(rows[live])
            written = state.residency.file[gone].astype(np.int64)
            state.ages[Tier.FILE].evicted(written, state.now_ns)
            state.residency.drop_file(gone, state.stamp(Reason.RECLAIMED))
        keep = np.concatenate(kept).tobytes() if kept else b""
        state.say(ReclaimFile(segment=event.segment, keep=keep, cause=state.cause))

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """Void cleared blocks on disk, so that they do not come back with a restart."""
        if self.enabled:
            self._state.say(VoidFile(tenant=tenant, space=space, cause=self._state.cause))


def _is_newer(new: NDArray[np.uint64], old: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Flags of the new places that supersede the old ones: any place supersedes none (0), an own
    place a foreign one, and a greater own place a smaller one."""
    own = new < FOREIGN_LOCATION
    newer: NDArray[np.bool_] = (old == 0) | (own & ((old >= FOREIGN_LOCATION) | (new > old)))
    return newer
