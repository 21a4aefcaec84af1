"""The state machine of one rank: its jobs, order of copies, messages to the node and the scheduler.

    LoadJob ─────────▶ RunningLoad  ──next_copy──▶ Copy: LOAD      ──finished──▶ LoadResult
    StoreJob ────────▶ RunningStore ──next_copy──▶ Copy: STORE     ──finished──▶ Seal, Drop
      with `compare`                             ▶ Copy: COMPARE   ──finished──▶ CompareResult

Rules:
1. At most `copies_max` copies are in flight, and end in any order; of several places one is left to
   loads. Meanwhile everything can change: session, plans, socket.
2. A job of a session that this rank does not serve is not begun: its load fails, its store is
   dropped without a word to the node, because the session's end already voided its credits.
3. A job ends only after its copies in flight have ended, so that memory is not reused while it is
   being read or written. Every LoadJob ends in exactly one LoadResult, every StoreJob in exactly
   one entry of `store_jobs_done`, on every path.
4. Quiet is sent when no copy is in flight and no job is left; so is Hello.
5. Loads need the mapping, not the node: they go on when the socket is gone, until the rank attaches
   again (the arena may be another one then).
6. Quiesce from the node sets this rank's column of a plan, and whether it writes, for one session.
   A rank that does not write begins no store and never seals or drops.
7. A store that only compares is a store in all but its end: it reads engine blocks, and is fenced.

Covers: arrays of a plan, order of copies, seals, drops, reports, fences. Does not cover: copying
and generations (`kvstore.connector.copier`, `kvstore.kernels`), the socket (`kvstore.client.link`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from kvstore.client.core.plan import CompareResult, CopyJob, LoadJob, RankReport, StepPlan, StoreJob
from kvstore.errors import ProtocolError
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES, BlockKey, Generation, SlotId
from kvstore.wire import messages as wire
from kvstore.wire.record import Scope, header
from kvstore.wire.space import fingerprint

SESSION_OVER = "the session of this plan is over"
ATTACHED_ANEW = "the rank attached to the node anew"
PLAN_MALFORMED = "the plan's arrays do not fit together"
SLOT_REUSED = "the slot was given to another block"
OVERWRITTEN = "the block was overwritten meanwhile"
DAMAGED = "the checksum of a block does not match"


# ── block copies ──────────────────────────────────────────────────────────────────────────────────


class Copy(BlockCopy, kw_only=True):
    """One copy of a job, as the copy engine gets it, and what decides whether its end counts."""

    job: RunningJob
    index: int
    """Place of the block in the job."""
    slot: SlotId
    generation: Generation
    """The slot counts only while it has this generation."""
    checksum: bytes | None
    """16 bytes to compare with; None: no check, since the bytes crossed no medium and no restart
    of the node."""
    place: int = 0
    """Word of the place in the node's slab from which a load takes its bytes; 0: the slot."""
    is_spoiled: bool = False
    """Whether the block that it reads is being overwritten: its end is void then."""
    failure: CopyEnd | None = None
    """End of a load that failed, while its block is cleared."""

    def is_damaged(self, end: CopyEnd) -> bool:
        """Whether the bytes of the slot, by this end, are not those that were stored. A comparison
        looks at the checksum of the slot where values differ: damaged bytes are no evidence."""
        if self.way is CopyWay.COMPARE:
            return end.diverged and end.checksum != self.checksum
        return not end.reason and self.checksum not in (None, end.checksum)


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────


class RankColumn(msgspec.Struct, frozen=True):
    """A rank's part in one KV cache group of a session."""

    number: int
    """Place of its shard in the [n][S] arrays."""
    writes: bool
    prefix: bytes
    """Prefix of the headers that checksums cover."""


