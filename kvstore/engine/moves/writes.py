"""Writes of blocks to disk: which blocks are worth it, their jobs, their pins.

    sealed in dram ──┐
                     ├─ worth it? ─ room? ─ budget? ──WriteFile──▶ slot pinned ──FileWritten──▶
    asked for again ─┘

Rules. 1: a slot that is being written from is pinned like a leased one. 2: stores never wait: a
block that cannot be written now is skipped, and offered again if it is asked for while in dram.
3: at most a quarter of the arena is in motion. 4: every write, blocks kept from a reclaimed segment
included, is charged to the budget first; reads are not.

Does not cover: places on disk (`files`), the I/O and its queues (`kvstore.tiers.file`).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.config import EngineConfig
from kvstore.engine.memory.policies import Mask, Prints, RecentKeys, Words, prints
from kvstore.engine.memory.residency import has_repeats
from kvstore.engine.memory.table import Rows
from kvstore.engine.moves.jobs import Jobs, pieces
from kvstore.engine.state import State
from kvstore.tier_events import FileWritten, WriteFile
from kvstore.types import PAGE_BYTES, AdmissionMode, Bucket, Tier
from kvstore.units import NS_PER_DAY
from kvstore.wire.record import Scope, record_pages

# ── admission ─────────────────────────────────────────────────────────────────────────────────────
# Choice of blocks: requested twice, and within the endurance of the disk.
#
#     blocks ──▶ admit ──▶ allow ──▶ write
#                seen twice?   bytes a day
#
# Flash wears out by writing, and most blocks of most workloads are never requested again: writing
# those costs endurance and room and gains nothing. Reads are never refused here.
#
# Callers ask once per request and block: for the blocks sealed now, and for blocks of a hint that
# are in dram and not on disk. So a block used while in dram is written then, and one that comes
# back after its eviction is written when it is sealed again. Blocks of a chain are seen together,
# so they are admitted together; a block on disk without those before it would be of no use.

TIGHT_SHARE: Final = 0.25
"""With less than this part of a day's budget left, only blocks seen before are written."""


