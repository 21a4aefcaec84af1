"""What engines say of themselves first, and spaces of their blocks; tests name what matters."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.testing.raw_engine import make_space
from kvstore.types import Shard
from kvstore.wire.messages import PROTOCOL_VERSION, HelloRank, HelloScheduler
from kvstore.wire.space import Group, Space, shard_bytes


def space_of(model: str = "m", **changes: Any) -> Space:
    """`changes`: fields in which it differs from the space of an engine without vLLM."""
    return msgspec.structs.replace(make_space(model=model), **changes)


def group_of(space: Space, shard: Shard) -> Group:
    return Group(space, shard, shard_bytes(space, shard))


def scheduler_hello(name: str = "e", **changes: Any) -> HelloScheduler:
    hello = HelloScheduler(PROTOCOL_VERSION, name, "n", "t", rank_count=1, process="p")
    return msgspec.structs.replace(hello, **changes)


def rank_hello(*groups: Group, name: str = "e", rank: int = 0, **changes: Any) -> HelloRank:
    hello = HelloRank(PROTOCOL_VERSION, name, "n", "t", rank, process="p", groups=groups)
    return msgspec.structs.replace(hello, **changes)
