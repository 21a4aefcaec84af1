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
from kvstore.client.core.lookups import EngineLookups
from kvstore.client.core.plan import CompareResult, SchedulerStats
from kvstore.client.core.request import LookupPart, LookupStage, Request
from kvstore.client.core.stores import NULL_BLOCK, EngineStores
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.messages import Compared

BLOCKS_MAX: Final = 64
"""Compared per lease, spread over all of it: an error in a prefix affects most of its blocks."""
PPM: Final = 1_000_000


class _Check:
    """The leased blocks of one KV cache group of a hit that is being computed."""

    __slots__ = ("end_block", "jobs_out", "next_block", "part", "reply", "request", "step")

    def __init__(self, request: Request, part: LookupPart, found_blocks: int) -> None:
        assert part.reply is not None
        self.request = request
        self.part = part
        self.reply = part.reply
        self.step = max(1, -(-found_blocks // BLOCKS_MAX))
        self.next_block = part.first
        self.end_block = part.first + found_blocks
        self.jobs_out = 0

    @property
    def is_done(self) -> bool:
        return self.next_block >= self.end_block and not self.jobs_out

    def take(self, block_ids: Sequence[int], full_blocks: int) -> list[int]:
        """Blocks to compare of those up to `full_blocks`, as indices in the lease. The engine does
        not keep all blocks of a window or of recurrent layers."""
        first, end = self.part.first, min(full_blocks, self.end_block)
        blocks = range(self.next_block, end)
        self.next_block = max(self.next_block, end)
        return [
            b - first for b in blocks if not (b - first) % self.step and block_ids[b] != NULL_BLOCK
        ]


class _Job:
    """Some blocks of a hit, under comparison. `blocks` are indices in the lease."""

    __slots__ = ("blocks", "check", "compared", "diverged", "session", "worst")

    def __init__(self, check: _Check, blocks: list[int]) -> None:
        self.check = check
        self.blocks = blocks
        self.session = check.request.session
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
        self._checks: dict[int, list[_Check]] = {}
        """By request."""
        self._jobs: dict[int, _Job] = {}

    def has_work(self, request: Request, settled_tokens: int) -> bool:
        """Whether `bind` could do anything: the cheap question of every step."""
        if request.stage is not LookupStage.SHADOW:
            return False
        sizes = self._config.block_sizes
        checks = self._checks.get(request.tag)
        if checks is None:
            return any(settled_tokens // sizes[p.group] > p.first for p in request.parts)
        return any(settled_tokens // sizes[c.part.group] > c.next_block for c in checks)

    def bind(
        self,
        request: Request,
        group: int,
        *,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        full_blocks: int,
    ) -> None:
        """Compare the blocks of a KV cache group that this step completes. Arguments as of
        `EngineStores.bind`."""
        if request.stage is not LookupStage.SHADOW:
            return
        if request.session != self._attachment.session:
            self._end(request)
            return
        checks = self._checks.get(request.tag)
        if checks is None:
            checks = self._checks[request.tag] = [
                _Check(request, part, self._whole_blocks(request, part)) for part in request.parts
            ]
        for check in checks:
            if check.part.group == group:
                self._compare(check, keys, block_ids, full_blocks)
        self._end_if_done(request)

    def _whole_blocks(self, request: Request, part: LookupPart) -> int:
        """Blocks to compare: without the tail, whose block goes on with this request's answer."""
        if not request.end_tokens:
            return part.found_blocks
        return min(part.found_blocks, request.end_tokens // self._config.block_tokens - part.first)

    def _compare(
        self, check: _Check, keys: Sequence[bytes], block_ids: Sequence[int], full_blocks: int
    ) -> None:
        blocks = check.take(block_ids, full_blocks)
        if not blocks:
            return
        first, group = check.part.first, check.part.group
        number = self._stores.compare(
            [block_ids[first + b] for b in blocks],
            group,
            keys=[bytes(keys[first + b]) for b in blocks],
            slots=self._rows(check.reply.slots, group, blocks, 4),
            generations=self._rows(check.reply.generations, group, blocks, 8),
            checksums=self._rows(check.reply.checksums, group, blocks, CHECKSUM_BYTES),
        )
        check.jobs_out += 1
        self._jobs[number] = _Job(check, blocks)

    def _rows(self, array: bytes, group: int, rows: list[int], size: int) -> bytes:
        """Rows of an array [n][S]; empty if the array is."""
        if not array:
            return b""
        shape = (-1, self._attachment.shard_counts[group] * size)
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
                    lease=check.part.lease,
                    blocks=job.compared,
                    diverged=np.array(blocks, "<u4").tobytes(),
                    error_ppm=int(min(job.worst, 1000.0) * PPM),
                )
            )
        self._end_if_done(check.request)

    def ended(self, request: Request) -> None:
        """The request is over: running comparisons still end, under generations alone."""
        if request.stage is LookupStage.SHADOW:
            self._end(request)

    def _end_if_done(self, request: Request) -> None:
        checks = self._checks.get(request.tag)
        if checks is not None and all(check.is_done for check in checks):
            self._end(request)

    def _end(self, request: Request) -> None:
        self._checks.pop(request.tag, None)
        self._lookups.release(request)
