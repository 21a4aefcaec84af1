"""Adoption of an earlier process's memory: its journal becomes this engine's state.

Valid rows are blocks in dram again, in their order of use. A slot that a process may still write to
is quarantined as if its socket had ended just now, until that process attaches again or is gone
(ADR 3); a slot with an unreadable writer stays so. Every other slot is free, with a generation that
it never had. Descriptions of spaces are kept: their blocks are offered, served to other nodes and
scrubbed before an engine attaches again.

Lost: leases and sessions, whose processes are gone; history of evicted blocks, of requests, and of
blocks used twice (`policy.reuse`). Blocks on disk are reported by the disk tier, as after any
start.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.events import Adopt, Release
from kvstore.engine.memory.policy.port import prints
from kvstore.engine.sessions.owners import Connection, Owner
from kvstore.engine.state import KnownSpace, State
from kvstore.types import Shard

CHUNK_BLOCKS = 1 << 13
"""Number of rows taken over at a time, so that they stay in the CPU's cache."""


def adopt(state: State, event: Adopt) -> None:
    """Set up the state of an engine from the journal in `event`, its first event."""
    found, residency = event.found, state.residency
    assert not state.connections, "something happened before the journal was taken over"
    assert len(residency.table) == 0, "something happened before the journal was taken over"
    numbers: dict[int, int] = {}
    named = np.zeros(len(found.words), dtype=np.uint64)
    for begin in range(0, len(found.words), CHUNK_BLOCKS):
        chunk = slice(begin, begin + CHUNK_BLOCKS)
        words, scopes = found.words[chunk], found.scopes[chunk]
        keys, checksums = state.journal.blocks(words)
        for id in np.unique(scopes).tolist():
            if id not in numbers:
                numbers[id] = residency.scope(*found.addresses[id])
            its = np.flatnonzero(scopes == id)
            named[begin + its] = prints(numbers[id], keys[its])
            rows = residency.insert(numbers[id], keys[its])
            residency.adopt_dram(rows, words[its], checksums[its])
    for each in found.spaces:
        columns = tuple(residency.scope(*each.address, Shard(*shard)) for shard in each.shards)
        state.known[each.address] = KnownSpace(each.space, columns, each.label)
    state.journal.settle(found, numbers)
    state.slots.adopt(found, named)
    state.counters.blocks_kept = len(found.words)
    state.counters.slots_quarantined += len(found.held) + len(found.doubtful)
    for writer in event.writers:
        hello = writer.hello
        owner = Owner((hello.tenant, hello.engine_id, hello.nonce))
        connection = Connection(writer.connection, hello, owner)
        connection.ended = True
        if len(state.slots.of_writer(connection.id)):
            state.connections[connection.id] = connection
            state.slots.pins.join_engine(connection.id, owner.key, writer.process or connection.id)
        else:
            state.say(Release(connection.id))
    state.credits_due = True
