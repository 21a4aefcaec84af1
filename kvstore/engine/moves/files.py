"""The disk tier as the engine sees it: promotions, and blocks kept from reclaimed segments.

    sealed in dram ──▶ written through, if it is worth it (`writes`)
    asked for ──queue──ReadFile──▶ slots held ──FileRead─────▶ sealed in dram, waiting leases grow
    segment to go ──FileReclaim──▶ blocks asked for since they were written stay, all others go

Rules. 1: a slot that is being read into belongs to FILE_WRITER until the read has truly ended,
however late. 2: a block that was read counts only if it is still wanted: its row is there and not
in dram. 3: at most a quarter of the arena is in motion each way. 4: while reads are queued, one is
under way, at whose end the next one begins.

Covers: reads, their order, places on disk. Does not cover: writes (`writes`), leases that wait
(`arrivals`), the I/O of reads, deadlines and checksums (`kvstore.tiers.file`), where blocks are
(`residency`), how long a promotion takes (`jobs`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore import tier_events
from kvstore.engine.memory.residency import has_repeats, leading
from kvstore.engine.memory.slots import FILE_WRITER
from kvstore.engine.memory.table import NO_ROWS, Keys, Rows
from kvstore.engine.moves.arrivals import NOBODY, Arrivals, Flags, Name
from kvstore.engine.moves.intake import Copies, Incoming, Intake
from kvstore.engine.moves.jobs import Jobs, ReadPace
from kvstore.engine.moves.writes import Writes
from kvstore.engine.sessions.owners import Asker
from kvstore.engine.state import State
from kvstore.engine.why.reasons import Reason
from kvstore.types import KEY_BYTES, SpaceId, Tier
from kvstore.units import MIB, NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, keys_array
from kvstore.wire.record import Scope

# ── queue ─────────────────────────────────────────────────────────────────────────────────────────
# Blocks that watches wait for, the shortest rest first.
#
#     enter ──first──▶ drop (its reads begun) … ──empty, or its watch is over: leave──▶ over
#
# Shortest remaining processing time has the least mean wait (Schrage, 1968), and a long prompt
# keeps nobody from the disk. A prompt that shorter ones pass for too long is computed: its engine
# waits no longer, and it leaves the queue.
#
# Costs of a call grow with the blocks of its read and READS_COUNTED, not with the table.

READS_COUNTED: Final = 1024
"""Most reads that an estimate adds up: nobody waits for so many."""


class _QueuePlace(NamedTuple):
    size_bytes: int
    """When it was entered: what a read has less by now was at the front."""
    number: int
    name: Name


class QueuedRead(msgspec.Struct):
    """Blocks on disk that one watch waits for and that are not being read yet, in chain order."""

    place: _QueuePlace
    asker: Asker
    keys: Keys
    rows: Rows
    """Their rows when they were queued, [S][n]; a row may be that of another block by now."""
    new_bytes: int
    """Bytes that no other read had when this one was entered."""

    @property
    def slots_bytes(self) -> int:
        """Size of the slots of one block, in all shards."""
        return sum(self.asker.slot_sizes)

    @property
    def size_bytes(self) -> int:
        """Size of the slots of all blocks."""
        return len(self.keys) * self.slots_bytes


class ReadQueue:
    """Queued reads by name, one for each, and their order."""

    def __init__(self, row_count_max: int) -> None:
        self._reads: dict[Name, QueuedRead] = {}
        self._order: list[_QueuePlace] = []
        """Sorted."""
        self._numbers = itertools.count(1)
        self._queued = np.zeros(row_count_max + 1, dtype=np.int32)
        """Number of the reads that each row is in; none for row -1."""
        self._mark = np.zeros(row_count_max + 1, dtype=bool)
        """Flags of the rows of one read, while `has` looks at it."""

    def __len__(self) -> int:
        return len(self._reads)

    def enter(self, name: Name, asker: Asker, keys: Keys, rows: Rows) -> None:
        """Queue these blocks, at least one, instead of those of an earlier read of this name."""
        old = self._reads.get(name)
        if old is not None and np.array_equal(old.rows, rows):
            return
        self.leave(name)
        slots_bytes = sum(asker.slot_sizes)
        new_bytes = int(np.count_nonzero(self._queued[rows[0]] == 0)) * slots_bytes
        place = _QueuePlace(len(keys) * slots_bytes, next(self._numbers), name)
        self._reads[name] = QueuedRead(place, asker, keys, rows, new_bytes)
        self._queued[rows] += 1
        bisect.insort(self._order, place)

    def leave(self, name: Name) -> None:
        """End the read of this name, if there is one."""
        if (read := self._reads.pop(name, None)) is not None:
            del self._order[bisect.bisect_left(self._order, read.place)]
            self._queued[read.rows] -= 1

    def drop(self, read: QueuedRead, count: int) -> None:
        """Take the first blocks out of the queue; the read is over with the last one."""
        self._queued[read.rows[:, :count]] -= 1
        read.keys, read.rows = read.keys[count:], read.rows[:, count:]
        if not len(read.keys):
            self.leave(read.place.name)

    @property
    def first(self) -> QueuedRead | None:
        """The next read; None: nobody waits."""
        return self._reads[self._order[0].name] if self._order else None

    def has(self, name: Name, rows: Rows) -> Flags:
        """Flags of the rows that this watch has queued itself: other watches may end before theirs
        are read."""
        own = self._reads[name].rows if name in self._reads else NO_ROWS
        self._mark[own] = True
        flags: Flags = self._mark[rows]
        self._mark[own] = False
        return flags

    def bytes_until(self, name: Name) -> int:
        """Bytes to be read until the last block of this read is there, those of reads before it
        included, each block about once; 0: none of its blocks is queued."""
        own = self._reads.get(name)
        if own is None:
            return 0
        before = self._order[: min(READS_COUNTED, bisect.bisect_left(self._order, own.place))]
        reads = [own, *(self._reads[place.name] for place in before)]
        return max(sum(min(each.new_bytes, each.size_bytes) for each in reads), own.size_bytes)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────

READ_BYTES = 8 * MIB
"""Most bytes of one read: a request takes the blocks that came in time, piece by piece."""
LOOKED_AT = 512
"""Most keys of a queued read that are looked up at once: more than those of one read."""
BEGUN_PER_STEP = 64
"""Most pieces of queued reads that are begun, or found to be here or gone, at once: this bounds the
time of a step. The next one follows at once."""
READ_AHEAD_NS = NS_PER_S // 2
"""The disk is asked for no more at once than it reads in about this time: the rest stays queued,
where others may pass it and what is no longer waited for costs nothing. Blocks that nobody waits
for take half of it, and only while nothing is queued."""
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

    def __init__(self, state: State, intake: Intake, arrivals: Arrivals, writes: Writes) -> None:
        self._state = state
        self._intake = intake
        self._arrivals = arrivals
        self.writes = writes
        rows = state.residency.table.row_count_max
        self._queue = ReadQueue(rows)
        arrivals.over = self._queue.leave
        self.is_behind = False
        """Whether queued reads may begin at the next `advance`: a read ended, or was late, or not
        all was looked at."""
        self._asked_for = np.zeros(rows, dtype=bool)
        """Flag of each row: whether a request named the block since its record was written."""
        self._reads: Jobs[_Read] = Jobs(state.numbers, state.config.arena_bytes, places=rows)
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

    def written(self, event: tier_events.FileWritten) -> None:
        """A write ended, well or not: record the places on disk."""
        self._place(*self.writes.ended(event))

    # ── disk to dram ─────────────────────────────────────────────────────────────────────────────

    def promote(
        self, asker: Asker, keys: Keys, *, held: Rows = NO_ROWS, name: Name = NOBODY
    ) -> int:
        """Bring those of these keys, in chain order, that are on disk and not in dram. Returns how
        many leading ones are in dram or on their way, or REPEATED, with nothing begun.
        `held`: rows of the first shard that the same request has leased already; `name`: the watch
        that waits for the blocks; for NOBODY what the disk has no time for now is not read."""
        state = self._state
        if not self.enabled:
            return 0
        keys = keys[: PROMOTED_BLOCKS_MAX // max(len(asker.scopes), 1)]
        rows = state.residency.table.find_all(asker.scopes, keys)
        count = leading(self.there(rows))
        keys, rows = keys[:count], rows[:, :count]
        if has_repeats(np.concatenate([held, rows[0]])):
            return REPEATED
        self._asked_for[rows] = True
        places = np.flatnonzero(self._is_away(rows).any(axis=0))
        if not len(places):
            self._queue.leave(name)
            return count
        if name != NOBODY or not len(self._queue):
            self._queue.enter(name, asker, keys[places], rows[:, places])
            self._serve()
            self._queue.leave(NOBODY)
        count = leading((state.residency.words(rows) >= 0) | self.coming((), keys, rows, name))
        if not count:  # its first block gave way to what was brought before
            self._queue.leave(name)
        return count

    def there(self, rows: Rows) -> Flags:
        """Flags of the rows that are in dram, on their way, or on disk."""
        residency = self._state.residency
        there: Flags = (residency.words(rows) >= 0) | (residency.file[rows] != 0)
        there |= self._reads.at[rows] != 0
        return there

    def _is_away(self, rows: Rows) -> Flags:
        """Flags of the rows that are on disk, not in dram and not being read."""
        residency = self._state.residency
        away: Flags = (residency.file[rows] != 0) & (residency.words(rows) < 0)
        away &= self._reads.at[rows] == 0
        return away

    def advance(self) -> None:
        """Begin the next reads, if one ended since this was last called: once a step."""
        if self.is_behind:
            self._serve()

    def _serve(self) -> None:
        """Begin to read what is queued, as far as there is room."""
        self.is_behind = False
        for _ in range(BEGUN_PER_STEP):
            if (queued := self._queue.first) is None:
                return
            room = self._room(queued)
            if not room and self.pace.begun_bytes:
                return  # until one of these reads ends
            if not room or not self._begin(queued, room):  # the rest is not coming
                self._arrivals.settle_keys(queued.keys)
                self._queue.drop(queued, len(queued.keys))
        self.is_behind = True

    def _room(self, queued: QueuedRead) -> int:
        """How many more blocks of a queued read may be under way. 0 while none is: reads that are
        late and never end have all the room."""
        ahead_bytes = int(READ_AHEAD_NS / self.pace.ns_per_byte(self._state.now_ns))
        ahead_bytes = min(ahead_bytes, self._reads.bytes_max)
        if queued.place.name == NOBODY:
            ahead_bytes //= 2
        begun_bytes = self.pace.begun_bytes  # without late reads, which keep nobody from the disk
        room = (ahead_bytes - begun_bytes) // queued.slots_bytes
        return min(max(room, 0 if begun_bytes else 1), self._reads.room(queued.slots_bytes))

    def _begin(self, queued: QueuedRead, room: int) -> bool:
        """Begin to read the first piece of what is queued, at most `room` blocks, in all shards: a
        block is there with the last one of them. False: dram has no room."""
        keys = queued.keys[:LOOKED_AT]
        rows = self._state.residency.table.find_all(queued.asker.scopes, keys)
        away = self._is_away(rows)
        if over := leading(~away):  # they came otherwise, or are on disk no more
            self._arrivals.settle_keys(keys[:over])
            self._queue.drop(queued, over)
            return True
        count = min(room, max(1, READ_BYTES // max(queued.asker.slot_sizes)))
        for column, its_away in enumerate(away[:, :count]):
            wanted = np.flatnonzero(its_away)
            its = queued.asker.column(column)
            fits = self._intake.room_for(its, len(wanted))
            if fits:
                self._read(its, keys[wanted[:fits]], rows[column, wanted[:fits]])
            if fits < len(wanted):
                return False
        self._queue.drop(queued, min(count, len(keys)))
        return True

    def _read(self, asker: Asker, keys: Keys, rows: Rows) -> None:
        state, (shard,), (block_bytes,) = self._state, asker.shards, asker.block_bytes
        columns = self._intake.hold(asker, len(rows), [FILE_WRITER])
        checksums = state.residency.checksum[rows]
        read = _Read(rows, checksums, asker=asker, keys=keys, columns=columns)
        scope = Scope(*asker.address, shard, block_bytes)
        locations = state.residency.file[rows].tobytes()
        job = self._reads.begin(read, rows)
        self.pace.begun(job, read.size_bytes, state.now_ns)
        state.say(tier_events.ReadFile(job, scope, *state.named(rows, read.words), locations))

    def read(self, event: tier_events.FileRead) -> None:
        """A read has truly ended: seal its good blocks that are still wanted. The tier reports
        damaged ones itself (FileGone)."""
        state, job = self._state, self._reads.end(event.job)
        self._reads.leave(event.job, job.rows)
        good = np.frombuffer(event.good, dtype=np.bool_)
        was_awaited = self._arrivals.awaits(job.keys)
        (scope,) = job.asker.scopes
        self._intake.read(Copies(scope, job.keys, job.words, job.checksums), good)
        state.counters.file_blocks_read += int(good.sum())
        state.counters.file_blocks_unread += int((~good).sum())
        counts = bool(good.any())
        self.pace.ended(event.job, state.now_ns, counts=counts, was_awaited=was_awaited)
        self.is_behind = True

    def late(self, event: tier_events.FileLate) -> None:
        """A read is late: no lease waits for it any more, and its slots stay taken until it has
        ended."""
        job = self._reads.get(event.job)
        if job is not None and not job.late:
            job.late = True
            self._state.counters.file_reads_late += 1
            self._reads.leave(event.job, job.rows)
            self.pace.late(event.job)
            self._arrivals.settle_keys(job.keys)
            self.is_behind = True

    def estimate_ms(self, asker: Asker, keys: Keys, name: Name) -> int:
        """Estimated time in ms until those of these keys that are being read, or that the watch of
        this name has queued, have come."""
        rows = self._state.residency.table.find_all(asker.scopes, keys)
        job, queued_bytes = int(self._reads.at[rows].max()), self._queue.bytes_until(name)
        return self.pace.estimate_ms(job, self._state.now_ns, queued_bytes=queued_bytes)

    def coming(self, scopes: Sequence[int], keys: Keys, rows: Rows, name: Name = NOBODY) -> Flags:
        """Flags of the rows that are being read, or queued for the watch of this name
        (`arrivals.Source`)."""
        coming: Flags = self._queue.has(name, rows) & (self._state.residency.file[rows] != 0)
        coming |= self._reads.at[rows] != 0
        return coming

    # ── what the tier tells ──────────────────────────────────────────────────────────────────────

    def _number_of(self, scope: Scope) -> int:
        return self._state.residency.scope(scope.tenant, SpaceId(scope.space), scope.shard)

    def _live(self, its: tier_events.FileBlocks) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of these blocks, and flags of those whose place on disk is the one in `locations`;
        with empty `locations`, flags of those that have a row."""
        residency = self._state.residency
        rows = residency.table.find(self._number_of(its.scope), keys_array(its.keys))
        live = rows >= 0
        if its.locations:
            places = np.frombuffer(its.locations, dtype="<u8")
            live[live] = residency.file[rows[live]] == places[live]
        return rows, live

    def known(self, event: tier_events.FileKnown) -> None:
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
        rows = state.residency.table.find(scope, keys)
        absent = np.flatnonzero(rows < 0)
        fits = absent[: max(0, state.residency.spare_rows)]
        self.left_out_count += len(absent) - len(fits)
        state.counters.file_blocks_crowded += len(absent) - len(fits)
        rows[fits] = state.residency.table.insert(scope, keys[fits])
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

    def moved(self, event: tier_events.FileMoved) -> None:
        """Blocks kept from a reclaimed segment have new places. A block that was written again
        meanwhile keeps that later place."""
        rows, live = self._live(event)
        self._place(rows[live], np.frombuffer(event.new_locations, dtype="<u8")[live])

    def gone(self, event: tier_events.FileGone) -> None:
        """The tier holds these blocks no more, at these places."""
        rows, live = self._live(event)
        if event.damaged:
            self._state.counters.file_blocks_damaged += len(event.keys) // KEY_BYTES
        stamp = self._state.stamp(Reason.FILE_LOST)
        self._state.residency.drop_file(np.unique(rows[live]), stamp)

    def reclaim(self, event: tier_events.FileReclaim) -> None:
        """A segment is to be reclaimed: answer which blocks to keep, those asked for since they
        were written, within KEEP_SHARE and the budget. The other blocks are forgotten."""
        state = self._state
        total = sum(len(part.keys) // KEY_BYTES for part in event.parts)
        room, kept = total // KEEP_SHARE, []
        for part in event.parts:
            rows, live = self._live(part)
            hot = np.flatnonzero(live)
            hot = hot[self._asked_for[rows[hot]]][:room]
            if state.is_off(part.scope.tenant, SpaceId(part.scope.space), Tier.FILE):
                hot = hot[:0]  # moved, they would be newer than what makes them void
            hot = hot[: self.writes.allow(len(hot), part.scope)]
            room -= len(hot)
            kept.append(np.frombuffer(part.locations, dtype="<u8")[hot])
            live[hot] = False
            gone = np.unique(rows[live])
            written = state.residency.file[gone].astype(np.int64)
            state.ages[Tier.FILE].evicted(written, state.now_ns)
            state.residency.drop_file(gone, state.stamp(Reason.RECLAIMED))
        keep = np.concatenate(kept).tobytes() if kept else b""
        state.say(tier_events.ReclaimFile(segment=event.segment, keep=keep))

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """Void cleared blocks on disk, so that they do not come back with a restart."""
        if self.enabled:
            self._state.say(tier_events.VoidFile(tenant=tenant, space=space))


def _is_newer(new: NDArray[np.uint64], old: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Flags of the new places that supersede the old ones: any place supersedes none (0), an own
    place a foreign one, and a greater own place a smaller one."""
    own = new < FOREIGN_LOCATION
    newer: NDArray[np.bool_] = (old == 0) | (own & ((old >= FOREIGN_LOCATION) | (new > old)))
    return newer