class Job:
    """One job under way. Blocks before index `next` were handed out in order; their copies end in
    any order."""

    way: CopyWay

    def __init__(self, plan: CopyJob, its: RankColumn, after: int) -> None:
        self.plan = plan
        self.after = after
        """Mark of engine work that must be done before any copy of the job; 0: none."""
        self.next = 0
        self.in_flight: set[int] = set()
        """Indexes of blocks whose copy has not ended."""
        self.ends: dict[int, CopyEnd] = {}
        """Ends of copies that count, by the index of the block."""
        self.prefix = its.prefix
        self.abandoned = ""
        """Why the job ends with its copies in flight; empty while it goes on."""
        n, column = len(plan.block_ids), its.number
        checksums = plan.checksums
        shards, rest = divmod(len(plan.slots), 4 * n)
        if (
            rest
            or column >= shards
            or len(plan.keys) != n * KEY_BYTES
            or len(plan.generations) != n * shards * 8
            or len(checksums) not in (0, n * shards * CHECKSUM_BYTES)
        ):
            raise ProtocolError(PLAN_MALFORMED)
        self.slots = wire.slots_array(plan.slots).reshape(n, shards)[:, column]
        self.generations = wire.generations_array(plan.generations).reshape(n, shards)[:, column]
        step, first = shards * CHECKSUM_BYTES, column * CHECKSUM_BYTES
        every = [checksums[at : at + CHECKSUM_BYTES] for at in range(first, len(checksums), step)]
        self.checksums = [checksum if any(checksum) else None for checksum in every]
        """One per block, None where there is nothing to verify; empty if that is so for all."""

    @property
    def has_next(self) -> bool:
        """Whether there is a copy to hand out."""
        return not self.abandoned and self.next < len(self.plan.block_ids)

    @property
    def is_over(self) -> bool:
        """Nothing is in flight, and nothing will be."""
        return not (self.in_flight or self.has_next)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Engine blocks whose copy has not ended."""
        in_flight = (self.plan.block_ids[i] for i in self.in_flight)
        return (*in_flight, *self.plan.block_ids[self.next :])

    def places(self, indexes: list[int]) -> tuple[bytes, bytes]:
        """Slots (u32 each) and generations (u64 each) of these blocks, as datagrams have them."""
        return self.slots[indexes].tobytes(), self.generations[indexes].tobytes()

    def key(self, index: int) -> BlockKey:
        return BlockKey(self.plan.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])


class RunningLoad(Job):
    """Slots → engine blocks; no copy begins after one that failed."""

    way = CopyWay.LOAD
    plan: LoadJob

    @property
    def loaded_blocks(self) -> int:
        """Leading blocks that hold what was stored."""
        count = 0
        while count in self.ends:
            count += 1
        return count

    def verified(self) -> Iterator[wire.Verified]:
        """Messages that report the blocks whose bytes are those that were stored."""
        indexes = sorted(self.ends) if self.checksums else []
        for batch in _batches([i for i in indexes if self.checksums[i] is not None]):
            yield wire.Verified(*self.places(batch))


class RunningStore(Job):
    """Engine blocks → granted slots; a block that cannot be copied does not stop the others. Or it
    compares engine blocks with slots, and writes nothing."""

    plan: StoreJob

    def __init__(self, plan: StoreJob, its: RankColumn, after: int) -> None:
        super().__init__(plan, its, after)
        self.way = CopyWay.COMPARE if plan.compare else CopyWay.STORE

    def forget(self, blocks: frozenset[int]) -> None:
        """Drop the ends of copies from these engine blocks, so that they are not sealed: the bytes
        may have been another request's. A comparison that reads one loses all its ends."""
        if self.plan.compare and not blocks.isdisjoint(self.plan.block_ids):
            self.ends.clear()
        for index in [i for i in self.ends if self.plan.block_ids[i] in blocks]:
            del self.ends[index]

    def seals(self, indexes: list[int]) -> Iterator[wire.Seal]:
        """Messages that seal these blocks, which are complete."""
        for batch in _batches(indexes):
            slots, generations = self.places(batch)
            yield wire.Seal(
                session=self.plan.session,
                keys=b"".join(self.key(i) for i in batch),
                slots=slots,
                generations=generations,
                checksums=b"".join(self.ends[i].checksum for i in batch),
                group=self.plan.group,
            )

    def drops(self, indexes: list[int]) -> Iterator[wire.Drop]:
        """Messages that drop these blocks, whose slots were not written."""
        for batch in _batches(indexes):
            yield wire.Drop(self.plan.session, *self.places(batch), group=self.plan.group)

    def result(self) -> CompareResult:
        """The result of a comparison."""
        diverged = tuple(sorted(i for i, end in self.ends.items() if end.diverged))
        worst = max((end.error for end in self.ends.values()), default=0.0)
        return CompareResult(self.plan.job, len(self.ends), diverged, worst)


def _batches(indexes: list[int]) -> Iterator[list[int]]:
    step = wire.KEYS_PER_DATAGRAM_MAX
    return (indexes[at : at + step] for at in range(0, len(indexes), step))


RunningJob = RunningLoad | RunningStore


# ── the rank ──────────────────────────────────────────────────────────────────────────────────────


