"""Stores: which filled blocks are bound to credits, and which engine blocks must be fenced.

A block is stored when a forward of this step completes it, its key is known, it is not known to be
stored, and a credit is at hand. Source blocks are not pinned: the engine may free and reuse them at
once, so a block that is handed out again while its copy may still run goes into the step's fence.

Rules. 1: a credit is bound to one key, once. 2: keys are taken in chain order; without credits the
rest waits for a later step of the same request. 3: only a rank's report ends an outstanding block.
4: each KV cache group has keys, credits and jobs of its own. A block that the engine has freed, or
that no later hit can need, is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from kvstore.client.core.attachment import Attachment, Credit
from kvstore.client.core.plan import CompareResult, RankReport, StoreJob
from kvstore.client.core.request import LookupPart, Request
from kvstore.types import Latest
from kvstore.units import NS_PER_MS

RECENT_KEYS_MAX = 65_536
"""Keys remembered as stored, so that equal prompts are stored once."""
WORK_NS_MAX = 1000 * NS_PER_MS
"""Longest time that running copies keep an otherwise idle engine stepping."""
NULL_BLOCK = 0
"""Stands in a block table for blocks that the engine does not keep."""


class FilledBlocks(NamedTuple):
    """Blocks of one KV cache group of a request, of which some are complete after this step."""

    group: int
    keys: Sequence[bytes]
    """Keys of the request's blocks, at least `full_blocks`."""
    block_ids: Sequence[int]
    """The request's whole block table, at least `full_blocks`."""
    full_blocks: int
    """Blocks complete once this step's forward has run."""


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job that not all ranks have ended."""

    job: StoreJob
    part: LookupPart | None = None
    """Lease of a hit of which it compares some blocks; None: it stores."""
    blocks: Sequence[int] = ()
    """Indices in the lease of the blocks compared."""
    reports: int = 0
    results: list[CompareResult] = field(default_factory=list)


class EngineStores:
    """All stores of one engine."""

    def __init__(self, attachment: Attachment) -> None:
        self._config, self._stats = attachment.config, attachment.stats
        self._attachment = attachment
        self._sequence = 0
        self.last_job = 0
        """Number of the last job so far."""
        self.recent = Latest[bytes, int](RECENT_KEYS_MAX)
        """Keys that count as stored; the owner clears it when the node may have lost everything."""
        self._outstanding: dict[int, OpenJob] = {}
        self._last_submit_ns = 0
        self._batches: defaultdict[int, list[tuple[int, bytes, Credit]]] = defaultdict(list)
        """By KV cache group: blocks that the next plan stores, their keys, and credits."""
        self._comparing: list[OpenJob] = []

    def next_sequence(self) -> int:
        """Number of a hint that is sent now, counted with stores: keys stored after it have higher
        numbers."""
        self._sequence += 1
        return self._sequence

    def has_work(self, request: Request, settled_tokens: int) -> bool:
        """Whether `bind` could do anything: the cheap question of every step."""
        if request.is_old or self._config.store == "none":
            return False
        credits = self._attachment.credits
        for group, size in enumerate(self._config.block_sizes):
            full_blocks = request.full_blocks(settled_tokens, size)
            if full_blocks > request.next_blocks[group] and credits[group]:
                return True
        return False

    def bind(
        self, request: Request, filled: FilledBlocks, needed: Sequence[bool] | None = None
    ) -> None:
        """Bind blocks next_block … full_blocks-1 of a KV cache group to credits, as far as they go.

        Args:
            request: whose blocks they are. Those that the engine had in its own cache count as
                stored without an answer to the hint.
            filled: its blocks.
            needed: flags of the blocks from next_block on that a later hit can need; None: all.
        """
        group, keys, block_ids, full_blocks = filled
        credits = self._attachment.credits[group]
        self._sequence += 1
        first = request.next_blocks[group]
        for i in range(first, full_blocks):
            key, block = bytes(keys[i]), int(block_ids[i])
            name = key + bytes((group,)) if group else key
            is_kept = block != NULL_BLOCK and (needed is None or needed[i - first])
            if is_kept and not self._is_stored(request, group, name, i):
                if not credits:
                    self._stats["store_blocks_without_credit"] += full_blocks - i
                    return
                self._batches[group].append((block, key, credits.popleft()))
                self.recent[name] = self._sequence
            request.next_blocks[group] = i + 1

    def take_jobs(self, now_ns: int) -> tuple[StoreJob, ...]:
        """The step's jobs: blocks that were bound, blocks to compare."""
        begun = []
        for group, batch in self._batches.items():
            blocks, keys, credits = zip(*batch, strict=True)
            slots, generations = map(b"".join, zip(*credits, strict=True))
            job = self._made(blocks, group, keys, slots=slots, generations=generations)
            begun.append(OpenJob(job))
            self._stats["store_blocks_submitted"] += len(batch)
            self._last_submit_ns = now_ns
        begun += self._comparing
        self._batches.clear()
        self._comparing = []
        for entry in begun:
            self._outstanding[entry.job.job] = entry
        return tuple(entry.job for entry in begun)

    def _made(
        self, block_ids: Sequence[int], group: int, keys: Sequence[bytes], **more: Any
    ) -> StoreJob:
        self.last_job += 1
        return StoreJob(
            job=self.last_job,
            session=self._attachment.session,
            block_ids=tuple(block_ids),
            keys=b"".join(keys),
            group=group,
            **more,
        )

    def compare(self, part: LookupPart, blocks: Sequence[int], filled: FilledBlocks) -> None:
        """Plan a comparison of blocks of a lease, by their index in it, with the engine's, after
        this step, which completes them. The job ends like a store, and its blocks are fenced like a
        store's."""
        places, first = part.places(blocks), part.first
        block_ids = [filled.block_ids[first + block] for block in blocks]
        keys = [bytes(filled.keys[first + block]) for block in blocks]
        job = self._made(block_ids, part.group, keys, compare=True, **places)
        self._comparing.append(OpenJob(job, part, blocks))

    def fence(self, new_blocks: Iterable[int]) -> tuple[int, ...]:
        """Those of the newly handed out blocks whose copy may still run."""
        return tuple(sorted({*new_blocks}.intersection(self.source_blocks())))

    def source_blocks(self) -> Iterator[int]:
        """All blocks whose copy may still run."""
        return chain.from_iterable(entry.job.block_ids for entry in self._outstanding.values())

    def reported(self, report: RankReport) -> list[OpenJob]:
        """Take one rank's report. Returns the jobs that all ranks have ended now, whose blocks are
        free."""
        for result in report.compared:
            if result.job in self._outstanding:
                self._outstanding[result.job].results.append(result)
        ended = []
        for job_id in report.store_jobs_done:
            entry = self._outstanding.get(job_id)
            if entry is None:
                continue
            entry.reports += 1
            if entry.reports >= self._config.hello.rank_count:
                ended.append(self._outstanding.pop(job_id))
        return ended

    def has_running(self, last_job: int) -> bool:
        """Whether jobs up to this one have not ended on all ranks."""
        return any(job <= last_job for job in self._outstanding)

    def running(self, now_ns: int) -> bool:
        """Whether copies run that an idle engine should keep stepping for, within the bound."""
        return bool(self._outstanding) and now_ns - self._last_submit_ns < WORK_NS_MAX

    def _is_stored(self, request: Request, group: int, name: bytes, index: int) -> bool:
        stored_at = self.recent.get(name)
        if stored_at is not None and stored_at > request.hint_sequence:
            return True
        present = request.present.get(group)
        # Hints cover the blocks of a prompt, and their answers are padded to whole bytes.
        if present is not None and index < len(present):
            return bool(present[index])
        local_tokens = request.local_tokens + request.loaded_tokens
        return stored_at is not None or index < local_tokens // self._config.block_sizes[group]
