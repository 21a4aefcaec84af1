"""Invariants of parts of the engine that tests also look at by themselves: leases, queued reads,
what is kept for explanations, and the journal."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvstore.engine.memory.journal import _CHECK_AT, Journal
from kvstore.engine.memory.policies import Words
from kvstore.engine.moves.files import ReadQueue
from kvstore.engine.sessions import leases as leases_module
from kvstore.engine.sessions.leases import Leases
from kvstore.engine.why import findings
from kvstore.engine.why.findings import Trail


def check_leases(leases: Leases) -> None:
    """The bytes of leases are counted, and each lease is looked at when it may have expired."""
    found: Counter[int] = Counter()
    for session, number, lease in leases.items():
        found[session] += lease.size_bytes
        assert (session, number) in leases._agenda._entries, "a lease that nobody looks at"
    assert found == leases._bytes_of, "what leases of a session take is miscounted"
    most = leases_module.BYTES_MAX
    assert found.total() <= most, "what leases take is miscounted"


def check_queue(queue: ReadQueue) -> None:
    """Queued reads have blocks and a place, and each block is counted for each of its reads."""
    queued = np.zeros_like(queue._queued)
    for read in queue._reads.values():
        queued[read.rows] += 1
        assert len(read.keys) == read.rows.shape[1] > 0, "a read without blocks"
    assert bool((queue._queued == queued).all()), "a block in a read that is over"
    assert queue._order == sorted(read.place for read in queue._reads.values()), "out of order"


def published(journal: Journal) -> Words:
    """Slots whose row in the journal is not void."""
    return np.flatnonzero(journal._rows[:, _CHECK_AT])


def check_trail(trail: Trail) -> None:
    """Everything that is kept is bounded."""
    assert len(trail._findings) <= findings.FINDINGS_MAX
    waiting = [len(f.keys) for f in trail._pending if f.keys is not None]
    assert sum(waiting) == trail._pending_keys <= findings.PENDING_KEYS_MAX
    for finding in trail._findings.values():
        assert len(finding.rest) <= findings.RANGES_MAX
        assert (finding.keys is None) or not finding.rest
    assert len(trail._pushes) <= findings.TRANSFERS_MAX
    assert len(trail.searches) <= findings.SEARCHES_MAX
