"""Choice of blocks for the disk: requested twice, and within its endurance.

    blocks ──▶ admit ──▶ allow ──▶ write
               seen twice?   bytes a day

Flash wears out by writing, and most blocks of most workloads are never requested again: writing
those costs endurance and room and gains nothing. Reads are never refused here.

Callers ask once per request and block: for the blocks sealed now, and for blocks of a hint that are
in dram and not on disk. So a block used while in dram is written then, and one that comes back
after its eviction is written when it is sealed again. Blocks of a chain are seen together, so they
are admitted together; a block on disk without those before it would be of no use.

Does not cover: queues of the disk tier (`kvstore.tiers`), its evictions (`engine.moves.files`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.engine.memory.policy.port import Mask, Prints
from kvstore.engine.memory.policy.reuse import RecentKeys
from kvstore.types import AdmissionMode

NS_PER_DAY: Final = 86_400 * 10**9
TIGHT_SHARE: Final = 0.25
"""With less than this part of a day's budget left, only blocks seen before are written."""


class DiskAdmission:
    """Second sight and the day's budget, in front of one disk.

    With room for n keys: a key that was never seen is admitted as if it had been with probability
    at most 0.00012, and one seen m keys ago is taken for new with probability 0.001 at m = n / 4,
    0.05 at n / 2, 0.55 at n (`RecentKeys`): a write that comes later, never a wrong byte. Without a
    budget a node that writes everything remembers no key.

    Args:
        mode: blocks admitted while the budget is not tight.
        day_bytes: budget of a day; 0: unlimited.
        key_count: approximate number of keys remembered; as many as the disk can hold is plenty.
        seed: of the hashes; random per node, so that collisions cannot be chosen.
        spent_bytes: of the day's budget, used up before the start.
    """

    def __init__(
        self,
        mode: AdmissionMode,
        *,
        day_bytes: int,
        key_count: int,
        seed: int,
        spent_bytes: int = 0,
    ) -> None:
        self._mode = mode
        self._budget = WriteBudget(day_bytes, spent_bytes=spent_bytes) if day_bytes else None
        self._seen: RecentKeys | None = None
        if mode is AdmissionMode.SECOND_SIGHT or day_bytes:
            self._seen = RecentKeys(key_count=key_count, seed=seed)

    def admit(self, prints: Prints, now_ns: int) -> Mask:
        """Mask of blocks to write. Each counts as seen from now on, in any mode, for the time when
        the budget gets tight."""
        everything = np.ones(len(prints), dtype=bool)
        if self._seen is None:
            return everything
        seen = self._seen.may_contain(prints)
        self._seen.add(prints)
        is_tight = self._budget is not None and self._budget.is_tight(now_ns)
        return seen if is_tight or self._mode is AdmissionMode.SECOND_SIGHT else everything

    def allow(self, count: int, record_bytes: int, now_ns: int) -> int:
        """Number of records of this size to write now; they count as written."""
        if self._budget is None:
            return count
        return self._budget.allow(count * record_bytes, now_ns, unit_bytes=record_bytes) // (
            record_bytes
        )

    def give_back(self, unwritten_bytes: int) -> None:
        """Refund bytes to the budget that were allowed and not written."""
        if self._budget is not None:
            self._budget.give_back(unwritten_bytes)

    def left_bytes(self, now_ns: int) -> int | None:
        """Bytes that the budget allows now; None without one."""
        return None if self._budget is None else self._budget.left_bytes(now_ns)


class WriteBudget:
    """A bucket of bytes with a daily rate and room for a day. Starts full, less the bytes written
    by an earlier start of the node.

    Within any time, at most a day's budget and the refill during that time are written; an empty
    bucket allows none. All values are integers, so rounding errors do not add up.
    """

    def __init__(self, day_bytes: int, *, spent_bytes: int = 0) -> None:
        assert day_bytes > 0, "no budget is no WriteBudget"
        assert 0 <= spent_bytes <= day_bytes, "more is spent than there was"
        self._day_bytes = day_bytes
        # In bytes times nanoseconds of a day, so that one nanosecond's part is a whole number.
        self._full = day_bytes * NS_PER_DAY
        self._level = self._full - spent_bytes * NS_PER_DAY
        self._at_ns: int | None = None
        """Time up to which it is filled; None: before the first use."""

    def left_bytes(self, now_ns: int) -> int:
        """Bytes that may be written now."""
        self._fill(now_ns)
        return self._level // NS_PER_DAY

    def is_tight(self, now_ns: int) -> bool:
        """Whether less than TIGHT_SHARE of a day is left: only blocks seen before should go to
        disk."""
        return self.left_bytes(now_ns) < TIGHT_SHARE * self._day_bytes

    def allow(self, wanted_bytes: int, now_ns: int, *, unit_bytes: int) -> int:
        """Part of `wanted_bytes` to write, in whole units (records); it counts as written."""
        allowed = min(wanted_bytes, self.left_bytes(now_ns)) // unit_bytes * unit_bytes
        self._level -= allowed * NS_PER_DAY
        return allowed

    def give_back(self, unwritten_bytes: int) -> None:
        """Refund bytes that were allowed and not written."""
        self._level += unwritten_bytes * NS_PER_DAY

    def _fill(self, now_ns: int) -> None:
        at_ns = now_ns if self._at_ns is None else self._at_ns
        passed_ns = max(0, now_ns - at_ns)
        self._at_ns = max(now_ns, at_ns)
        self._level = min(self._full, self._level + passed_ns * self._day_bytes)
