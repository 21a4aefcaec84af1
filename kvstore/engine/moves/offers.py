"""Blocks that peers can fetch from this node: a tier holds them in all their shards.

    Change (tier, shard, keys) ─▶ which of the keys are whole now ─▶ Stored, Removed

An engine of several ranks stores a block in shards, and the shards come and go one by one. A shard
alone is of no use to a peer that may be sharded in another way, so a key is offered while the
shards that a tier holds of it cover all layers and heads of the space. Rules:

1. There is no state but the tables: each change is judged by the tables when the step ends, so the
   last update about a key is the truth, whatever the earlier ones were.
2. To offer twice, and to take back a key that was never offered, is no error.
3. Before an engine has reported how many layers and heads a space has, to this process or an
   earlier one (`journal_spaces`), none of its blocks are offered.

Covers: which blocks are whole. Does not cover: publishing them (`kvstore.peers.feed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.residency import Change, Residency
from kvstore.types import KEY_BYTES, Shard, SpaceId
from kvstore.wire.feed import BlocksChanged, Removed, Stored

Address = tuple[str, SpaceId]
Geometry = tuple[int, int]
"""Number of layers and of KV heads."""


class Offers:
    """Judges changes of one node's residency."""

    def __init__(
        self, residency: Residency, geometry: Callable[[Address], Geometry | None]
    ) -> None:
        self._residency = residency
        self._geometry = geometry

    def offers_of(self, changes: Iterable[Change]) -> list[BlocksChanged]:
        """Offers and withdrawals that follow from the changes of a step that has ended, in
        order."""
        return [offer for change in changes for offer in self._judge(change)]

    def held(self, held: Iterable[Change]) -> list[Stored]:
        """Offers of the whole blocks in a slice of the tables (`Residency.held`). A key is judged
        once, with the shard that begins at layer 0 and head 0: every whole block has one."""
        offers = (
            offer
            for change in held
            if (change.scope[2].layer_begin, change.scope[2].head_begin) == (0, 0)
            for offer in self._judge(change)
        )
        return [offer for offer in offers if isinstance(offer, Stored)]

    def any_held(self, address: Address) -> bool:
        """Whether a tier holds anything of a space."""
        count_of = self._residency.table.count_of
        return any(scope in count_of for scope in self._residency.shards(*address).values())

    def _judge(self, change: Change) -> Iterator[BlocksChanged]:
        tenant, space, shard = change.scope
        geometry = self._geometry((tenant, space))
        if geometry is not None and change.stored and _cover(frozenset((shard,)), geometry):
            yield Stored(tenant, space, change.tier, change.keys)
            return
        if geometry is None or not self._residency.shards(tenant, space):
            # Or the step that took the last block of the space forgot its scopes.
            whole = np.zeros(len(change.keys) // KEY_BYTES, dtype=bool)
        else:
            whole = self._whole(change, geometry)
        keys = np.frombuffer(change.keys, dtype=f"V{KEY_BYTES}")
        for made, which in ((Stored, whole), (Removed, ~whole)):
            if which.any():
                yield made(tenant, space, change.tier, keys[which].tobytes())

    def _whole(self, change: Change, geometry: Geometry) -> NDArray[np.bool_]:
        """Flags of the keys of a change: the shards that the tier holds of the key cover all layers
        and heads."""
        tenant, space, _ = change.scope
        keys = np.frombuffer(change.keys, dtype=np.uint64).reshape(-1, KEY_BYTES // 8)
        shards = self._residency.shards(tenant, space)
        there = np.stack(
            [self._residency.is_in(change.tier, scope, keys) for scope in shards.values()], axis=1
        )
        # Keys of one request have the same shards: few combinations among many keys, mostly one.
        if (there == there[:1]).all():
            combinations, which = there[:1], np.zeros(len(there), dtype=np.int64)
        else:
            combinations, which = np.unique(there, axis=0, return_inverse=True)
        names = list(shards)
        covers = [
            _cover(frozenset(names[at] for at in np.flatnonzero(row)), geometry)
            for row in combinations
        ]
        return np.array(covers, dtype=bool)[which.reshape(-1)]


@lru_cache(maxsize=4096)
def _cover(shards: frozenset[Shard], geometry: Geometry) -> bool:
    """Whether these shards cover all layers and heads."""
    there = np.zeros(geometry, dtype=bool)
    for shard in shards:
        there[shard.layer_begin : shard.layer_end, shard.head_begin : shard.head_end] = True
    return bool(there.all())
