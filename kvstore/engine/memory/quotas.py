"""Quotas: how much of dram is promised to whom, and who gives way to whom.

A group is what one quota names: engines whose model label, or else whose tenant, is that name. All
others together are the group OTHERS; what no quota promises is theirs.

1. Memory that nobody uses is for everybody: a quota is a promise, not a wall.
2. A group at or above its share makes room out of its own slots before it looks at others'.
3. A group below its share takes from those above theirs, who is furthest above first, and only so
   much that they keep their share; then from itself.
4. So nobody loses a slot to others while he is at or below his share.

A group's slots are those that were granted to it and are not free again: written, being written or
being read into. They are counted where slots are granted and freed (`slots`). Does not cover: which
slots of a group go first (`policy`), what can be pinned (`pins`): no more than a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

GroupId = NewType("GroupId", int)
OTHERS = GroupId(0)
QUOTA_COUNT_MAX = 64


class Quotas:
    """Shares of groups and what they hold, in bytes, by group."""

    def __init__(self, quotas: Sequence[tuple[str, int]], *, arena_bytes: int) -> None:
        assert len(quotas) <= QUOTA_COUNT_MAX
        promised = [size for _, size in quotas]
        assert sum(promised) <= arena_bytes, "more is promised than there is"
        self.names = ["", *(name for name, _ in quotas)]
        self.share = np.array([arena_bytes - sum(promised), *promised], dtype=np.int64)
        self.held = np.zeros(len(self.share), dtype=np.int64)
        self.pinned = [0] * len(self.share)
        """Of what is held: slots that nothing can be evicted from (`pins`)."""
        self.floor = [0] * len(self.share)
        """What was pinned when it was taken over from an earlier process."""

    @property
    def any(self) -> bool:
        """Whether anything is promised to anybody."""
        return len(self.share) > 1

    def group(self, *, label: str, tenant: str) -> GroupId:
        """Whose quota counts for an engine: its model's, or else its tenant's."""
        for name in (label, tenant):
            if name and name in self.names:
                return GroupId(self.names.index(name))
        return OTHERS

    def is_full(self, group: GroupId, more_bytes: int) -> bool:
        """Whether a group would hold more than its share with so much more."""
        return bool(self.held[group] + more_bytes > self.share[group])

    def givers(self, asker: GroupId, more_bytes: int) -> list[GroupId]:
        """Who makes room for `asker`, in order."""
        above = np.argsort(self.share - self.held, kind="stable").tolist()
        others = [GroupId(g) for g in above if g != asker and self.held[g] > self.share[g]]
        return [asker, *others] if self.is_full(asker, more_bytes) else [*others, asker]

    def spare_bytes(self, giver: GroupId, asker: GroupId) -> int:
        """How much `giver` can lose to `asker`."""
        surplus = self.held[giver] - self.share[giver]
        return int(self.held[giver] if giver == asker else max(0, surplus))

    def can_lose(self, asker: GroupId, size_bytes: int) -> NDArray[np.bool_]:
        """Which groups can lose so much in one piece to `asker`."""
        may: NDArray[np.bool_] = self.held - self.share >= size_bytes
        may[asker] = True
        return may
