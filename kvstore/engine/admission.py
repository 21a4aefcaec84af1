"""Credits: how many free slots each session gets in advance, and what is freed to have them.

A store never waits: credits are free slots that were granted before they are needed. Slots are
freed ahead of need, from the low watermark up to the high one, and never out of a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.engine.policy.port import Words
from kvstore.engine.slots import Pool, Slots


class Admission:
    """Makes room in pools. `evict` empties slots: residency, state and generation."""

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

    def credit_target(self, pools: Sequence[Pool], *, sessions: int) -> int:
        """Credits in blocks that a session should have out, at least one.

        `pools` has one entry per shard: a block takes a slot of each, of some pools several.
        """
        capacity = min(self._reachable(pool) // pools.count(pool) for pool in pools)
        share = int(capacity * self._credit_share) // max(sessions, 1)
        return max(1, min(share, self._credit_blocks_max))

    def _reachable(self, pool: Pool) -> int:
        """Slots this pool has, or would have with its part of the arena."""
        part = self._slots.slabs_ready // max(len(self._slots.pools), 1)
        return max(pool.capacity, part * pool.slots_per_slab, pool.slots_per_slab)

    def make_room(self, pool: Pool, wanted: int, active: set[int]) -> None:
        """Free up to `wanted` slots and, below the low watermark, up to the high one.

        Args:
            pool: where room is needed.
            wanted: slots.
            active: slot sizes that sessions use now; other pools give way first.
        """
        # Unused slabs come before any eviction.
        while len(pool.free) < max(wanted, self._low_mark(pool)) and self._slots.extend(pool):
            pass
        if len(pool.free) >= max(wanted, self._low_mark(pool)) or pool.is_starved:
            return
        while len(pool.free) < wanted and self._take_over(pool, active):
            self._slots.extend(pool)
        target = max(wanted, int(pool.capacity * self._high))
        missing = target - len(pool.free)
        if missing > 0:
            self._evict(self._slots.victims(pool, missing))
        if len(pool.free) < wanted:
            pool.is_starved = True

    def _low_mark(self, pool: Pool) -> int:
        return int(pool.capacity * self._low)

    def _take_over(self, pool: Pool, active: set[int]) -> bool:
        """Empty a slab of another pool for this one: of a pool that nobody uses, when it is colder
        than what this pool would evict; of one with more than its part, when this has less."""
        part = max(1, self._slots.slabs_ready // max(len(active), 1))
        best: tuple[int, int] | None = None
        for other in self._slots.pools.values():
            unused = other.slot_bytes not in active
            needy = not pool.slabs or (len(pool.slabs) < part and len(other.slabs) > part)
            # Looking for the coldest slab takes a while: not between pools that have their part.
            if other is pool or not other.slabs or not (unused or needy):
                continue
            coldest = self._slots.coldest_slab(other)
            if coldest is None or (best is not None and best[1] <= coldest[1]):
                continue
            if needy or coldest[1] < (pool.policy.oldest_stamp() or coldest[1] + 1):
                best = coldest
        if best is None:
            return False
        words = self._slots.words_in(best[0])
        self._evict(words[self._slots.state[words] != 0])
        self._slots.take_slab(best[0])
        return True
