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
    fields = {"nonce": "n", "tenant": "t", "rank_count": 1, "process": "p", **changes}
    return HelloScheduler(protocol=PROTOCOL_VERSION, engine_id=name, **fields)


def rank_hello(*groups: Group, name: str = "e", rank: int = 0, **changes: Any) -> HelloRank:
    fields = {"nonce": "n", "tenant": "t", "process": "p", **changes}
    return HelloRank(protocol=PROTOCOL_VERSION, engine_id=name, rank=rank, groups=groups, **fields)
