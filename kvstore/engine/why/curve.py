"""Miss-ratio curve: the hit ratio that dram of another size would have, from live traffic; and ages
of evicted blocks, which show the same of the present size.

    Hint, LeaseAsk, Seal ─sample─▶ waiting ─Tick─▶ five scaled-down caches ─▶ ratio by capacity

Definition. The share of looked-up prompt tokens (full blocks that an engine's cache lacks) in
leading runs of blocks that dram of that capacity holds. Behind the first block that is
missing nothing counts, whatever is held. Blocks from disk or other nodes count as missing, so the
curve is that of dram alone, with or without lower tiers.

Each capacity has a cache of its own: the node's eviction policy over the sampled blocks, with as
much less room as there are fewer blocks (miniature simulation, Waldspurger et al., ATC '17). A
block is sampled where its print, a hash, is below a limit; the limit falls so that a cache tracks
at most KEYS_MAX blocks (SHARDS of fixed size, Waldspurger et al., FAST '15). Sampled misses are
scaled up and taken from the exact number of tokens: whatever the sample lacks counts as hit, since
few blocks that are hit often make most of the difference (their SHARDS-adj).

Under `lru` one block's presence implies that of all before it, so sampled blocks show the length
of runs; under `reuse` a run ends at the first *sampled* block that is missing.

Rules. 1: no call raises into a lookup: after an error the curve is off, and says so. 2: a lookup
costs a mask over its keys; caches work at the next ticks, for KEYS_PER_TICK sampled blocks each.
Simplified: a block counts as stored from its lookup on, no block is leased, quotas and slabs are
ignored, and all sizes of slots share one order. Does not cover: hits that a node counts (`ledger`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Policy, Prints, Stamps, Words, maker, prints
from kvstore.engine.memory.table import Keys
from kvstore.engine.sessions.owners import Asker
from kvstore.units import NS_PER_DAY, NS_PER_MS, NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX

SCALES: Final = (0.5, 1, 2, 4, 8)
"""Capacities of the simulated caches, as multiples of the dram of this node."""
KEYS_MAX: Final = 640
"""Most sampled blocks that each simulated cache tracks."""
BATCH_KEYS: Final = 128
"""Sampled blocks that a cache takes at once: evictions come at the end of a batch. Small caches
take a quarter of what they hold."""
KEYS_PER_TICK: Final = 128
"""Sampled blocks of one tick, so that a lookup waits a millisecond or two for it."""
WAITING_KEYS_MAX: Final = 2048
"""Most sampled blocks that wait for a tick; further lookups are left out."""
BLOCKS_MIN: Final = 1000
"""A curve needs this many looked-up blocks, or as many as dram holds, if that is more."""
_ROWS: Final = KEYS_MAX + BATCH_KEYS + KEYS_PER_DATAGRAM_MAX
_PRINTS: Final = 1 << 64
_FALL: Final = 7 / 8


class BlockEvent(enum.Enum):
    """Ways in which the engine sees blocks of a chain."""

    NAMED = enum.auto()
    """A hint: a request has these blocks in its prompt."""
    ASKED = enum.auto()
    """A lookup asks for these blocks."""
    STORED = enum.auto()


class CurveReport(msgspec.Struct, frozen=True):
    """Expected hits with one capacity of dram."""

    capacity: str
    """Capacity as a multiple of this node's dram: 0.5x to 8x."""
    capacity_bytes: int
    hit_ratio: float | None
    """Share of the looked-up prompt tokens; None: too few lookups yet."""
    is_least: bool
    """Whether the simulated cache is not full yet: the hit ratio still rises."""
    prefill_ms_per_day: int | None
    """Compute time that these hits save per day; None: too few lookups, or no engine has measured
    its pace."""
    blocks: int
    """Looked-up blocks since the start …"""
    blocks_needed: int
    """… and how many a curve needs."""
    trouble: str = ""
    """Error that switched the curve off."""


class _Totals(NamedTuple):
    """Sums over all lookups, not only over sampled blocks."""

    blocks: float = 0
    size_bytes: float = 0
    tokens: float = 0
    compute_ns: float = 0

    def plus(self, more: _Totals) -> _Totals:
        return _Totals(*(mine + its for mine, its in zip(self, more, strict=True)))


