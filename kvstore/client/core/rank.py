"""The state machine of one rank: order of copies, and messages to the node and the scheduler.

Rules:
1. One copy is in flight at most. Between two copies everything can change: session, plans, socket.
2. A job of a session that this rank does not serve is not begun: its load fails, its store is
   dropped without a word to the node, because the session's end already voided its credits.
3. A job ends only after its copy in flight has ended, so that memory is not reused while it is
   being read or written. Every LoadJob ends in exactly one LoadResult, every StoreJob in exactly
   one entry of `store_jobs_done`, on every path.
4. Quiet is sent when no copy is in flight and no job is left; so is Hello.
5. Loads need the mapping, not the node: they go on when the socket is gone, until the rank attaches
   again (the arena may be another one then).
6. Quiesce from the node sets this rank's column of a plan, and whether it writes, for one session.
   A rank that does not write begins no store and never seals or drops.
7. A store that only compares is a store in all but its end: it reads engine blocks, and is fenced.

Covers: order of copies, seals, drops, reports, fences. Does not cover: one job's arrays
(`kvstore.client.core.copies`), copying and generations
(`kvstore.connector.worker_side`, `kvstore.kernels`), the socket (`kvstore.client.link`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

import msgspec

from kvstore.client.core.copies import (
    PLAN_MALFORMED,
    CompareBlock,
    Copied,
    Copy,
    CopyVoid,
    LoadBlock,
    Mismatch,
    Outcome,
    RankColumn,
    RunningCheck,
    RunningLoad,
    RunningStore,
    StoreBlock,
    distrust,
    drops,
    seals,
    verified,
)
from kvstore.client.core.plan import (
    CompareResult,
    LoadJob,
    LoadResult,
    RankReport,
    StepPlan,
    StoreJob,
)
from kvstore.errors import ProtocolError
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.groups import Group
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    HelloRank,
    Message,
    NodeMessage,
    Quiesce,
    Quiet,
    Refused,
    Welcome,
)
from kvstore.wire.record import header_prefix
from kvstore.wire.space import fingerprint

SESSION_OVER = "the session of this plan is over"
ATTACHED_ANEW = "the rank attached to the node anew"


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of this rank. Fixed for the life of its process."""

    engine_id: str
    nonce: str
    tenant: str
    rank: int
    process: str
    groups: tuple[Group, ...]


