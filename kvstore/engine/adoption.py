"""Going on with what an earlier process of this node left: its journal becomes this engine's state.

Rows that are right are blocks in dram again, in the order in which they were used. A slot that a
process may still write to is quarantined as if its socket had ended just now, until that process
attaches again or is gone (ADR 3). Every other slot is free, with a generation that it never had.

Lost: leases and sessions, which nobody has any more; what was remembered of blocks that left, of
requests, and of which blocks were used twice (`policy.reuse`). What is in a file is told by the
file tier, as after any start.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.events import Adopt, Release
from kvstore.engine.owners import Connection, Owner
from kvstore.engine.policy.port import prints
from kvstore.engine.state import State


def adopt(state: State, event: Adopt) -> None:
    """The first event of an engine."""
    found, residency = event.found, state.residency
    assert not state.connections, "something happened before the journal was taken over"
    assert len(residency.table) == 0, "something happened before the journal was taken over"
    numbers = {id: residency.scope(*found.addresses[id]) for id in np.unique(found.scopes).tolist()}
    state.journal.settle(found, numbers)
    named = np.zeros(len(found.words), dtype=np.uint64)
    for id, scope in numbers.items():
        its = found.scopes == id
        named[its] = prints(scope, found.keys[its])
        rows = residency.insert(scope, found.keys[its])
        residency.adopt_dram(rows, found.words[its], found.checksums[its])
    state.slots.adopt(found, named)
    state.counters.blocks_kept = len(found.words)
    state.counters.slots_quarantined += len(found.held)
    for writer in event.writers:
        hello = writer.hello
        owner = Owner((hello.tenant, hello.engine_id, hello.nonce))
        connection = Connection(writer.connection, hello, owner)
        connection.ended = True
        if len(state.slots.of_writer(connection.id)):
            state.connections[connection.id] = connection
        else:
            state.say(Release(connection.id))
    state.credits_due = True
