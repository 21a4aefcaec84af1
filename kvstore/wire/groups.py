"""KV cache groups as ranks report them and sessions number them (ADR 2).

An engine allocates its cache in groups of layers with blocks of their own: one for most models, 2
to 7 for those that mix full attention with windows or recurrent state. Each group has its own
space, shards and columns; elsewhere a group is its place in the Hellos of the ranks.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvstore.types import Shard
from kvstore.wire.bounds import BlockBytes, Small
from kvstore.wire.space import Space

GROUPS_MAX: Final = 16
PER_GROUP: Final = msgspec.Meta(min_length=1, max_length=GROUPS_MAX)
"""A bound of tuples with one element per group."""
GroupIndex = Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache group as one rank holds it."""

    space: Space
    shard: Shard
    block_bytes: BlockBytes


class ShardColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's part in one KV cache group of a session."""

    number: Small = 0
    """Place of the rank's shard in the [n][S] arrays of the group."""
    writes: bool = True
    """False: a lower rank holds the same shard and stores it; this one only loads."""
