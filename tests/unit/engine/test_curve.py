"""The live miss-ratio curve, beside exact replays, and as a part of a node that may fail; ages of
evicted blocks, beside those of a list of all uses."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bench.scenarios.curve import asker, exact, live
from bench.scenarios.workloads import Request, Workload, chats, zipf
from kvstore.engine.why import curve, curve as its
from kvstore.engine.why.curve import BLOCKS_MIN, BOUNDS_S, SCALES, Ages, BlockEvent, Curve
from kvstore.types import SLOT_BYTES_MIN, Tier
from kvstore.units import NS_PER_S
from tests.unit.engine.harness import Node, Peer, pairs

SEED = 7
DAY_NS = 86_400 * NS_PER_S


def workload(requests: int) -> Workload:
    """Chats among questions about documents of Zipf popularity, in turn."""
    one, other = chats(SEED, requests=requests), zipf(SEED, requests=requests)
    shift = 1 + max(max(request.blocks) for request in one.requests)
    moved = [
        Request(tuple(block + shift for block in request.blocks), request.prompt_tokens)
        for request in other.requests
    ]
    pairs = zip(one.requests, moved, strict=True)
    return Workload("both", tuple(request for pair in pairs for request in pair))


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_the_curve_is_near_exact_replays(policy: str) -> None:
    both, slots = workload(450), 800
    made = live(both, policy, slots)
    rows = made.report(901)
    true = [exact(both, policy, int(scale * slots)) for scale in SCALES]
    assert true[-1] - true[0] > 0.15, "a flat curve would prove nothing"
    errors = [abs((row.hit_ratio or 0) - share) for row, share in zip(rows, true, strict=True)]
    assert np.mean(errors) <= 0.02, errors
    assert max(errors) <= 0.05, errors
    assert all(cache.rate < 1 for cache in made.caches[1:]), "sampling is what is tested"
    assert all(cache.tracked <= its.KEYS_MAX for cache in made.caches)


def keys(count: int, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(32 * count), "<u8").reshape(count, 4)


def test_nothing_behind_a_missing_block_counts() -> None:
    curve, who, chain = Curve("lru", 5000 * SLOT_BYTES_MIN), asker(), keys(100, 1)
    for number in range(50):
        fresh = np.concatenate([chain[:60], keys(1, 100 + number), chain[61:]])
        curve.see(BlockEvent.ASKED, who, fresh)
        curve.tick(number + 1)
    ratio = curve.report(51)[1].hit_ratio
    assert ratio is not None
    assert ratio == pytest.approx(0.6 * 49 / 50, abs=0.02)


def test_blocks_of_answers_are_known_and_counts_fade() -> None:
    """A stored block is there for the first lookup; a day later the old counts weigh half."""
    curve, who = Curve("lru", 100_000 * SLOT_BYTES_MIN), asker()
    for number in range(20):
        curve.see(BlockEvent.STORED, who, keys(100, number))
        curve.see(BlockEvent.ASKED, who, keys(100, number))
        curve.tick(1)
    assert [row.hit_ratio for row in curve.report(1)] == [None] * 5, "dram was not filled once"
    small = Curve("lru", 500 * SLOT_BYTES_MIN)
    for number in range(20):
        small.see(BlockEvent.STORED, who, keys(100, number))
        small.see(BlockEvent.ASKED, who, keys(100, number))
        small.tick(1)
    small.see(BlockEvent.ASKED, who, keys(100, 19))
    small.tick(1)
    assert small.report(1)[1].hit_ratio == 1.0
    for _ in range(30):
        small.tick(2 * DAY_NS)  # fades once, not at every tick
    small.see(BlockEvent.ASKED, who, keys(1050, 99))
    for _ in range(4):
        small.tick(2 * DAY_NS)
    assert small.report(2 * DAY_NS)[1].hit_ratio == pytest.approx(0.5, abs=0.03)


def test_prefill_saved_a_day() -> None:
    curve, who = Curve("lru", 500 * SLOT_BYTES_MIN), asker(block_tokens=16)
    for number in range(20):
        curve.see(BlockEvent.ASKED, who, keys(100, 1), ns_per_token=1_000_000)
        curve.tick(1 if not number else 1 + DAY_NS // 2)
    row = curve.report(1 + DAY_NS // 2)[1]
    # 19 of 20 lookups of 1,600 tokens in half a day, at a millisecond a token.
    assert row.prefill_ms_per_day == pytest.approx(2 * 19 * 1600, rel=0.01)


def test_an_error_in_it_hurts_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(slots=32)
    peer = Peer(node, "a")
    peer.seal(1, 2)
    monkeypatch.setattr(Curve, "_see", mock.Mock(side_effect=ValueError("broken")))
    assert len(pairs(peer.lease(1, 1, 2))) == 2
    rows = node.engine.curve()
    assert {(row.hit_ratio, row.trouble) for row in rows} == {(None, "ValueError: broken")}
    assert len(pairs(peer.lease(2, 1, 2))) == 2


def test_the_node_feeds_it() -> None:
    node = Node(slots=32)
    peer = Peer(node, "a")
    peer.seal(1, 2)
    peer.lease(1, 1, 2, 3)
    node.tick()
    rows = node.engine.curve()
    assert [row.capacity for row in rows] == ["0.5x", "1x", "2x", "4x", "8x"]
    assert (rows[1].capacity_bytes, rows[1].blocks) == (32 * SLOT_BYTES_MIN, 3)
    assert rows[1].blocks_needed == BLOCKS_MIN
    (missed,) = {cache.missed_tokens for cache in node.engine._state.curve.caches}
    assert missed == peer_block_tokens(node), "two of three were stored"


def peer_block_tokens(node: Node) -> int:
    (known,) = node.engine._state.known.values()
    return known.space.block_tokens


def test_overload_leaves_lookups_out(monkeypatch: pytest.MonkeyPatch) -> None:
    curve, who = Curve("lru", 500 * SLOT_BYTES_MIN), asker()
    for number in range(100):
        curve.see(BlockEvent.ASKED, who, keys(100, number))
    assert curve.report(1)[0].blocks < its.WAITING_KEYS_MAX + 100
    for number in range(2 * its.WAITING_KEYS_MAX // its.KEYS_PER_TICK):
        curve.tick(number + 1)
    assert curve.report(9)[1].hit_ratio == 0.0


# ── ages of evicted blocks ────────────────────────────────────────────────────────────────────────


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
    made = node.engine.ages[Tier.DRAM]
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