class _Sample(NamedTuple):
    seen: BlockEvent
    prints: list[int]
    """Prints of its sampled blocks, in chain order."""
    size_bytes: int
    tokens: int
    compute_ns: int
    totals: _Totals
    """Sums over all lookups since the sample before, up to this one."""


class Miniature:
    """Simulation of one capacity: the eviction policy over sampled blocks."""

    def __init__(self, policy: str, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.rate = 1.0
        self.limit = _PRINTS
        self.missed_tokens = self.missed_ns = 0.0
        """Missed tokens, and `missed_ns` to compute them, scaled up from sampled to all blocks."""
        self.is_full = False
        self._stamps: Stamps = np.zeros(_ROWS, dtype=np.int64)
        self._prints: Prints = np.zeros(_ROWS, dtype=np.uint64)
        self._sizes = np.zeros(_ROWS, dtype=np.int64)
        self._all = np.ones(_ROWS, dtype=bool)
        self._make_policy = maker(policy, self._stamps)
        self._policy: Policy | None = None
        self._row_of: dict[int, int] = {}
        self._free = list(range(_ROWS))
        self._used_bytes = 0
        self._next_stamp = 1
        self._batch: list[_Sample] = []
        self._batch_keys = 0

    @property
    def tracked(self) -> int:
        """Number of blocks in the simulated cache."""
        return len(self._row_of)

    def add(self, sample: _Sample) -> None:
        """Queue a sample of blocks, less those that this cache does not sample; a full batch is
        processed."""
        if self.limit < _PRINTS:
            its = [print_ for print_ in sample.prints if print_ < self.limit]
            sample = sample._replace(prints=its)
        if sample.prints:
            self._batch.append(sample)
            self._batch_keys += len(sample.prints)
            if self._batch_keys >= min(BATCH_KEYS, self.tracked // 4):
                self.flush()

    def flush(self) -> None:
        """Process the queued samples."""
        samples, self._batch, self._batch_keys = self._batch, [], 0
        self._take(samples)
        self._shrink()
        while self.tracked > KEYS_MAX:
            self._fall()

    def _take(self, samples: Sequence[_Sample]) -> None:
        """Look up and use the blocks of these samples, in order."""
        row_of, new, used, stamps = self._row_of, set[int](), set[int](), dict[int, int]()
        for sample in samples:
            self._next_stamp += len(sample.prints)
            stamp, missed, is_run = self._next_stamp, 0, True
            is_named, is_stored = sample.seen is BlockEvent.NAMED, sample.seen is BlockEvent.STORED
            for print_ in sample.prints:
                stamp -= 1
                row = row_of.get(print_)
                if row is None:
                    missed, is_run = missed + 1, False
                    if is_named:
                        continue
                    row_of[print_] = row = self._free.pop()
                    self._prints[row], self._sizes[row] = print_, sample.size_bytes
                    self._used_bytes += sample.size_bytes
                    new.add(row)
                elif is_stored:
                    continue
                elif is_named:
                    used.add(row)
                elif not is_run:
                    missed += 1
                stamps[row] = stamp
            if sample.seen is BlockEvent.ASKED:
                self.missed_tokens += missed * sample.tokens / self.rate
                self.missed_ns += missed * sample.compute_ns / self.rate
        self._apply(new, used, stamps)

    def _apply(self, new: set[int], used: set[int], stamps: dict[int, int]) -> None:
        """Apply a batch to the policy. `new`: rows of new blocks; `used`: rows used by a new
        request; `stamps`: last stamp of each row."""
        listed = sorted(stamps, key=stamps.__getitem__)
        rows: Words = np.array(listed, np.int64)
        its: Stamps = np.array([stamps[row] for row in listed], np.int64)
        is_new = np.array([row in new for row in listed], dtype=bool)
        is_used = np.array([row in used for row in listed], dtype=bool)
        if new:
            if self._policy is None:
                held = min(KEYS_MAX, int(self.capacity_bytes / self._sizes[rows[is_new][0]]))
                self._policy = self._make_policy(members=lambda: self._all, slot_count_max=held)
            self._policy.insert(rows[is_new], its[is_new], self._prints[rows[is_new]])
        if self._policy is not None:
            self._policy.use(rows[is_used], its[is_used])
            self._policy.touch(rows[~is_new & ~is_used], its[~is_new & ~is_used])

    def _shrink(self) -> None:
        while (
            self._policy is not None
            and (over := self._used_bytes - self.capacity_bytes * self.rate) > 0
        ):
            self.is_full = True
            count = max(1, int(over * len(self._row_of) / self._used_bytes))
            self._forget(self._policy.pop(count, self._all.__getitem__))

    def _forget(self, rows: Words) -> None:
        for row, print_ in zip(rows.tolist(), self._prints[rows].tolist(), strict=True):
            del self._row_of[print_]
            self._free.append(row)
        self._used_bytes -= int(self._sizes[rows].sum())

    def _fall(self) -> None:
        """Lower the sampling rate, so that fewer blocks are tracked from now on."""
        assert self._policy is not None
        self.rate *= _FALL
        self.limit = int(self.rate * _PRINTS)
        held = np.fromiter(self._row_of.values(), np.int64, len(self._row_of))
        rows = held[self._prints[held] >= np.uint64(self.limit)]
        self._policy.forget(rows)
        self._forget(rows)
        self._shrink()

    def fade(self) -> None:
        """Halve the counts."""
        self.missed_tokens /= 2
        self.missed_ns /= 2


class Curve:
    """The curve of one node."""

    def __init__(self, policy: str, capacity_bytes: int) -> None:
        self.caches = [Miniature(policy, scale * capacity_bytes) for scale in SCALES]
        self.trouble = ""
        self._waiting: deque[_Sample] = deque()
        self._waiting_keys = 0
        self._blocks = 0
        self._coming = self._totals = _Totals()
        self._since_ns = -1

    def see(self, seen: BlockEvent, asker: Asker, keys: Keys, ns_per_token: int = 0) -> None:
        """Count blocks of a KV cache group that were named, asked for or stored, in chain order.

        Args:
            seen: how the blocks were seen.
            asker: the group.
            keys: of the blocks, [n, 4].
            ns_per_token: compute time per token on this engine; 0: not known.
        """
        if self._waiting_keys < WAITING_KEYS_MAX:
            self._guarded(self._see, seen, asker, keys, ns_per_token)

    def see_stored(self, asker: Asker, keys: Keys) -> None:
        """Take note of blocks that were sealed."""
        self.see(BlockEvent.STORED, asker, keys)

    def _see(self, seen: BlockEvent, asker: Asker, keys: Keys, ns_per_token: int) -> None:
        size_bytes, tokens = sum(asker.slot_sizes), asker.block_tokens
        if seen is BlockEvent.ASKED:
            count, its = len(keys), len(keys) * tokens
            asked = _Totals(count, count * size_bytes, its, its * ns_per_token)
            self._blocks += count
            self._coming = self._coming.plus(asked)
        marks, limit = prints(asker.scopes[0], keys), self.caches[0].limit
        if limit < _PRINTS:
            marks = marks[marks < np.uint64(limit)]
        if len(marks):
            each = size_bytes, tokens, tokens * ns_per_token, self._coming
            self._waiting.append(_Sample(seen, marks.tolist(), *each))
            self._coming = _Totals()
            self._waiting_keys += len(marks)

    def tick(self, now_ns: int) -> None:
        """Let the simulated caches process some of the samples that wait. Counts fade by half every
        12 hours."""
        self._guarded(self._tick, now_ns)

    def _tick(self, now_ns: int) -> None:
        if self._since_ns < 0:
            self._since_ns = now_ns
        budget = KEYS_PER_TICK
        while self._waiting and budget > 0:
            sample = self._waiting.popleft()
            budget -= len(sample.prints)
            self._waiting_keys -= len(sample.prints)
            self._totals = self._totals.plus(sample.totals)
            for cache in self.caches:
                cache.add(sample)
        if now_ns - self._since_ns >= NS_PER_DAY:
            self._since_ns = now_ns - NS_PER_DAY // 2
            self._totals = _Totals(*(total / 2 for total in self._totals))
            for cache in self.caches:
                cache.fade()

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        """Do this work, unless the curve is off. Rule 1: an error switches it off."""
        if self.trouble:
            return
        try:
            work(*args)
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"[:200]
            self._waiting.clear()

    def report(self, now_ns: int) -> list[CurveReport]:
        """One row per capacity, ascending."""
        for cache in self.caches:
            self._guarded(cache.flush)
        its, dram_bytes = self._totals, self.caches[SCALES.index(1)].capacity_bytes
        needed = max(BLOCKS_MIN, int(dram_bytes * its.blocks / max(its.size_bytes, 1)))
        days = max(1, now_ns - self._since_ns) / NS_PER_DAY
        is_known, ratio, rows = self._blocks >= needed and its.tokens > 0, 0.0, []
        is_known &= not self.trouble
        for scale, cache in zip(SCALES, self.caches, strict=True):
            # A larger cache is no worse, whatever the sample says.
            ratio = max(ratio, 1 - cache.missed_tokens / max(its.tokens, 1))
            saved_ms = max(0.0, its.compute_ns - cache.missed_ns) / days / NS_PER_MS
            row = CurveReport(
                f"{scale:g}x",
                int(cache.capacity_bytes),
                ratio if is_known else None,
                not cache.is_full,
                int(saved_ms) if is_known and its.compute_ns else None,
                *(self._blocks, needed, self.trouble),
            )
            rows.append(row)
        return rows


# ── ages ──────────────────────────────────────────────────────────────────────────────────────────
# Ages of evicted blocks: time since their last use, from their place in the order of use.
#
#     mark ── every second: order so far, time ──▶ marks      order of a victim ──▶ age ──▶ counts
#
# Uses of blocks are numbered (`Slots.stamps`; on disk by location, as a log is written in order),
# so a few marks of (number, time) give the time of each, and no use of a block costs anything more.
# Marks thin out with their age: about RESOLUTION of them for each doubling, so that an age is at
# most 1 s and 5 % above the true one. Blocks of an earlier process count as used at the start of
# this one. Does not cover: the choice of victims (`policies`).

BOUNDS_S: Final = (60, 600, 3600, 21_600, 86_400)
"""Upper bounds, in seconds, of the age histogram in /metrics: a minute, ten, an hour, six, a
day."""
GAP_NS: Final = NS_PER_S
MARKS_MAX: Final = 4096
RESOLUTION: Final = 32

Numbers = NDArray[np.int64]


class Ages:
    """Ages of the blocks that one tier evicted, counted by BOUNDS_S."""

    def __init__(self) -> None:
        self._marks = np.zeros((2, MARKS_MAX), dtype=np.int64)
        """Row 0: number of the next use at each mark; row 1: time of the mark in ns."""
        self._count = 0
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Evicted blocks up to each bound and above the one before; the last: above all."""
        self.total_ns = 0

    def mark(self, next_number: int, now_ns: int) -> None:
        """Note that uses from number `next_number` on come later than now. Numbers and times never
        fall."""
        if self._count and now_ns - int(self._marks[1, self._count - 1]) < GAP_NS:
            return
        if self._count == MARKS_MAX:
            self._thin_out(now_ns)
        self._marks[:, self._count] = next_number, now_ns
        self._count += 1

    def evicted(self, numbers: Numbers, now_ns: int) -> None:
        """Count evicted blocks, given the numbers of their last uses."""
        if not self._count:
            self.mark(0, now_ns)
        marks, times = self._marks[:, : self._count]
        at = np.searchsorted(marks, numbers, side="right") - 1
        ages = np.maximum(now_ns - times[np.maximum(at, 0)], 0)
        self.total_ns += int(ages.sum())
        found = np.searchsorted(np.array(BOUNDS_S) * NS_PER_S, ages)
        for place, count in enumerate(np.bincount(found, minlength=len(self.counts)).tolist()):
            self.counts[place] += count

    def _thin_out(self, now_ns: int) -> None:
        """Keep the first mark of all that are about as old."""
        ages = (now_ns - self._marks[1]) / GAP_NS
        octaves = np.floor(np.log2(np.maximum(ages, 1)) * RESOLUTION)
        _, first = np.unique(octaves, return_index=True)
        kept = self._marks[:, np.sort(first)]
        self._count = kept.shape[1]
        self._marks[:, : self._count] = kept
