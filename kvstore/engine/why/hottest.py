"""Blocks in dram that were used last, in runs that another node can be asked to fetch.

    engine: used_slots ─▶ hottest_runs ─ SLICE slots at a time ─▶ engine: named ─▶ runs

The engine answers two short questions; sorting, which takes long, is done where it is asked. A slot
that has another block by the time of the second question counts as that one. Read-only. Does not
cover: who takes them (`kvstore.peers.preparer`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.memory.table import Keys, each
from kvstore.engine.state import State
from kvstore.types import SpaceId
from kvstore.wire.peers import PrepareRequest

RUN_KEYS: int = 512
SLICE: Final = 4096


class UsedSlots(NamedTuple):
    """Sealed slots of dram with their last use; arrays of shape [n]."""

    words: Words
    stamps: Words
    """Stamp of the last use of each slot: greater is later."""
    sizes: Words
    arena_bytes: int


class NamedBlocks(NamedTuple):
    """Blocks in some slots, one scope and key each."""

    scopes: NDArray[np.uint32]
    keys: Keys
    addresses: dict[int, tuple[str, SpaceId]]
    """Scope → tenant and space."""


def used_slots(state: State) -> UsedSlots:
    """All sealed slots of dram. About 20 ms for a million."""
    slots = state.slots
    words = np.flatnonzero(slots.state == SlotState.SEALED)
    return UsedSlots(words, slots.stamps[words], slots.sizes(words), state.config.arena_bytes)


def named(state: State, words: Words) -> NamedBlocks:
    """Blocks in these slots now; slots that were emptied are left out."""
    residency = state.residency
    rows = residency.row_of_word[words].astype(np.int64)
    rows = rows[rows >= 0]
    scopes = residency.table.scopes[rows]
    addresses = {int(scope): residency.address(int(scope))[:2] for scope in np.unique(scopes)}
    return NamedBlocks(scopes, residency.table.keys[rows], addresses)


def hottest_runs(
    used: UsedSlots, share: float, name: Callable[[Words], NamedBlocks]
) -> list[PrepareRequest]:
    """The blocks of dram used last, up to this share of the arena's bytes, in runs of RUN_KEYS of
    one space: latest use first, so that a prefix comes before what continues it. `name` asks the
    engine for `named`."""
    latest = np.argsort(-used.stamps)
    latest = latest[used.stamps[latest] > 0]
    words = used.words[latest[np.cumsum(used.sizes[latest]) <= share * used.arena_bytes]]
    spaces: dict[tuple[str, SpaceId], dict[bytes, None]] = {}
    for at in range(0, len(words), SLICE):
        found = name(words[at : at + SLICE])
        for scope, key in zip(found.scopes.tolist(), each(found.keys), strict=True):
            # A block has a row for each shard; its place is that of the shard used last.
            spaces.setdefault(found.addresses[scope], {})[key] = None
    return [
        PrepareRequest(tenant, space, "", b"".join(keys[at : at + RUN_KEYS]))
        for (tenant, space), keys in ((address, list(its)) for address, its in spaces.items())
        for at in range(0, len(keys), RUN_KEYS)
    ]
