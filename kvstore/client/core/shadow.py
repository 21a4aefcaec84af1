"""Shadow checks: some hits are computed all the same, and compared with the cached blocks.

    a hit that was chosen ──▶ answered as a miss, its lease kept
    a step completes some of its blocks ──▶ a StoreJob that compares them on every rank
    all ranks have compared ──▶ Compared to the node; after the last one the lease goes back

A checksum proves that bytes are those which were stored under a key; only computing them again
proves that they belong to it. The price is the hit. Does not cover: which hits (`lookups`),
comparing (`kvstore.kernels.compare`), effects of a difference (`kvstore.engine.trust.switches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.client.core.attachment import Attachment
from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.lookup import Lookup, LookupStage
from kvstore.client.core.lookups import EngineLookups
from kvstore.client.core.plan import CompareResult
from kvstore.client.core.stats import SchedulerStats
from kvstore.client.core.stores import EngineStores
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.messages import Compared, LeaseReply

BLOCKS_MAX: Final = 64
"""Compared per hit, spread over all of it: an error in a prefix affects most of its blocks."""
PPM: Final = 1_000_000


class _Check:
    """A hit that is being computed."""

    __slots__ = ("end_block", "jobs_out", "lookup", "next_block", "reply", "step")

    def __init__(self, lookup: Lookup, reply: LeaseReply, found_blocks: int) -> None:
        self.lookup = lookup
        self.reply = reply
        self.step = -(-found_blocks // BLOCKS_MAX)
        self.next_block = lookup.first_block
        self.end_block = lookup.first_block + found_blocks
        self.jobs_out = 0


class _Job:
    """Some blocks of a hit, under comparison. `blocks` are indices in the lease."""

    __slots__ = ("blocks", "check", "compared", "diverged", "lease", "session", "worst")

    def __init__(self, check: _Check, blocks: list[int]) -> None:
        self.check = check
        self.blocks = blocks
        self.session = check.lookup.session
        self.lease = check.reply.lease
        self.compared = len(blocks)
        self.diverged: set[int] = set()
        self.worst = 0.0


class Shadows:
    """All shadow checks of one engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        attachment: Attachment,
        lookups: EngineLookups,
        stores: EngineStores,
        stats: SchedulerStats,
    ) -> None:
        self._config = config
        self._attachment = attachment
        self._lookups = lookups
        self._stores = stores
        self._stats = stats
        self._checks: dict[int, _Check] = {}
        """Lease → check."""
        self._jobs: dict[int, _Job] = {}

    def has_work(self, lookup: Lookup, full_blocks: int) -> bool:
        """Whether `bind` could do anything: the cheap question of every step."""
        if lookup.stage is not LookupStage.SHADOW:
            return False
        check = self._checks.get(lookup.parts[0].lease)
        return full_blocks > (lookup.first_block if check is None else check.next_block)

    def bind(
        self,
        lookup: Lookup,
        *,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        full_blocks: int,
    ) -> None:
        """Compare the blocks that this step completes. Arguments as of `EngineStores.bind`."""
        part = lookup.parts[0]
        assert part.reply is not None
        if lookup.session != self._attachment.session:
            self._end(lookup)
            return
        check = self._checks.get(part.lease)
        if check is None:
            found = self._lookups.found_blocks(part)
            check = self._checks[part.lease] = _Check(lookup, part.reply, found)
        first, end = lookup.first_block, min(full_blocks, check.end_block)
        blocks = [b - first for b in range(check.next_block, end) if not (b - first) % check.step]
        check.next_block = max(check.next_block, end)
        if blocks:
            number = self._stores.compare(
                [block_ids[first + b] for b in blocks],
                keys=[bytes(keys[first + b]) for b in blocks],
                slots=self._rows(check.reply.slots, blocks, 4),
                generations=self._rows(check.reply.generations, blocks, 8),
                checksums=self._rows(check.reply.checksums, blocks, CHECKSUM_BYTES),
            )
            check.jobs_out += 1
            self._jobs[number] = _Job(check, blocks)
        self._end_if_done(part.lease, check)

    def _rows(self, array: bytes, rows: list[int], size: int) -> bytes:
        """Rows of an array [n][S]; empty if the array is."""
        if not array:
            return b""
        shape = (-1, self._attachment.shard_counts[0] * size)
        return np.frombuffer(array, np.uint8).reshape(shape)[rows].tobytes()

    def reported(self, result: CompareResult) -> None:
        """Take one rank's result."""
        job = self._jobs.get(result.job)
        if job is not None:
            job.compared = min(job.compared, result.compared)
            job.diverged.update(result.diverged)
            job.worst = max(job.worst, result.worst)

    def finished(self, number: int) -> None:
        """No rank compares this job's blocks any more."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        check = job.check
        check.jobs_out -= 1
        self._stats.add("shadow_blocks", job.compared)
        self._stats.add("shadow_blocks_diverged", len(job.diverged))
        if (job.compared or job.diverged) and job.session == self._attachment.session:
            blocks = sorted(job.blocks[index] for index in job.diverged)
            self._attachment.outbox.append(
                Compared(
                    session=job.session,
                    lease=job.lease,
                    blocks=job.compared,
                    diverged=np.array(blocks, "<u4").tobytes(),
                    error_ppm=int(min(job.worst, 1000.0) * PPM),
                )
            )
        self._end_if_done(job.lease, check)

    def ended(self, lookup: Lookup) -> None:
        """The request is over: running comparisons still end, under generations alone."""
        if lookup.stage is LookupStage.SHADOW:
            self._end(lookup)

    def _end_if_done(self, lease: int, check: _Check) -> None:
        is_done = check.next_block >= check.end_block and not check.jobs_out
        if is_done and self._checks.get(lease) is check:
            self._end(check.lookup)

    def _end(self, lookup: Lookup) -> None:
        if lookup.parts:
            self._checks.pop(lookup.parts[0].lease, None)
        self._lookups.release(lookup)
