"""Blocks in dram that were used last, in runs that another node can be asked to fetch.

Pure and read-only. Does not cover: who takes them (`kvstore.peers.drain`).
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.memory.slots import SlotState
from kvstore.engine.state import State
from kvstore.wire.peers import PrepareRequest

RUN_KEYS: int = 512


def hottest_runs(state: State, share: float) -> list[PrepareRequest]:
    """The blocks of dram used last, up to this share of the arena's bytes, in runs of RUN_KEYS of
    one space: latest use first, so that a prefix comes before what continues it."""
    slots, residency = state.slots, state.residency
    words = np.flatnonzero((slots.stamps > 0) & (slots.state == SlotState.SEALED))
    words = words[np.argsort(-slots.stamps[words])]
    words = words[np.cumsum(slots.sizes(words)) <= share * state.config.arena_bytes]
    rows = residency.row_of_word[words].astype(np.int64)
    rows = rows[rows >= 0]
    scopes = residency.table.scopes[rows]
    runs: list[PrepareRequest] = []
    for tenant, space in dict.fromkeys(residency.address(int(s))[:2] for s in scopes):
        its = np.isin(scopes, list(residency.shards(tenant, space).values()))
        # A block has a row for each shard; its place is that of the shard used last.
        keys = list(dict.fromkeys(key.tobytes() for key in residency.table.keys[rows[its]]))
        runs += [
            PrepareRequest(tenant, space, "", b"".join(keys[at : at + RUN_KEYS]))
            for at in range(0, len(keys), RUN_KEYS)
        ]
    return runs
