"""Ages of evicted blocks beside those of a list of all uses."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, strategies as st

from kvstore.engine.why import curve
from kvstore.engine.why.curve import BOUNDS_S, Ages
from kvstore.types import Tier
from kvstore.units import NS_PER_S
from tests.unit.engine.harness import Node, Peer

SECOND = NS_PER_S


@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 3)), min_size=1, max_size=60))
def test_an_age_is_hardly_above_the_true_one(steps: list[tuple[int, int]]) -> None:
    """Steps of (seconds to wait, uses)."""
    made, used, now_ns = Ages(), [0], 0  # use 0 was before the start
    for pause_s, uses in steps:
        made.mark(len(used), now_ns)
        used += [now_ns] * uses
        now_ns += max(pause_s, 1) * SECOND
        made.mark(len(used), now_ns)
    for number, at_ns in enumerate(used):
        before = made.total_ns
        made.evicted(np.array([number]), now_ns)
        assert made.total_ns - before == now_ns - at_ns
    counts = np.searchsorted(np.array(BOUNDS_S) * SECOND, [now_ns - at for at in used])
    assert made.counts == np.bincount(counts, minlength=len(BOUNDS_S) + 1).tolist()


def test_marks_of_a_year_are_few_and_near_at_every_age() -> None:
    made, day = Ages(), 86_400
    # Every second of the last hours, and every ten minutes before: number = its second.
    for at_s in itertools.chain(range(0, 365 * day, 600), range(365 * day, 365 * day + 9999)):
        made.mark(at_s, at_s * SECOND)
        assert made._count <= curve.MARKS_MAX
    now_s = 365 * day + 9998
    for age_s in (0, 1, 59, 600, 3_600, 86_400, 30 * 86_400, 364 * 86_400):
        before = made.total_ns
        made.evicted(np.array([now_s - age_s]), now_s * SECOND)
        found_s = (made.total_ns - before) / SECOND
        assert age_s <= found_s <= age_s * 1.05 + 1 + (600 if age_s > 9999 else 0), age_s


def test_evictions_are_as_old_as_the_last_use_of_their_blocks() -> None:
    node = Node()
    peer = Peer(node)
    node.tick()
    made = node.engine.eviction_ages()[Tier.DRAM]
    number = itertools.count(1)
    peer.store(next(number))
    node.now_ns += 100 * SECOND
    node.tick()
    while not node.engine.counters.evictions:
        peer.store(next(number))
    assert sum(made.counts) == node.engine.counters.evictions
    assert made.counts[1] == 1, "the first one is 100 s old"
    assert sum(made.counts) == made.counts[0] + made.counts[1]
    assert made.total_ns // SECOND == 100