class DiskAdmission:
    """Second sight and the day's budget, in front of one disk.

    With room for n keys: a key that was never seen is admitted as if it had been with probability
    at most 0.00012, and one seen m keys ago is taken for new with probability 0.001 at m = n / 4,
    0.05 at n / 2, 0.55 at n (`RecentKeys`): a write that comes later, never a wrong byte. Without a
    budget a node that writes everything remembers no key.

    The budget is a bucket of bytes with a daily rate and room for a day, full at first, less the
    bytes written by an earlier start of the node. Within any time, at most a day's budget and the
    refill during that time are written; an empty bucket allows none.

    As many keys are remembered, about, as the node has blocks at most: plenty for any disk. Their
    hashes have the configuration's seed, which no engine knows, so that none can choose keys that
    collide.
    """

    def __init__(self, config: EngineConfig) -> None:
        day_bytes, spent_bytes = config.file_day_bytes, config.file_spent_bytes
        assert not day_bytes or 0 <= spent_bytes <= day_bytes, "more is spent than there was"
        self._mode = config.file_admission
        self._budget = Bucket(day_bytes, NS_PER_DAY, taken=spent_bytes)
        self._seen: RecentKeys | None = None
        if self._mode is AdmissionMode.SECOND_SIGHT or day_bytes:
            self._seen = RecentKeys(key_count=config.block_count_max, seed=config.seed)

    def admit(self, prints: Prints, now_ns: int) -> Mask:
        """Mask of blocks to write. Each counts as seen from now on, in any mode, for the time when
        the budget gets tight."""
        everything = np.ones(len(prints), dtype=bool)
        if self._seen is None:
            return everything
        seen = self._seen.may_contain(prints)
        self._seen.add(prints)
        left = self.left_bytes(now_ns)
        is_tight = left is not None and left < TIGHT_SHARE * self._budget.size
        return seen if is_tight or self._mode is AdmissionMode.SECOND_SIGHT else everything

    def allow(self, count: int, record_bytes: int, now_ns: int) -> int:
        """Number of records of this size to write now; they count as written."""
        left = self.left_bytes(now_ns)
        allowed = count if left is None else min(count, left // record_bytes)
        self._budget.take(allowed * record_bytes)
        return allowed

    def give_back(self, unwritten_bytes: int) -> None:
        """Refund bytes to the budget that were allowed and not written."""
        self._budget.take(-unwritten_bytes)

    def left_bytes(self, now_ns: int) -> int | None:
        """Bytes that the budget allows now; None without one."""
        return self._budget.left(now_ns) if self._budget.size else None


# ── writes ────────────────────────────────────────────────────────────────────────────────────────

JOB_BYTES_MAX = 64 << 20
"""Size of a job of more than one block: jobs of some hundred MiB would fill any queue."""


class _Write(msgspec.Struct, frozen=True):
    """A job that writes blocks to disk; their slots are pinned until it ends."""

    words: Words
    generations: NDArray[np.uint64]
    size_bytes: int
    """Total size of the slots in dram."""
    record_bytes: int
    """Size of one block on disk."""


class Writes:
    """Decides which blocks are written to disk, and follows these writes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._admission = DiskAdmission(state.config)
        slots = len(state.slots.state)
        self._jobs: Jobs[_Write] = Jobs(state.numbers, state.config.arena_bytes, places=slots)

    def asked_again(self, scope: int, rows: Rows, *, block_bytes: int) -> None:
        """Offer blocks that a new request names to the disk; absent rows are -1."""
        if not self._state.config.file_bytes:
            return
        words = self._state.residency.words(rows)
        rows = rows[(words >= 0) & (self._jobs.at[words] == 0)]
        if not has_repeats(rows):
            self.offer(scope, rows, block_bytes=block_bytes)

    def offer(self, scope: int, rows: Rows, *, block_bytes: int) -> None:
        """Write those of these blocks in dram, in chain order, that are not on disk, worth it, and
        have room."""
        state = self._state
        if not state.config.file_bytes:
            return
        rows = rows[state.residency.file[rows] == 0]
        if not len(rows) or state.is_scope_off(scope, Tier.FILE):
            return
        named = prints(scope, state.residency.table.keys[rows])
        admitted = self._admission.admit(named, state.now_ns)
        state.counters.file_blocks_not_admitted += int((~admitted).sum())
        rows = rows[admitted]
        if len(rows) == 0:
            return
        words = state.residency.words(rows)
        size = state.slots.pool_of(int(words[0])).slot_bytes
        room = min(len(rows), self._jobs.room(size))
        pins = state.slots.pins
        room = min(room, pins.fitting(pins.node, words, 1))
        state.counters.file_writes_dropped += len(rows) - room
        its = Scope(*state.residency.address(scope), block_bytes)
        allowed = self.allow(room, its)
        pins.pin(words[:allowed], pins.node)
        for piece in pieces(allowed, JOB_BYTES_MAX // size):
            self._write(its, rows[piece], words[piece], size)

    def allow(self, count: int, scope: Scope) -> int:
        """How many blocks of a scope the budget allows now; these count as written."""
        allowed = self._admission.allow(count, _record_bytes(scope), self._state.now_ns)
        self._state.counters.file_blocks_over_budget += count - allowed
        return allowed

    def _write(self, scope: Scope, rows: Rows, words: Words, size: int) -> None:
        state = self._state
        generations = state.slots.generation[words]
        write = _Write(words, generations, len(words) * size, _record_bytes(scope))
        job = self._jobs.begin(write, words)
        state.say(WriteFile(job, scope, *state.named(rows, words)))

    def ended(self, event: FileWritten) -> tuple[Rows, NDArray[np.uint64]]:
        """A write ended, well or not: unpin its slots. Returns the rows of the written blocks and
        their places on disk."""
        state, job = self._state, self._jobs.end(event.job)
        locations = np.frombuffer(event.locations, dtype="<u8")
        stayed = state.slots.generation[job.words] == job.generations
        state.slots.pins.unpin(job.words[stayed], state.slots.pins.node)
        self._jobs.leave(event.job, job.words)
        state.slots.retry_starved()
        state.credits_due = True
        unwritten = int((locations == 0).sum())
        state.counters.file_writes_dropped += unwritten
        self._admission.give_back(unwritten * job.record_bytes)
        # A slot that was emptied meanwhile held another block, or none, while it was copied.
        same = stayed & (locations != 0)
        state.counters.file_blocks_written += int(same.sum())
        return state.residency.row_of_word[job.words[same]].astype(np.int64), locations[same]

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def budget_left_bytes(self) -> int | None:
        """Bytes that may be written now; None without a budget."""
        return self._admission.left_bytes(self._state.now_ns)

    def spent_bytes(self) -> int:
        """Used part of the day's budget; 0 without one."""
        left = self.budget_left_bytes()
        return 0 if left is None else max(0, self._state.config.file_day_bytes - left)


def _record_bytes(scope: Scope) -> int:
    """Size of a block on disk: its header's page and its payload."""
    return PAGE_BYTES * record_pages(scope)
