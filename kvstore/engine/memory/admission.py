"""Credits: free slots granted to each session in advance, and evictions for them.

A store never waits: credits are free slots that were granted before they are needed. Slots are
freed ahead of need, from the low watermark up to the high one, and never out of a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.engine.memory.policy.port import Words
from kvstore.engine.memory.quotas import QuotaGroup
from kvstore.engine.memory.slots import Pool, Slots

CREDIT_PART = 4
"""With quotas, a group may have one part in this many of its share granted."""


class Admission:
    """Makes room in pools. `evict` must drop the blocks of slots and free the slots."""

    def __init__(
        self,
        slots: Slots,
        *,
        credit_share: float,
        credit_blocks_max: int,
        low_watermark: float,
        high_watermark: float,
        evict: Callable[[Words], None],
    ) -> None:
        self._slots = slots
        self._credit_share = credit_share
        self._credit_blocks_max = credit_blocks_max
        self._low = low_watermark
        self._high = high_watermark
        self._evict = evict

    def credit_target(self, pools: Mapping[Pool, int], *, sessions: int) -> int:
        """Number of blocks that one session should have credits for, at least 1. `pools`: each pool
        with the number of its slots that a block takes; `sessions`: how many share these pools."""
        capacity = min(self._reachable(pool) // count for pool, count in pools.items())
        share = int(capacity * self._credit_share) // max(sessions, 1)
        return max(1, min(share, self._credit_blocks_max))

    def _reachable(self, pool: Pool) -> int:
        """Number of slots that this pool has or can get: its own, or those of an equal part of the
        arena."""
        part = self._slots.slabs_ready // max(len(self._slots.pools), 1)
        return max(pool.capacity, part * pool.slots_per_slab, pool.slots_per_slab)

    def credit_limit(self, group: QuotaGroup, block_bytes: int) -> int:
        """Blocks that may be granted to a group with a quota: grants cannot be taken back, so they
        must stay well below a small share."""
        return int(self._slots.quotas.share[group]) // CREDIT_PART // block_bytes

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
        if missing > 0 and quotas.any:
            self._evict(self._slots.victims_for(asker, pool, missing))
        elif missing > 0:
            self._evict(self._slots.victims(pool, missing))
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
            if claims or needy or coldest[1] < (pool.policy.oldest_stamp() or coldest[1] + 1):
                best = coldest
        if best is None:
            return False
        words = self._slots.words_in(best[0])
        self._evict(words[self._slots.state[words] != 0])
        self._slots.take_slab(best[0])
        return True
