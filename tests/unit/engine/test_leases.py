"""Leases by themselves: each pin is counted once, and undone once."""

from __future__ import annotations

import numpy as np

from kvstore.engine.leases import Leases
from tests.unit.engine.test_slots import one_pool


def test_a_slot_that_comes_twice_under_one_lease_is_let_go_twice() -> None:
    """Its first block was cleared while it was leased; it came back with another of the chain."""
    slots, pool = one_pool()
    words = slots.grant(pool, 2, writer=5, session=9, cause=1)
    slots.seal(words, words.astype(np.uint64), 2)
    leases = Leases(slots, ttl_ns=1, count_max=1)
    leases.add(9, 1, words, now_ns=0)
    leases.extend(9, 1, words[:1])
    (lease,) = [lease for _, _, lease in leases.items()]
    assert slots.leases[words].tolist() == [2, 1]
    assert lease.slot_count == 3
    leases.release(9, [1])
    assert not np.any(slots.leases)