class RankCore:
    """See the rules on top. Not thread-safe: the driver holds one lock around every call."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._attached = False
        self._session = 0
        self._columns: tuple[RankColumn, ...] = ()
        """By group, of the session."""
        self._quiesce: Quiesce | None = None
        """Received while a copy was in flight; answered when that ends."""
        self._loads: deque[RunningLoad] = deque()
        self._stores: deque[RunningStore | RunningCheck] = deque()
        self._current: tuple[RunningLoad | RunningStore | RunningCheck, Copy] | None = None
        self._reading: Counter[int] = Counter()
        """Engine blocks that a queued or running store has yet to read."""
        self._fenced: frozenset[int] = frozenset()
        self._spoiled = False
        """The copy in flight reads a block that is being overwritten: its result is void."""
        self._outbox: list[Message] = []
        self._refused: Refused | None = None
        self._load_results: list[LoadResult] = []
        self._stores_done: list[int] = []
        self._compared: list[CompareResult] = []
        self._blocks_sealed = self._blocks_dropped = self._store_bytes = self._store_ns = 0

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    @property
    def attached(self) -> bool:
        """Welcomed, and the socket has not ended since."""
        return self._attached

    @property
    def session(self) -> int:
        """The session whose plans are obeyed; 0 when none."""
        return self._session

    @property
    def refused(self) -> Refused | None:
        """The node's last refusal of this rank; None once it is welcome."""
        return self._refused

    def hello(self) -> HelloRank:
        """The first datagram of a connection; asserts that no copy is in flight."""
        assert self._current is None, "Hello while a copy is in flight"
        c = self._config
        return HelloRank(
            protocol=PROTOCOL_VERSION,
            engine_id=c.engine_id,
            nonce=c.nonce,
            tenant=c.tenant,
            rank=c.rank,
            process=c.process,
            groups=c.groups,
        )

    def connected(self, welcome: Welcome) -> None:
        """The node answered; from here on the driver's mapping is the one that came with it.

        Raises:
            ProtocolError: the node speaks another version; close the connection.
        """
        assert self._current is None, "attached while a copy is in flight"
        if welcome.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol {welcome.protocol} where {PROTOCOL_VERSION} is spoken")
        self._abandon_all(ATTACHED_ANEW)
        self._attached, self._session, self._refused = True, 0, None

    def received(self, message: NodeMessage) -> None:
        """Take a datagram of the node.

        Raises:
            ProtocolError: a message that no rank may get; close the connection.
        """
        match message:
            case Quiesce(columns=columns) if len(columns) != len(self._config.groups):
                raise ProtocolError(
                    f"Quiesce of {len(columns)} KV cache groups where this rank has"
                    f" {len(self._config.groups)}"
                )
            case Quiesce() if self._attached:
                self._session = 0
                self._quiesce = message
                self._abandon_all(SESSION_OVER)
                self._answer_quiesce()
            case Refused():
                self._refused = message
            case _:
                raise ProtocolError(f"{type(message).__name__} to a rank, or before its Welcome")

    def disconnected(self) -> None:
        """The socket ended, from either side. Stores end; loads go on in the mapping."""
        self._attached = False
        self._quiesce = None
        self._outbox.clear()
        self._abandon_stores()

    def retire(self, reason: str) -> None:
        """The driver ends: nothing runs or will be copied any more. Jobs still end, as failed."""
        self._session, self._current, self._attached = 0, None, False
        self._abandon_all(reason)
        self.disconnected()

    def take_outbox(self) -> list[Message]:
        """Datagrams to send now, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, plan: StepPlan) -> None:
        """Queue a step's jobs. `plan.fence_blocks` is not looked at: see `fence`."""
        for load in plan.loads:
            self._submit_load(load)
        for store in plan.stores:
            self._submit_store(store)

    def next_copy(self) -> Copy | None:
        """The block to copy now, or None when nothing is left. `finished` must follow."""
        assert self._current is None, "a copy is in flight"
        if self._stores and (not self._loads or self._reads(self._stores[0], self._fenced)):
            store = self._stores[0]
            self._current = (store, store.copy())
        elif self._loads:
            load = self._loads[0]
            self._current = (load, load.copy())
        return self._current[1] if self._current else None

    def finished(self, copy: Copy, outcome: Outcome) -> None:
        """The copy that `next_copy` gave has ended."""
        assert self._current is not None, "no copy is in flight"
        job, current = self._current
        assert current is copy, "another copy is in flight"
        self._current = None
        if self._spoiled:
            self._spoiled, outcome = False, CopyVoid("the block was overwritten meanwhile")
        if isinstance(job, RunningLoad):
            self._load_finished(job, outcome)
        else:
            self._store_finished(job, outcome)
        self._answer_quiesce()

    @property
    def has_work(self) -> bool:
        return bool(self._current or self._loads or self._stores)

    @property
    def has_loads(self) -> bool:
        """A load is queued or runs."""
        return bool(self._loads)

    @property
    def has_ended_loads(self) -> bool:
        """A load's end waits to be reported."""
        return bool(self._load_results)

    # ── fences ───────────────────────────────────────────────────────────────────────────────────

    def pending_store_blocks(self) -> frozenset[int]:
        """Engine blocks that a queued or running store has yet to read."""
        return frozenset(self._reading)

    def fence(self, block_ids: Collection[int]) -> bool:
        """True while a store has yet to read one of these blocks: wait, and ask again.

        Those stores overtake everything else meanwhile.
        """
        self._fenced = frozenset(block for block in block_ids if block in self._reading)
        if self._fenced:
            self._stores = deque(
                sorted(self._stores, key=lambda job: not self._reads(job, self._fenced))
            )
        return bool(self._fenced)

    def give_up(self, block_ids: Collection[int]) -> None:
        """End the stores that have yet to read one of these blocks, which may be overwritten from
        now on: the result of a copy in flight that reads one is discarded."""
        fenced = frozenset(block_ids)
        if self._current is not None and isinstance(self._current[1], StoreBlock | CompareBlock):
            self._spoiled = self._spoiled or self._current[1].block_id in fenced
        for job in [job for job in self._stores if self._reads(job, fenced)]:
            self._abandon(job, "fenced off")

    @staticmethod
    def _reads(job: RunningStore | RunningCheck, blocks: frozenset[int]) -> bool:
        return bool(blocks) and not blocks.isdisjoint(job.remaining)

    # ── the report ───────────────────────────────────────────────────────────────────────────────

    def take_report(self) -> RankReport:
        """Results since the last call."""
        report = RankReport(
            rank=self._config.rank,
            session=self._session if self._attached else 0,
            loads=tuple(self._load_results),
            store_jobs_done=tuple(self._stores_done),
            compared=tuple(self._compared),
            blocks_sealed=self._blocks_sealed,
            blocks_dropped=self._blocks_dropped,
            store_bytes=self._store_bytes,
            store_ns=self._store_ns,
        )
        self._load_results, self._stores_done, self._compared = [], [], []
        self._blocks_sealed = self._blocks_dropped = self._store_bytes = self._store_ns = 0
        return report

    def _serves(self, plan: LoadJob | StoreJob) -> bool:
        return self._session != 0 and plan.session == self._session

    def _column(self, plan: LoadJob | StoreJob) -> RankColumn:
        if not 0 <= plan.group < len(self._columns):
            raise ProtocolError(PLAN_MALFORMED)
        return self._columns[plan.group]

    # ── loads ────────────────────────────────────────────────────────────────────────────────────

    def _submit_load(self, plan: LoadJob) -> None:
        if not plan.block_ids:
            self._load_result(plan, loaded=0, duration_ns=0, reason="")
        elif not self._serves(plan):
            self._load_result(plan, loaded=0, duration_ns=0, reason=SESSION_OVER)
        else:
            try:
                job = RunningLoad(plan, self._column(plan))
            except ProtocolError as error:
                self._load_result(plan, loaded=0, duration_ns=0, reason=str(error))
            else:
                self._loads.append(job)

    def _load_finished(self, job: RunningLoad, outcome: Outcome) -> None:
        match outcome:
            case Copied():
                job.index += 1
                job.duration_ns += outcome.duration_ns
                if job.remaining and not job.abandoned:
                    return
                self._close_load(job, job.abandoned)
            case CopyVoid():
                self._close_load(job, outcome.reason)
            case Mismatch():
                self._distrust(job)
                self._close_load(job, "the checksum of a block does not match")

    def _distrust(self, job: RunningLoad | RunningCheck) -> None:
        if self._attached:
            self._outbox.append(distrust(job))

    def _close_load(self, job: RunningLoad, reason: str) -> None:
        self._loads.remove(job)
        if self._attached:
            self._outbox += verified(job)
        self._load_result(
            job.plan,
            loaded=job.index,
            duration_ns=job.duration_ns,
            reason=reason if job.remaining else "",
        )

    def _load_result(self, plan: LoadJob, *, loaded: int, duration_ns: int, reason: str) -> None:
        self._load_results.append(
            LoadResult(
                request=plan.request,
                lease=plan.lease,
                loaded_blocks=loaded,
                failed_block_ids=plan.block_ids[loaded:],
                bytes_moved=loaded and loaded * self._config.groups[plan.group].block_bytes,
                duration_ns=duration_ns,
                reason=reason,
            )
        )

    # ── stores ───────────────────────────────────────────────────────────────────────────────────

    def _submit_store(self, plan: StoreJob) -> None:
        try:
            if not (self._attached and self._serves(plan) and plan.block_ids):
                raise ProtocolError(SESSION_OVER)
            column = self._column(plan)
            if not (column.writes or plan.compare):
                self._stores_done.append(plan.job)
                return
            kind = RunningCheck if plan.compare else RunningStore
            job = kind(plan, column)
        except ProtocolError:
            self._stores_done.append(plan.job)
            self._blocks_dropped += 0 if plan.compare else len(plan.block_ids)
        else:
            self._stores.append(job)
            self._reading.update(plan.block_ids)

    def _store_finished(self, job: RunningStore | RunningCheck, outcome: Outcome) -> None:
        if isinstance(job, RunningCheck):
            job.take(outcome)
            if isinstance(outcome, Mismatch):
                self._distrust(job)
        elif isinstance(outcome, Copied):
            assert len(outcome.checksum) == CHECKSUM_BYTES
            job.sealed[job.index] = outcome.checksum
            self._store_ns += outcome.duration_ns
            self._store_bytes += self._config.groups[job.plan.group].block_bytes
        self._unread(job.plan.block_ids[job.index : job.index + 1])
        job.index += 1
        if job.abandoned or not job.remaining:
            self._close_store(job)

    def _close_store(self, job: RunningStore | RunningCheck) -> None:
        """Seal the blocks copied, drop the rest; for another session send neither."""
        self._stores.remove(job)
        self._unread(job.remaining)
        self._stores_done.append(job.plan.job)
        if isinstance(job, RunningCheck):
            self._compared.append(job.result())
            return
        indexes = range(len(job.plan.block_ids))
        sealed = [i for i in indexes if i in job.sealed]
        if not self._attached or job.plan.session != self._session:
            sealed = []
        else:
            self._outbox += seals(job, sealed)
            self._outbox += drops(job, [i for i in indexes if i not in job.sealed])
        self._blocks_sealed += len(sealed)
        self._blocks_dropped += len(indexes) - len(sealed)

    def _unread(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self._reading[block] -= 1
            if not self._reading[block]:
                del self._reading[block]

    # ── endings ──────────────────────────────────────────────────────────────────────────────────

    def _abandon_all(self, reason: str) -> None:
        for load in list(self._loads):
            self._abandon(load, reason)
        self._abandon_stores()

    def _abandon_stores(self) -> None:
        for store in list(self._stores):
            self._abandon(store, SESSION_OVER)

    def _abandon(self, job: RunningLoad | RunningStore | RunningCheck, reason: str) -> None:
        if self._current is not None and self._current[0] is job:
            job.abandoned = reason  # closed by `finished`, rule 3
        elif isinstance(job, RunningLoad):
            self._close_load(job, reason)
        else:
            self._close_store(job)

    def _answer_quiesce(self) -> None:
        if self._quiesce is None or self._current is not None:
            return
        assert not self._loads, "a job outlived its session"
        assert not self._stores, "a job outlived its session"
        self._session = self._quiesce.session
        self._columns = tuple(
            RankColumn(
                column.number,
                column.writes,
                header_prefix(
                    tenant=self._config.tenant,
                    space=fingerprint(group.space, weights_epoch=self._quiesce.weights_epoch),
                    shard=group.shard,
                    block_bytes=group.block_bytes,
                ),
            )
            for group, column in zip(self._config.groups, self._quiesce.columns, strict=True)
        )
        self._quiesce = None
        self._outbox.append(Quiet(self._session))


def refuse(plan: StepPlan, *, rank: int, reason: str) -> RankReport:
    """How a plan ends on a rank that has no cache to serve: at once, with nothing done."""
    return RankReport(
        rank=rank,
        session=0,
        loads=tuple(
            LoadResult(
                request=load.request,
                lease=load.lease,
                loaded_blocks=0,
                failed_block_ids=load.block_ids,
                bytes_moved=0,
                duration_ns=0,
                reason=reason if load.block_ids else "",
            )
            for load in plan.loads
        ),
        store_jobs_done=tuple(store.job for store in plan.stores),
        blocks_dropped=sum(len(s.block_ids) for s in plan.stores if not s.compare),
    )


__all__ = [
    "Copied",
    "Copy",
    "CopyVoid",
    "LoadBlock",
    "Mismatch",
    "Outcome",
    "RankConfig",
    "RankCore",
    "StoreBlock",
    "refuse",
]