class RankCore:
    """See the rules on top. Not thread-safe: the driver holds one lock around every call."""

    def __init__(
        self, hello: wire.HelloRank, *, copies_max: int = 1, is_fenced_late: bool = False
    ) -> None:
        """
        Args:
            hello: identity of this rank, fixed for the life of its process.
            copies_max: copies that the driver can have in flight at once.
            is_fenced_late: the engine may overwrite blocks before it names them; see `settle`.
        """
        self._hello = hello
        self._is_fenced_late = is_fenced_late
        self._unsettled: list[RunningStore] = []
        """Stores whose copies have ended, but which are sealed only in the next `settle`."""
        self._copies_max = copies_max
        self._attached = False
        self._session = 0
        self._columns: tuple[RankColumn, ...] = ()
        """This rank's part in the session, by KV cache group."""
        self._quiesce: wire.Quiesce | None = None
        """Received while copies were in flight; answered when they end."""
        self._loads: deque[RunningLoad] = deque()
        self._stores: deque[RunningStore] = deque()
        self._in_flight: dict[int, Copy] = {}
        """By number."""
        self._number = 0
        """Number of the last copy."""
        self._fenced: frozenset[int] = frozenset()
        self._outbox: list[wire.Message] = []
        self._nothing = self._report = RankReport(hello.rank)
        self._unserved = SESSION_OVER
        """Why a load of a session that this rank does not serve fails."""

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def hello(self) -> wire.HelloRank:
        """The first datagram of a connection; asserts that no copy is in flight."""
        assert not self._in_flight, "Hello while a copy is in flight"
        return self._hello

    def connected(self, welcome: wire.Welcome) -> None:
        """Take the node's Welcome; from here on copies use the mapping that came with it.

        Raises:
            ProtocolError: the node speaks another version; close the connection.
        """
        assert not self._in_flight, "attached while a copy is in flight"
        if welcome.protocol != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol {welcome.protocol} where {wire.PROTOCOL_VERSION} is spoken"
            )
        self._abandon_all(ATTACHED_ANEW)
        self._attached, self._session = True, 0

    def received(self, message: wire.NodeMessage) -> None:
        """Take a datagram of the node.

        Raises:
            ProtocolError: a message that no rank may get; close the connection.
        """
        match message:
            case wire.Quiesce(columns=columns) if len(columns) != len(self._hello.groups):
                raise ProtocolError(
                    f"Quiesce of {len(columns)} KV cache groups where this rank has"
                    f" {len(self._hello.groups)}"
                )
            case wire.Quiesce() if self._attached:
                self._session = 0
                self._quiesce = message
                self._abandon_all(SESSION_OVER)
                self._answer_quiesce()
            case wire.Refused():
                pass  # the driver ends the connection
            case _:
                raise ProtocolError(f"{type(message).__name__} to a rank, or before its Welcome")

    def disconnected(self) -> None:
        """The socket ended, from either side. Stores end; loads go on in the mapping."""
        self._attached = False
        self._quiesce = None
        self._outbox.clear()
        self._abandon_stores()

    def retire(self, reason: str) -> None:
        """The driver ends: nothing runs or will be copied any more. Jobs still end, as failed for
        this reason."""
        self._session, self._attached, self._unserved = 0, False, reason
        for copy in self._in_flight.values():
            copy.job.in_flight.discard(copy.index)
        self._in_flight = {}
        self._abandon_all(reason)
        self.disconnected()

    def take_outbox(self) -> list[wire.Message]:
        """Datagrams to send now, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, plan: StepPlan, after: int = 0) -> None:
        """Queue a step's jobs, whose copies must not overtake the copy engine's mark `after`.
        `plan.fence_blocks` is not looked at: see `fence`."""
        for load in plan.loads:
            self._submit_load(load, after)
        for store in plan.stores:
            self._submit_store(store, after)

    def next_copy(self) -> Copy | None:
        """A block to copy now, or None: nothing is left to begin, or enough is in flight.
        `finished` must follow."""
        if len(self._in_flight) >= self._copies_max:
            return None
        load = next((job for job in self._loads if job.has_next), None)
        store = next((job for job in self._stores if job.has_next), None)
        job: RunningJob | None = load
        if store is not None and (load is None or self._reads(store, self._fenced)):
            job = store
        if job is None or (job is store and self._is_full_of_stores):
            return None
        return self._copy_of(job)

    def _copy_of(self, job: RunningJob) -> Copy:
        """The next copy of the job, which is in flight now."""
        index, job.next, self._number = job.next, job.next + 1, self._number + 1
        slot = SlotId(int(job.slots[index]))
        checksum = job.checksums[index] if job.checksums else None
        copy = self._in_flight[self._number] = Copy(
            self._number,
            job.way,
            job.plan.group,
            job.plan.block_ids[index],
            slot * PAGE_BYTES,
            header(job.prefix, job.key(index)),
            is_verified=checksum is not None,
            after=job.after,
            job=job,
            index=index,
            slot=slot,
            generation=Generation(int(job.generations[index])),
            checksum=checksum,
        )
        job.in_flight.add(index)
        return copy

    @property
    def _is_full_of_stores(self) -> bool:
        """Whether stores have all the places that they may have. Half of the places (rounded down)
        are kept for loads, since a store may have to wait for the engine's whole step."""
        stores = sum(copy.way is not CopyWay.LOAD for copy in self._in_flight.values())
        return stores >= self._copies_max - self._copies_max // 2

    def finished(self, copy: Copy, end: CopyEnd) -> None:
        """A copy that `next_copy` gave has ended. The end has a reason if the slot did not have its
        generation all the time; of a comparison that diverged, the checksum of the slot."""
        del self._in_flight[copy.number]
        job, index = copy.job, copy.index
        job.in_flight.discard(index)
        if copy.is_spoiled:
            end = CopyEnd(copy.number, reason=OVERWRITTEN)
        if copy.is_damaged(end):
            end = CopyEnd(copy.number, reason=DAMAGED)
            if self._attached:
                self._outbox.append(wire.Distrust(*job.places([index])))
        if isinstance(job, RunningLoad):
            job.abandoned = job.abandoned or end.reason
        if not end.reason:
            job.ends[index] = end
            assert copy.way is not CopyWay.STORE or len(end.checksum) == CHECKSUM_BYTES
        if job.is_over:
            self._close(job)
        self._answer_quiesce()

    @property
    def has_loads(self) -> bool:
        """A load is queued or runs."""
        return bool(self._loads)

    @property
    def loading(self) -> set[str]:
        """Requests of which a load is queued or runs."""
        return {job.plan.request for job in self._loads}

    @property
    def has_loaded_request(self) -> bool:
        """Whether all loads of some request have ended, and the last end waits to be reported."""
        loading = self.loading
        return any(result.request not in loading for result in self._report.loads)

    # ── fences ───────────────────────────────────────────────────────────────────────────────────

    def fence(self, block_ids: Collection[int]) -> bool:
        """True while a store has yet to read one of these blocks: wait, and ask again.

        Those stores overtake everything else meanwhile.
        """
        blocks = frozenset(block_ids)
        reading = (blocks.intersection(job.remaining) for job in self._stores)
        self._fenced = fenced = frozenset[int]().union(*reading)
        if fenced:
            self._stores = deque(sorted(self._stores, key=lambda job: not self._reads(job, fenced)))
        return bool(fenced)

    def give_up(self, block_ids: Collection[int]) -> None:
        """End the stores that have yet to read one of these blocks, which may be overwritten from
        now on: the result of a copy in flight that reads one is discarded."""
        fenced = frozenset(block_ids)
        for copy in self._in_flight.values():
            copy.is_spoiled |= copy.way is not CopyWay.LOAD and copy.block_id in fenced
        for job in [job for job in self._stores if self._reads(job, fenced)]:
            self._abandon(job, "fenced off")

    def settle(self, block_ids: Collection[int]) -> None:
        """The engine overwrites these blocks, perhaps since a moment ago: discard what was read
        from them, and end (seal or drop) the stores whose copies are over."""
        self.give_up(block_ids)
        fenced = frozenset(block_ids)
        over, self._unsettled = self._unsettled, []
        for job in (*over, *self._stores):
            job.forget(fenced)
        for job in over:
            self._end_store(job)

    @staticmethod
    def _reads(job: RunningStore, blocks: frozenset[int]) -> bool:
        return bool(blocks) and not blocks.isdisjoint(job.remaining)

    # ── the report ───────────────────────────────────────────────────────────────────────────────

    def take_report(self) -> RankReport:
        """Results since the last call."""
        report, self._report = self._report, self._nothing
        return report

    def _count(self, **more: Any) -> None:
        """Add to the report."""
        self._report = self._report.plus(**more)

    def _column(self, plan: CopyJob) -> RankColumn:
        """This rank's part in a job. Raises ProtocolError: the job cannot begin."""
        if not (plan.block_ids and 0 != plan.session == self._session):
            raise ProtocolError(self._unserved)
        if not 0 <= plan.group < len(self._columns):
            raise ProtocolError(PLAN_MALFORMED)
        return self._columns[plan.group]

    # ── loads ────────────────────────────────────────────────────────────────────────────────────

    def _submit_load(self, plan: LoadJob, after: int) -> None:
        try:
            self._loads.append(RunningLoad(plan, self._column(plan), after))
        except ProtocolError as error:
            self._count(loads=(plan.result(reason=str(error) if plan.block_ids else ""),))

    def _close_load(self, job: RunningLoad) -> None:
        self._loads.remove(job)
        if self._attached:
            self._outbox += job.verified()
        loaded, plan = job.loaded_blocks, job.plan
        result = plan.result(
            loaded=loaded,
            bytes_moved=loaded and loaded * self._hello.groups[plan.group].block_bytes,
            duration_ns=sum(end.duration_ns for end in job.ends.values()),
            reason=job.abandoned if loaded < len(plan.block_ids) else "",
        )
        self._count(loads=(result,))

    # ── stores ───────────────────────────────────────────────────────────────────────────────────

    def _submit_store(self, plan: StoreJob, after: int) -> None:
        try:
            if not self._attached:
                raise ProtocolError(SESSION_OVER)
            column = self._column(plan)
            if not (column.writes or plan.compare):
                self._count(store_jobs_done=(plan.job,))
                return
            job = RunningStore(plan, column, after)
        except ProtocolError:
            dropped = 0 if plan.compare else len(plan.block_ids)
            self._count(store_jobs_done=(plan.job,), blocks_dropped=dropped)
        else:
            self._stores.append(job)

    def _close_store(self, job: RunningStore) -> None:
        self._stores.remove(job)
        if not job.plan.compare:
            size, ends = self._hello.groups[job.plan.group].block_bytes, job.ends.values()
            spent_ns = sum(end.duration_ns for end in ends)
            self._count(store_bytes=len(ends) * size, store_ns=spent_ns)
        if self._is_fenced_late and self._attached:
            self._unsettled.append(job)
        else:
            self._end_store(job)

    def _end_store(self, job: RunningStore) -> None:
        """Seal the blocks copied, drop the rest; for another session send neither."""
        self._count(store_jobs_done=(job.plan.job,))
        if job.plan.compare:
            self._count(compared=(job.result(),))
            return
        indexes = range(len(job.plan.block_ids))
        sealed = [i for i in indexes if i in job.ends]
        if not self._attached or job.plan.session != self._session:
            sealed = []
        else:
            self._outbox += job.seals(sealed)
            self._outbox += job.drops([i for i in indexes if i not in job.ends])
        self._count(blocks_sealed=len(sealed), blocks_dropped=len(indexes) - len(sealed))

    # ── endings ──────────────────────────────────────────────────────────────────────────────────

    def _abandon_all(self, reason: str) -> None:
        for load in list(self._loads):
            self._abandon(load, reason)
        self._abandon_stores()

    def _abandon_stores(self) -> None:
        for store in list(self._stores):
            self._abandon(store, SESSION_OVER)
        over, self._unsettled = self._unsettled, []
        for store in over:
            store.forget(frozenset(store.plan.block_ids))
            self._end_store(store)

    def _abandon(self, job: RunningJob, reason: str) -> None:
        job.abandoned = reason
        if job.is_over:  # otherwise closed by `finished`, rule 3
            self._close(job)

    def _close(self, job: RunningJob) -> None:
        if isinstance(job, RunningLoad):
            self._close_load(job)
        else:
            self._close_store(job)

    def _answer_quiesce(self) -> None:
        if self._quiesce is None or self._in_flight:
            return
        assert not self._loads, "a job outlived its session"
        assert not self._stores, "a job outlived its session"
        self._session = self._quiesce.session
        made = []
        for group, column in zip(self._hello.groups, self._quiesce.columns, strict=True):
            space = fingerprint(group.space, weights_epoch=self._quiesce.weights_epoch)
            scope = Scope(self._hello.tenant, space, group.shard, group.block_bytes)
            made.append(RankColumn(column.number, column.writes, scope.prefix()))
        self._columns = tuple(made)
        self._quiesce = None
        self._outbox.append(wire.Quiet(self._session))
