"""Lookups: what a request can load, pinned by a lease, and what is known of its keys."""

from __future__ import annotations

import numpy as np

from kvstore.engine.owners import Connection
from kvstore.engine.policy.lru import NONE
from kvstore.engine.state import State
from kvstore.wire.messages import (
    KEYS_PER_DATAGRAM_MAX,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseReply,
    keys_array,
)


class Lookups:
    """Answers LeaseAsk and Hint."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lease(self, connection: Connection, ask: LeaseAsk) -> str:
        """Pin the longest run in dram and answer. Returns why the connection must end, or "" ."""
        state, owner = self._state, connection.owner
        session = owner.open_session
        state.counters.lease_asks += 1
        # With many shards a full ask would be answered with more than fits a datagram.
        keys = keys_array(ask.keys)[: KEYS_PER_DATAGRAM_MAX // max(len(owner.scopes), 1)]
        if not session or not state.leases.may_add(session, ask.lease):
            keys = keys[:0]
        rows_by_shard, words_by_shard, count = [], [], len(keys)
        for scope in owner.scopes:
            rows = state.residency.find(scope, keys[:count])
            words = state.residency.words(rows)
            if len(words) and words.min() < 0:
                count = int((words < 0).argmax())
            rows_by_shard.append(rows)
            words_by_shard.append(words)
        state.counters.blocks_hit += count
        state.counters.blocks_missed += len(keys) - count
        words, checksums = NONE, b""
        if count:
            words = _interleave(words_by_shard, count)
            # Rows of a chain mostly ascend; only otherwise is the costlier look needed. Slots are
            # distinct if rows are, and every shard has the same keys.
            rows = rows_by_shard[0][:count]
            ascending = np.count_nonzero(rows[1:] > rows[:-1]) == count - 1
            if not ascending and len(np.unique(rows)) != count:
                return "a LeaseAsk that names a key twice"
            state.leases.add(session, ask.lease, words, state.now_ns)
            for size, shard_words in zip(owner.slot_sizes, words_by_shard, strict=True):
                state.slots.touch(state.slots.pools[size], shard_words[:count])
            if ask.with_checksums:
                rows = _interleave(rows_by_shard, count)
                checksums = state.residency.checksum[rows].astype("<u8").tobytes()
        state.send(
            connection,
            LeaseReply(
                lease=ask.lease,
                ttl_ms=state.config.lease_ttl_ms,
                slots=state.slots.slots_of(words).tobytes(),
                generations=state.slots.generation[words].tobytes(),
                checksums=checksums,
            ),
        )
        return ""

    def hint(self, connection: Connection, hint: Hint) -> None:
        """Touch what is held, and say what is known."""
        state, owner = self._state, connection.owner
        keys = keys_array(hint.keys)
        present = np.full(len(keys), bool(owner.open_session))
        if owner.open_session:
            for size, scope in zip(owner.slot_sizes, owner.scopes, strict=True):
                rows = state.residency.find(scope, keys)
                present &= rows >= 0
                words = state.residency.words(rows)
                state.slots.touch(state.slots.pools[size], words[words >= 0])
        bits = np.packbits(present, bitorder="little").tobytes()
        state.send(connection, HintReply(request=hint.request, present=bits))


def _interleave(columns: list[np.ndarray], count: int) -> np.ndarray:
    """[n][S] of S columns of at least n."""
    if len(columns) == 1:
        return columns[0][:count]
    return np.stack([column[:count] for column in columns], axis=1).reshape(-1)
