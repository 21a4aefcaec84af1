"""Plans of the scheduler side for the ranks, one each step, and reports of the ranks.

Plans travel inside the engine's own step metadata, to every rank the same. Arrays are bytes as on
the attach socket (`kvstore.wire.messages`): [n][S] over the session's distinct shards, shard minor.
Every rank reads its column; the lowest of the ranks that share a column alone writes it.
"""

from __future__ import annotations

from collections import Counter

import msgspec


class LoadJob(msgspec.Struct, frozen=True):
    """Copy slots into engine blocks. One job per request; a lease pins the slots."""

    request: str
    lease: int
    session: int
    block_ids: tuple[int, ...]
    """Targets in the engine's cache, in chain order, shape [n]."""
    keys: bytes
    """32 bytes each, [n]; needed to verify checksums."""
    slots: bytes
    generations: bytes
    checksums: bytes = b""
    """[n][S] of 16 bytes, or none; the rank verifies every block whose checksum is not 0."""
    group: int = 0
    """KV cache group of all blocks of the job."""


class StoreJob(msgspec.Struct, frozen=True):
    """Copy engine blocks into granted slots after the step's forward, then seal.

    A rank that does not write its shard has nothing to copy: its job is done at once.
    """

    job: int
    session: int
    block_ids: tuple[int, ...]
    keys: bytes
    slots: bytes
    generations: bytes
    compare: bool = False
    """Write nothing: compare the blocks with the slots. Every rank does."""
    checksums: bytes = b""
    """To compare: [n][S] of 16 bytes, so that damaged bytes are not taken for another block."""
    group: int = 0
    """KV cache group of all blocks of the job."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step's orders."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    fence_blocks: tuple[int, ...] = ()
    """Engine blocks about to be overwritten whose store may still be running: the rank waits for
    those copies before anything of this step runs."""
    step: int = 0
    """Number of a step that is timed: ranks report it when it has run. 0: it is not."""

    @property
    def empty(self) -> bool:
        """True when the step asks nothing of the ranks."""
        return not (self.loads or self.stores or self.fence_blocks)


class LoadResult(msgspec.Struct, frozen=True):
    """How one rank's part of a LoadJob ended."""

    request: str
    lease: int
    loaded_blocks: int
    failed_block_ids: tuple[int, ...]
    """Blocks from the first bad one on, which failed for `reason`; empty when all is well."""
    bytes_moved: int
    duration_ns: int
    reason: str = ""


class CompareResult(msgspec.Struct, frozen=True):
    """One rank's result of a StoreJob with `compare`."""

    job: int
    compared: int
    """Blocks; less than in the job where slots were reused meanwhile, or bytes damaged."""
    diverged: tuple[int, ...]
    """Indices in the job of blocks that hold other values."""
    worst: float
    """Largest relative error of a block."""


class RankReport(msgspec.Struct, frozen=True):
    """Results of one rank since its last report."""

    rank: int
    session: int
    """The session this rank serves now; 0 when none."""
    loads: tuple[LoadResult, ...] = ()
    store_jobs_done: tuple[int, ...] = ()
    """Jobs whose source blocks are no longer read, whether sealed, dropped or compared."""
    blocks_sealed: int = 0
    blocks_dropped: int = 0
    store_bytes: int = 0
    store_ns: int = 0
    fence_ns: int = 0
    """Time for which the engine's thread waited for stores whose blocks it needed."""
    compared: tuple[CompareResult, ...] = ()
    """Results of comparisons among `store_jobs_done`."""
    step: int = 0
    """The last timed step that has run; 0: none since the last report."""


def refuse(plan: StepPlan, *, rank: int, reason: str) -> RankReport:
    """The report of a rank without a cache to serve: all jobs of the plan end at once, with nothing
    done."""
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


class SchedulerStats:
    """Counts since the last `take`. Names are the metric names without prefix, then a label's value
    behind a colon, if there is one; `_ns` becomes `_seconds`."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def take(self) -> dict[str, int]:
        counts = dict(self._counts)
        self._counts.clear()
        return counts
