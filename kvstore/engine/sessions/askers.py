"""Askers, for which blocks are brought to dram: their shards, slot sizes and quota.

An asker is an engine, another node that fetches from this one, or a router on behalf of an engine.
Blocks on their way outlive the engine that asked, so nothing here refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.engine.memory.shares import OTHERS, QuotaGroup
from kvstore.types import Shard, SpaceId
from kvstore.wire.layout import shard_bytes, slot_bytes
from kvstore.wire.space import Space

ANOTHER_NODE = "(another node)"
"""Title of an asker that is another node."""
A_ROUTER = "(a router)"
"""Title of an asker that is a router, for blocks that are brought before an engine asks."""


class Asker(msgspec.Struct, frozen=True):
    """One KV cache group that blocks are brought for; one column per distinct shard, as in a
    session."""

    tenant: str
    space: SpaceId
    shards: tuple[Shard, ...]
    scopes: tuple[int, ...]
    """Scopes of the shards, valid while the engine is attached or blocks of them are held."""
    slot_sizes: tuple[int, ...]
    block_bytes: tuple[int, ...]
    head_bytes: tuple[int, ...]
    block_tokens: int
    quota: QuotaGroup
    engine: str
    """Engine whose share of bounded resources is used."""
    title: str
    """Name for people, in explanations of evictions."""
    is_ahead: bool = False
    """Whether no request waits for the blocks yet: they take at most half of the room in motion."""

    @property
    def address(self) -> tuple[str, SpaceId]:
        """Tenant and space."""
        return self.tenant, self.space

    def is_of(self, tenant: str | None, space: bytes | None) -> bool:
        """Whether its blocks are of this tenant and space; None: of any."""
        return tenant in (None, self.tenant) and space in (None, self.space)

    def column(self, number: int) -> Asker:
        """This asker for the shard in one column only."""
        its = ("shards", "scopes", "slot_sizes", "block_bytes")
        return msgspec.structs.replace(self, **{f: (getattr(self, f)[number],) for f in its})


def asker(
    address: tuple[str, SpaceId],
    space: Space,
    columns: Sequence[tuple[Shard, int]],
    *,
    quota: QuotaGroup = OTHERS,
    engine: str = ANOTHER_NODE,
    title: str = ANOTHER_NODE,
) -> Asker:
    """The asker for an engine or for another node. `columns`: shards and their scopes."""
    sizes = tuple(shard_bytes(space, shard) for shard, _ in columns)
    return Asker(
        tenant=address[0],
        space=address[1],
        shards=tuple(shard for shard, _ in columns),
        scopes=tuple(scope for _, scope in columns),
        slot_sizes=tuple(slot_bytes(size) for size in sizes),
        block_bytes=sizes,
        head_bytes=space.head_bytes,
        block_tokens=space.block_tokens,
        quota=quota,
        engine=engine,
        title=title,
    )
