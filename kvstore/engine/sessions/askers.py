"""For whom blocks are brought to dram: which shards, into slots of which sizes, out of whose quota.

An engine, or another node that wants to be lent blocks. What is on its way outlives the engine that
asked, so nothing here refers to it.
"""

from __future__ import annotations

import msgspec

from kvstore.engine.memory.quotas import OTHERS, GroupId
from kvstore.engine.sessions.owners import Owner
from kvstore.types import Shard, SpaceId
from kvstore.wire.layout import shard_bytes, slot_bytes
from kvstore.wire.space import Space

ANOTHER_NODE = "(another node)"
"""Instead of an engine's title."""


class Asker(msgspec.Struct, frozen=True):
    """One column per distinct shard, as in the arrays of a session."""

    tenant: str
    space: SpaceId
    shards: tuple[Shard, ...]
    scopes: tuple[int, ...]
    """Of the shards, while the engine or blocks of them are there."""
    slot_sizes: tuple[int, ...]
    block_bytes: tuple[int, ...]
    block_tokens: int
    group: GroupId
    engine: str
    """Whose share it takes of what is bounded."""
    title: str
    """For people: for whom room was made."""


def engine_asks(owner: Owner) -> Asker:
    """An engine with an open session."""
    assert owner.known is not None, "an engine without a session asks for nothing"
    space = owner.rank_hellos()[0].space
    shards = tuple(owner.columns())
    return Asker(
        tenant=owner.known[0],
        space=owner.known[1],
        shards=shards,
        scopes=owner.scopes,
        slot_sizes=owner.slot_sizes,
        block_bytes=tuple(shard_bytes(space, shard) for shard in shards),
        block_tokens=space.block_tokens,
        group=owner.group,
        engine="/".join(owner.key),
        title=owner.title,
    )


def node_asks(
    address: tuple[str, SpaceId], space: Space, columns: tuple[tuple[Shard, int], ...]
) -> Asker:
    """Another node, for the shards of a cover and their scopes."""
    sizes = tuple(shard_bytes(space, shard) for shard, _ in columns)
    return Asker(
        tenant=address[0],
        space=address[1],
        shards=tuple(shard for shard, _ in columns),
        scopes=tuple(scope for _, scope in columns),
        slot_sizes=tuple(slot_bytes(size) for size in sizes),
        block_bytes=sizes,
        block_tokens=space.block_tokens,
        group=OTHERS,
        engine=ANOTHER_NODE,
        title=ANOTHER_NODE,
    )
