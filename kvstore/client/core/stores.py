"""Stores: which filled blocks are bound to credits, and which engine blocks must be fenced.

A block is stored when a forward of this step completes it, its key is known, it is not known to be
stored, and a credit is at hand. Source blocks are not pinned: the engine may free and reuse them at
once, so a block that is handed out again while its copy may still run goes into the step's fence.

Rules. 1: a credit is bound to one key, once. 2: keys are taken in chain order; without credits the
rest waits for a later step of the same request. 3: only a rank's report ends an outstanding block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.client.core.attachment import Attachment, Credit, credit_arrays
from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.plan import StoreJob
from kvstore.client.core.stats import SchedulerStats
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX

HINT_KEYS_MAX = KEYS_PER_DATAGRAM_MAX


class StoreProgress:
    """How far one request's blocks have been dealt with. Only `EngineStores` changes it."""

    __slots__ = ("hint_sequence", "is_old", "next_block", "present")

    def __init__(self, hint_sequence: int) -> None:
        self.next_block = 0
        self.is_old = False
        """Its blocks, or some before them, are of before a reset: none is stored."""
        self.hint_sequence = hint_sequence
        self.present: np.ndarray | None = None
        """Bool per prompt block, from the node's answer to the hint."""


class _Outstanding:
    __slots__ = ("block_ids", "reports")

    def __init__(self, block_ids: tuple[int, ...]) -> None:
        self.block_ids = block_ids
        self.reports = 0


class EngineStores:
    """All stores of one engine."""

    def __init__(
        self, config: SchedulerConfig, attachment: Attachment, stats: SchedulerStats
    ) -> None:
        self._config = config
        self._attachment = attachment
        self._stats = stats
        self._sequence = 0
        self._next_job = 1
        self._recent: OrderedDict[bytes, int] = OrderedDict()
        self._outstanding: dict[int, _Outstanding] = {}
        self._source_blocks: Counter[int] = Counter()
        self._last_submit_ns = 0
        self._batch_blocks: list[int] = []
        self._batch_keys: list[bytes] = []
        self._batch_credits: list[Credit] = []
        self._comparing: list[StoreJob] = []

    def new_progress(self) -> StoreProgress:
        """The state of a request whose hint is sent now."""
        self._sequence += 1
        return StoreProgress(self._sequence)

    def has_work(self, progress: StoreProgress, full_blocks: int) -> bool:
        """Whether `bind` could do anything: the cheap question of every step."""
        is_due = full_blocks > progress.next_block and not progress.is_old
        return is_due and bool(self._attachment.credits[0])

    def bind(
        self,
        progress: StoreProgress,
        *,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        full_blocks: int,
        local_blocks: int,
    ) -> None:
        """Bind blocks next_block … full_blocks-1 to credits, as far as credits go.

        Args:
            progress: the request's.
            keys: of the request, at least `full_blocks`.
            block_ids: the request's whole block table, at least `full_blocks`.
            full_blocks: blocks complete once this step's forward has run.
            local_blocks: leading blocks that the engine had in its own cache; without an answer to
                the hint they count as stored.
        """
        credits = self._attachment.credits[0]
        self._sequence += 1
        for i in range(progress.next_block, full_blocks):
            key = bytes(keys[i])
            if not self._is_stored(progress, key, i, local_blocks):
                if not credits:
                    self._stats.add("store_blocks_without_credit", full_blocks - i)
                    return
                self._batch_credits.append(credits.popleft())
                self._batch_keys.append(key)
                self._batch_blocks.append(int(block_ids[i]))
                self._remember(key)
            progress.next_block = i + 1

    def take_jobs(self, now_ns: int) -> tuple[StoreJob, ...]:
        """The step's jobs: blocks that were bound, blocks to compare."""
        comparing, self._comparing = tuple(self._comparing), []
        for job in comparing:
            self._begin(job)
        if not self._batch_keys:
            return comparing
        slots, generations = credit_arrays(self._batch_credits)
        job = StoreJob(
            job=self._next_job,
            session=self._attachment.session,
            block_ids=tuple(self._batch_blocks),
            keys=b"".join(self._batch_keys),
            slots=slots,
            generations=generations,
        )
        self._begin(job)
        self._stats.add("store_blocks_submitted", len(job.block_ids))
        self._next_job += 1
        self._last_submit_ns = now_ns
        self._batch_blocks, self._batch_keys, self._batch_credits = [], [], []
        return (job, *comparing)

    def _begin(self, job: StoreJob) -> None:
        self._outstanding[job.job] = _Outstanding(job.block_ids)
        self._source_blocks.update(job.block_ids)

    def compare(
        self,
        block_ids: Sequence[int],
        *,
        keys: list[bytes],
        slots: bytes,
        generations: bytes,
        checksums: bytes,
    ) -> int:
        """With this step's jobs: read these engine blocks, complete by then, beside these slots.
        Returns the job's number; it ends like a store, and its blocks are fenced like a store's."""
        self._comparing.append(
            StoreJob(
                job=self._next_job,
                session=self._attachment.session,
                block_ids=tuple(block_ids),
                keys=b"".join(keys),
                slots=slots,
                generations=generations,
                compare=True,
                checksums=checksums,
            )
        )
        self._next_job += 1
        return self._next_job - 1

    def fence(self, new_blocks: Iterable[int]) -> tuple[int, ...]:
        """Those of the newly handed out blocks whose copy may still run."""
        if not self._source_blocks:
            return ()
        return tuple(sorted({b for b in new_blocks if b in self._source_blocks}))

    def source_blocks(self) -> tuple[int, ...]:
        """All blocks whose copy may still run."""
        return tuple(sorted(self._source_blocks))

    def reported(self, job_ids: Iterable[int]) -> list[int]:
        """One rank has finished these jobs: the blocks of a job are free when all ranks have.
        Returns the jobs that all ranks have finished now."""
        ended = []
        for job_id in job_ids:
            entry = self._outstanding.get(job_id)
            if entry is None:
                continue
            entry.reports += 1
            if entry.reports >= self._config.rank_count:
                del self._outstanding[job_id]
                ended.append(job_id)
                self._source_blocks.subtract(entry.block_ids)
                for block in entry.block_ids:
                    if self._source_blocks[block] <= 0:
                        del self._source_blocks[block]
        return ended

    def forget_recent(self) -> None:
        """The node may have lost everything: nothing counts as stored any more."""
        self._recent.clear()

    def running(self, now_ns: int) -> bool:
        """Whether copies run that an idle engine should keep stepping for, within the bound."""
        limit_ns = self._config.push_work_ms_max * NS_PER_MS
        return bool(self._outstanding) and now_ns - self._last_submit_ns < limit_ns

    def _is_stored(
        self, progress: StoreProgress, key: bytes, index: int, local_blocks: int
    ) -> bool:
        stored_at = self._recent.get(key)
        if stored_at is not None and stored_at > progress.hint_sequence:
            return True
        # A hint covers the first blocks of a prompt, and its answer is padded to whole bytes.
        if progress.present is not None and index < min(len(progress.present), HINT_KEYS_MAX):
            return bool(progress.present[index])
        return stored_at is not None or index < local_blocks

    def _remember(self, key: bytes) -> None:
        self._recent[key] = self._sequence
        self._recent.move_to_end(key)
        if len(self._recent) > self._config.recent_keys_max:
            self._recent.popitem(last=False)
