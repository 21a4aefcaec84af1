"""Shadow checks: some hits are computed all the same, and compared with the cached blocks.

    a hit that was chosen ──▶ answered as a miss, its lease kept
    a step completes some of its blocks ──▶ a StoreJob that compares them on every rank
    all ranks have compared ──▶ Compared to the node; after the last one the lease goes back

A checksum proves that bytes are those which were stored under a key; only computing them again
proves that they belong to it. The price is the hit. Does not cover: which hits (`lookups`),
comparing (`kvstore.kernels.host`), effects of a difference (`kvstore.engine.trust`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.client.core.attachment import Attachment
from kvstore.client.core.lookups import EngineLookups
from kvstore.client.core.request import LookupPart, LookupStage, Request
from kvstore.client.core.stores import NULL_BLOCK, EngineStores, FilledBlocks, OpenJob
from kvstore.wire.messages import Compared

BLOCKS_MAX: Final = 64
"""Most blocks compared per lease, spread over all of it: an error in a prefix affects most of its
blocks."""
PPM: Final = 1_000_000


class Shadows:
    """All shadow checks of one engine."""

    def __init__(
        self, attachment: Attachment, lookups: EngineLookups, stores: EngineStores
    ) -> None:
        self._config, self._stats = attachment.config, attachment.stats
        self._attachment, self._lookups, self._stores = attachment, lookups, stores

    def has_work(self, request: Request, settled_tokens: int) -> bool:
        """Whether `bind` could do anything: the cheap question of every step."""
        if request.stage is not LookupStage.SHADOW:
            return False
        sizes = self._config.block_sizes
        parts = request.parts
        return any(settled_tokens // sizes[p.group] > p.first + p.checked for p in parts)

    def bind(self, request: Request, filled: FilledBlocks) -> None:
        """Compare the blocks of a KV cache group that this step completes."""
        if request.stage is not LookupStage.SHADOW:
            return
        if request.session != self._attachment.session:
            self._lookups.release(request)
            return
        for part in request.parts:
            if part.group == filled.group:
                self._compare(part, filled)
        self._end_if_done(request)

    def _whole_blocks(self, part: LookupPart) -> int:
        """Blocks to compare: without the tail, whose block goes on with this request's answer."""
        if not (end_tokens := part.request.end_tokens):
            return part.found_blocks
        return min(part.found_blocks, end_tokens // self._config.block_tokens - part.first)

    def _compare(self, part: LookupPart, filled: FilledBlocks) -> None:
        first, whole = part.first, self._whole_blocks(part)
        step = max(1, -(-whole // BLOCKS_MAX))
        end = min(filled.full_blocks - first, whole)
        # The engine does not keep all blocks of a window or of recurrent layers.
        due = (b for b in range(part.checked, end) if not b % step)
        blocks = [b for b in due if filled.block_ids[first + b] != NULL_BLOCK]
        part.checked = max(part.checked, end)
        if blocks:
            self._stores.compare(part, blocks, filled)
            part.jobs_out += 1

    def finished(self, entry: OpenJob) -> None:
        """All ranks have ended this job: report its result to the node."""
        part, blocks, session = entry.part, entry.blocks, entry.job.session
        if part is None:
            return
        part.jobs_out -= 1
        compared = min([len(blocks), *(each.compared for each in entry.results)])
        diverged = {blocks[index] for each in entry.results for index in each.diverged}
        self._stats["shadow_blocks"] += compared
        self._stats["shadow_blocks_diverged"] += len(diverged)
        if (compared or diverged) and session == self._attachment.session:
            found = np.array(sorted(diverged), "<u4").tobytes()
            worst = max((each.worst for each in entry.results), default=0.0)
            error_ppm = int(min(worst, 1000.0) * PPM)
            told = Compared(session, part.lease, compared, found, error_ppm)
            self._attachment.outbox.append(told)
        self._end_if_done(part.request)

    def ended(self, request: Request) -> None:
        """The request is over: release its leases. Comparisons under way still end, protected by
        generations alone."""
        if request.stage is LookupStage.SHADOW:
            self._lookups.release(request)

    def _end_if_done(self, request: Request) -> None:
        is_done = all(
            part.checked >= self._whole_blocks(part) and not part.jobs_out for part in request.parts
        )
        if is_done:
            self.ended(request)
