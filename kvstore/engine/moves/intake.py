"""Intake: the one way into dram, for blocks that an engine computed, the disk held, a peer sent.

    room? ─▶ slots held by a writer ─▶ the writer is done ─▶ wanted, and not here yet? ─▶ sealed
                                                               └─ no: the slot is free again

Rules. 1: the first copy of a (scope, key) stays. 2: leases that wait for a block are woken,
whichever way it came. 3: blocks that did not come from disk are offered to the disk.

Covers: jobs that bring blocks, room, rows, places, seals. Does not cover: credits (`stores`), the
choice of blocks to move (`files`, `fetches`), leases that wait (`arrivals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words, prints
from kvstore.engine.memory.shares import QuotaGroup
from kvstore.engine.memory.slots import Pool, Slots
from kvstore.engine.memory.table import Keys, Rows
from kvstore.engine.moves.arrivals import Arrivals
from kvstore.engine.moves.writes import Writes
from kvstore.engine.sessions.owners import Asker
from kvstore.engine.state import State
from kvstore.engine.why.reasons import FROM_DISK, PUSHED_HERE, Reason
from kvstore.types import Tier
from kvstore.wire.messages import checksums_array
from kvstore.wire.record import Scope, scopes_of

# ── room ──────────────────────────────────────────────────────────────────────────────────────────
# Free slots, and evictions for them. Slots are freed ahead of need, from the low watermark up to
# the high one, and never out of a lease.


class Admission:
    """Makes room in pools. `evict` must drop the blocks of slots and free the slots."""

    def __init__(
        self, slots: Slots, low: float, high: float, evict: Callable[[Words], None]
    ) -> None:
        """`low`, `high`: watermarks, as parts of a pool."""
        self._slots, self._low, self._high, self._evict = slots, low, high, evict

    def make_room(self, pool: Pool, wanted: int, active: set[int], asker: QuotaGroup) -> None:
        """Free up to `wanted` slots and, below the low watermark, up to the high one.

        Args:
            pool: where room is needed.
            wanted: slots.
            active: slot sizes that sessions use now; other pools give way first.
            asker: whose quota counts.
        """
        # Unused slabs come before any eviction.
        while len(pool.free) < max(wanted, self._low_mark(pool)) and self._slots.extend(pool):
            pass
        starved = pool.is_starved and pool.starved_asker == asker
        if len(pool.free) >= max(wanted, self._low_mark(pool)) or starved:
            return
        quotas = self._slots.quotas
        claims = quotas.any and not quotas.is_full(asker, wanted * pool.slot_bytes)
        while len(pool.free) < wanted and (
            (claims and self._take_over(pool, active, asker, claims=True))
            or self._take_over(pool, active, asker, claims=False)
        ):
            self._slots.extend(pool)
        target = max(wanted, int(pool.capacity * self._high))
        missing = target - len(pool.free)
        if missing > 0:
            self._evict(self._slots.victims(asker, pool, missing))
        if len(pool.free) < wanted:
            pool.is_starved, pool.starved_asker = True, asker

    def _low_mark(self, pool: Pool) -> int:
        return int(pool.capacity * self._low)

    def _take_over(self, pool: Pool, active: set[int], asker: QuotaGroup, *, claims: bool) -> bool:
        """Move one slab of another pool to this one; returns False if none may be moved.

        A slab may be moved from a pool whose slot size no session uses, if the slab was last used
        before the next victims of this pool; from a pool with more than an equal part of the arena,
        if this one has less; or from any pool, if this one has none. With `claims` it may be from
        any pool, but only with slots of other quota groups than `asker`. No group falls below its
        quota."""
        part = max(1, self._slots.slabs_ready // max(len(active), 1))
        best: tuple[int, int] | None = None
        quotas = self._slots.quotas
        may_lose = quotas.can_lose(asker, self._slots.slab_bytes) if quotas.any else None
        if may_lose is not None and claims:
            may_lose[asker] = False
        for other in self._slots.pools.values():
            unused = other.slot_bytes not in active
            needy = not pool.slabs or (len(pool.slabs) < part and len(other.slabs) > part)
            # Looking for the coldest slab takes a while: not between pools that have their part.
            if other is pool or not other.slabs or not (unused or needy or claims):
                continue
            coldest = self._slots.coldest_slab(other, may_lose)
            if coldest is None or (best is not None and best[1] <= coldest[1]):
                continue
            oldest = None if claims or needy else self._slots.oldest_stamp(pool)
            if oldest is None or coldest[1] < oldest:
                best = coldest
        if best is None:
            return False
        words = self._slots.words_in(best[0])
        self._evict(words[self._slots.state[words] != 0])
        self._slots.take_slab(best[0])
        return True


# ── intake ────────────────────────────────────────────────────────────────────────────────────────


class Copies(NamedTuple):
    """Blocks of one scope that were written to slots."""

    scope: int
    keys: Keys
    words: Words
    checksums: NDArray[np.uint64]
    """Two 64-bit words per block, u64 [n][2]."""


class Incoming(msgspec.Struct, kw_only=True):
    """A job that brings blocks into dram, from a tier or a peer. Its slots stay its own until the
    transfer has truly ended, however late."""

    asker: Asker
    keys: Keys
    columns: list[Words]
    """Slots, one column per shard."""
    is_void: bool = False
    """Whether the blocks were cleared meanwhile. Not used for reads from disk: there the rows are
    gone."""

    @property
    def words(self) -> Words:
        """Slots of all columns, [n][S], flat."""
        return np.stack(self.columns, axis=1).reshape(-1)

    def order(self, slots: Slots) -> tuple[tuple[Scope, ...], tuple[int, ...], bytes, Any]:
        """Fields that Fetch and Land share, from `targets` on."""
        its = self.asker
        targets = scopes_of(*its.address, its.shards, its.block_bytes)
        return targets, its.head_bytes, self.keys.tobytes(), slots.slots_of(self.words)

    @property
    def size_bytes(self) -> int:
        """Size of these slots."""
        return len(self.keys) * sum(self.asker.slot_sizes)


class Intake:
    """Puts blocks into dram: makes room, holds slots, and seals what was written to them."""

    def __init__(self, state: State, arrivals: Arrivals, writes: Writes) -> None:
        self._state = state
        watermarks = state.config.low_watermark, state.config.high_watermark
        self._admission = Admission(state.slots, *watermarks, state.evict)
        self._arrivals = arrivals
        self._writes = writes

    # ── room ─────────────────────────────────────────────────────────────────────────────────────

    def room(self, sizes: Sequence[int], wanted: int, quota: QuotaGroup, active: set[int]) -> int:
        """Make room for blocks of one slot of each of these sizes; returns how many fit, up to
        `wanted`. `active`: slot sizes that sessions use now; other pools give way first."""
        if wanted <= 0:
            return 0
        pools = {size: self._state.slots.pool(size) for size in sizes}
        for size, pool in pools.items():
            self._admission.make_room(pool, wanted * sizes.count(size), active, quota)
        # Counted at the end: making room for one size may take what was free for another.
        return min(wanted, *(len(pool.free) // sizes.count(s) for s, pool in pools.items()))

    def room_for(self, asker: Asker, wanted: int) -> int:
        """Make room for blocks that are brought for a request; returns how many fit, up to `wanted`
        and to what may be pinned."""
        state, sizes, block_bytes = self._state, asker.slot_sizes, sum(asker.slot_sizes)
        pins = state.slots.pins
        pinnable = pins.room(pins.node, asker.quota, block_bytes) // block_bytes
        active = state.active_sizes()
        state.make_room_for(Reason.EVICTED_FOR_READS, asker.title)
        return self.room(sizes, min(wanted, pinnable), asker.quota, active | set(sizes))

    def hold(
        self, asker: Asker, count: int, writers: Iterable[int], *, session: int = 0
    ) -> list[Words]:
        """Grant slots for `count` blocks: one column of words for each shard, granted to its
        writer."""
        slots, quota = self._state.slots, asker.quota
        return [
            slots.grant(slots.pools[size], count, writer=writer, session=session, quota=quota)
            for size, writer in zip(asker.slot_sizes, writers, strict=False)
        ]

    # ── arrival ──────────────────────────────────────────────────────────────────────────────────

    def store(self, copies: Copies, *, block_bytes: int) -> NDArray[np.bool_]:
        """Seal blocks that an engine computed, no key twice. Returns flags of those that dram did
        not hold and now holds in these slots; the other slots are free."""
        rows, absent = self._find(copies)
        taken = self._put(copies, rows, absent)
        self._writes.offer(copies.scope, taken, block_bytes=block_bytes)
        return absent

    def fetch(
        self, job: Incoming, good: bytes, checksums: bytes, *, search: int = PUSHED_HERE
    ) -> NDArray[np.bool_]:
        """Seal the good blocks that another node sent, unless they were cleared or switched off on
        their way. Returns flags of the blocks that count. `checksums` [n][S], or empty; `search`:
        number of the index query that led to them."""
        state, asker, count = self._state, job.asker, len(job.keys)
        flags = np.frombuffer(good, dtype=np.bool_)
        if job.is_void or state.is_off(*asker.address):
            flags = np.zeros(count, dtype=bool)
        sums = np.zeros((count, len(asker.shards), 2), dtype=np.uint64)
        if checksums:
            sums[:] = checksums_array(checksums).reshape(sums.shape)
        for column, words in enumerate(job.columns):
            # Its number may have been forgotten and given anew while the blocks were on their way.
            scope = state.residency.scope(asker.tenant, asker.space, asker.shards[column])
            copies = Copies(scope, job.keys, words, sums[:, column])
            rows, absent = self._find(copies)
            taken = self._put(copies, rows, flags & absent, origin=search)
            self._writes.offer(scope, taken, block_bytes=asker.block_bytes[column])
        return flags

    def read(self, copies: Copies, good: NDArray[np.bool_]) -> None:
        """Seal the good blocks that were read from disk. Blocks without a row are not wanted."""
        rows, absent = self._find(copies)
        wanted = good & absent & (rows >= 0)
        # A scope that nothing is in any more may be forgotten by now.
        wanted &= not (wanted.any() and self._state.is_scope_off(copies.scope, Tier.FILE))
        self._put(copies, rows, wanted, origin=FROM_DISK)

    def _find(self, copies: Copies) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of these blocks, and flags of those that are not in dram."""
        rows = self._state.residency.table.find(copies.scope, copies.keys)
        return rows, self._state.residency.words(rows) < 0

    def _put(
        self, copies: Copies, rows: Rows, wanted: NDArray[np.bool_], origin: int | None = None
    ) -> Rows:
        """Seal the slots that are wanted and free the others; returns the rows of the former.
        `origin`: where blocks were that a request asked for (`Origins`); None: nobody did."""
        state, residency = self._state, self._state.residency
        state.free(copies.words[~wanted])
        rows, keys, words = rows[wanted], copies.keys[wanted], copies.words[wanted]
        new = np.flatnonzero(rows < 0)
        rows[new] = residency.table.insert(copies.scope, keys[new])
        residency.put_dram(rows, words, copies.checksums[wanted])
        state.slots.seal(words, prints(copies.scope, keys), is_use=origin is not None)
        if origin is not None:
            residency.origin[words] = origin
        state.credits_due = True
        self._arrivals.settle_keys(copies.keys)
        return rows
