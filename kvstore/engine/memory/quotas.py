"""Quotas: guaranteed shares of dram, and the order in which groups give way.

A group has the name of one quota: engines whose model label, or else whose tenant, is that name.
All others together are the group OTHERS, with the rest of dram.

1. Unused memory is for every group: a quota is a guarantee, not a wall.
2. A group at or above its share makes room out of its own slots before those of others.
3. A group below its share takes from groups above theirs, the furthest above first, and only so
   much that they keep their share; then from itself.
4. So no group loses a slot to others while at or below its share.

A group's slots are those granted to it and not free again: written, being written or being read
into. They are counted where slots are granted and freed (`slots`). Does not cover: order within a
group (`policy`), pins (`pins`): no more than a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from kvstore.types import QUOTA_COUNT_MAX

QuotaGroup = NewType("QuotaGroup", int)
OTHERS = QuotaGroup(0)


class Quotas:
    """Shares and use of groups, in bytes, by group."""

    def __init__(self, quotas: Sequence[tuple[str, int]], *, arena_bytes: int) -> None:
        assert len(quotas) <= QUOTA_COUNT_MAX
        promised = [size for _, size in quotas]
        assert sum(promised) <= arena_bytes, "more is promised than there is"
        self.names = ["", *(name for name, _ in quotas)]
        self.share = np.array([arena_bytes - sum(promised), *promised], dtype=np.int64)
        self.held = np.zeros(len(self.share), dtype=np.int64)
        self.pinned = [0] * len(self.share)
        """Bytes of each group's slots that are pinned (`pins`)."""
        self.floor = [0] * len(self.share)
        """Bytes pinned by group when an earlier process's state was taken over."""

    @property
    def any(self) -> bool:
        """Whether there are quotas."""
        return len(self.share) > 1

    def group(self, *, label: str, tenant: str) -> QuotaGroup:
        """Group of an engine: of its model's quota, or else its tenant's."""
        for name in (label, tenant):
            if name and name in self.names:
                return QuotaGroup(self.names.index(name))
        return OTHERS

    def is_full(self, group: QuotaGroup, more_bytes: int) -> bool:
        """Whether a group would exceed its share with `more_bytes`."""
        return bool(self.held[group] + more_bytes > self.share[group])

    def givers(self, asker: QuotaGroup, more_bytes: int) -> list[QuotaGroup]:
        """Groups that make room for `more_bytes` of `asker`, in the order in which they give
        way."""
        above = np.argsort(self.share - self.held, kind="stable").tolist()
        others = [QuotaGroup(g) for g in above if g != asker and self.held[g] > self.share[g]]
        return [asker, *others] if self.is_full(asker, more_bytes) else [*others, asker]

    def spare_bytes(self, giver: QuotaGroup, asker: QuotaGroup) -> int:
        """Bytes that `giver` can lose to `asker`."""
        surplus = self.held[giver] - self.share[giver]
        return int(self.held[giver] if giver == asker else max(0, surplus))

    def can_lose(self, asker: QuotaGroup, size_bytes: int) -> NDArray[np.bool_]:
        """Mask of groups that can lose `size_bytes` in one piece to `asker`."""
        may: NDArray[np.bool_] = self.held - self.share >= size_bytes
        may[asker] = True
        return may
