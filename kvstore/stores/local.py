"""The index in the memory of this process."""

from __future__ import annotations

from kvstore.index.feed import Event, Verdict
from kvstore.index.index import Answer, Index, Member, Statistics
from kvstore.types import SpaceId


class LocalStore:
    """An `Index` in this process as an `IndexStore`: always reachable, answers without waiting, and
    no answer mixes two states."""

    trouble = ""
    failure_count = 0

    def __init__(self, index: Index) -> None:
        self._index = index

    async def hear(self, event: Event, now_ms: int) -> Verdict:
        return self._index.hear(event, now_ms)

    async def match(self, tenant: str, space: SpaceId, keys: bytes, now_ms: int) -> Answer:
        return self._index.match(tenant, space, keys, now_ms)

    def members(self, now_ms: int) -> list[Member]:
        return self._index.members(now_ms)

    async def tick(self, now_ms: int) -> None:
        self._index.tick(now_ms)

    def statistics(self) -> Statistics:
        return self._index.statistics()

    async def close(self) -> None:
        """Nothing to close."""
