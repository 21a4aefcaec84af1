"""Lookups: the run that is found, hints, what a lease promises and for how long."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from kvstore.engine.memory import residency
from kvstore.types import SLOT_BYTES_MIN, Shard
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    KEYS_PER_DATAGRAM_MAX,
    LeaseRelease,
    LeaseRenew,
    encode,
)
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    Node,
    Peer,
    attached,
    checksum,
    keys,
    pairs,
)


def test_the_run_ends_at_the_first_block_that_is_missing() -> None:
    node, peer = attached(Node())
    places = dict(zip([1, 2, 3, 5], peer.seal(1, 2, 3, 5), strict=True))
    assert pairs(peer.lease(1, 1, 2, 3, 4, 5)) == [places[i] for i in (1, 2, 3)]
    assert pairs(peer.lease(2, 4, 5)) == []
    assert pairs(peer.lease(3, 5, 3, 1)) == [places[5], places[3], places[1]]
    assert pairs(peer.lease(4)) == []
    counters = node.engine.counters
    assert (counters.lease_asks, counters.leased_bytes) == (4, 6 * SLOT_BYTES_MIN)


def test_with_two_ranks_the_run_ends_where_either_misses_and_slots_alternate() -> None:
    _, peer = attached(Node(slots=64), shards=HALVES)
    left = [peer.seal(i, rank=0)[0] for i in (1, 2, 3)]
    right = [peer.seal(i, rank=1)[0] for i in (1, 2, 4)]
    reply = peer.lease(1, 1, 2, 3, with_checksums=True)
    assert pairs(reply) == [left[0], right[0], left[1], right[1]]
    assert reply.checksums == b"".join(checksum(i, rank) for i in (1, 2) for rank in (0, 1))
    assert peer.hint(1, 3, 4, 2) == [True, False, False, True]


@pytest.mark.parametrize("count", [0, 7, 8, 9])
def test_a_hint_has_one_bit_per_key(count: int) -> None:
    _, peer = attached(Node(slots=128))
    peer.seal(*(i for i in range(count) if i % 3 == 0))
    assert peer.hint(*range(count)) == [i % 3 == 0 for i in range(count)]


# ── the order in which blocks go ─────────────────────────────────────────────────────────────────


def remaining(node: Node, writer: Peer, chain: range) -> list[bool]:
    """Fill the arena with other blocks until some of the chain is gone; what is left of it."""
    state = node.state.residency
    scope = next(iter(state.scopes().values()))
    words = np.frombuffer(keys(*chain), dtype="<u8").reshape(-1, 4)
    number = 10_000
    while (left := [bool(row >= 0) for row in state.table.find(scope, words)]) == [True] * len(
        chain
    ):
        writer.seal(number)
        number += 1
    return left


@pytest.mark.usefixtures("each_policy")
@pytest.mark.parametrize("touch", ["seal", "hint", "lease"])
def test_a_chain_loses_its_end_first(touch: str) -> None:
    node, peer = attached(Node(slots=16, slab_slots=16, low_watermark=0, high_watermark=0))
    chain = range(4)
    if touch == "seal":
        peer.seal(*chain)
    else:
        for number in reversed(chain):
            peer.seal(number)
        for number in chain:  # as if each had been used by itself: the start is the oldest
            peer.hint(number)
        if touch == "hint":
            peer.hint(*chain)
        else:
            peer.lease(1, *chain)
            node.hear(peer.scheduler, LeaseRelease([1]))
    left = remaining(node, peer, chain)
    assert left == sorted(left, reverse=True)
    assert left[0]


# ── leases ───────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_lasts_its_time_and_counts_as_expired_then() -> None:
    node, peer = attached(Node(lease_ttl_ms=100))
    peer.seal(1)
    assert peer.lease(1, 1).ttl_ms == 100
    node.tick(60)
    [row] = node.engine.leases()
    assert (row.session, row.lease, row.blocks, row.age_ms, row.expires_in_ms) == (
        peer.session,
        1,
        1,
        60,
        40,
    )
    node.tick(40)
    assert node.engine.leases() == []
    assert node.engine.counters.leases_expired == 1


def test_a_renewed_lease_lasts_a_whole_life_from_then() -> None:
    node, peer = attached(Node(lease_ttl_ms=100))
    peer.seal(1)
    peer.lease(1, 1)
    peer.lease(2, 1)
    node.tick(60)
    node.hear(peer.scheduler, LeaseRenew([1, 77]))
    node.tick(60)
    assert [row.lease for row in node.engine.leases()] == [1]
    node.tick(40)
    assert node.engine.leases() == []
    node.hear(peer.scheduler, LeaseRenew([1]))
    assert node.engine.leases() == [], "an expired lease does not come back"


def test_blocks_are_held_by_each_lease_once() -> None:
    node = Node()
    peer, other = Peer(node, "a"), Peer(node, "b")
    peer.seal(1)
    peer.lease(1, 1)
    peer.lease(2, 1)
    other.lease(1, 1)
    assert [block.leases for block in node.engine.blocks()] == [3]
    node.hear(peer.scheduler, LeaseRelease([1, 1, 99]))
    assert [block.leases for block in node.engine.blocks()] == [2]
    node.hear(other.scheduler, LeaseRelease([2]))
    assert [block.leases for block in node.engine.blocks()] == [2], "ids are a session's own"
    node.end(peer.scheduler)
    assert [block.leases for block in node.engine.blocks()] == [1]


def test_an_id_that_is_in_use_gets_nothing_and_keeps_the_first() -> None:
    node, peer = attached(Node())
    peer.seal(1, 2)
    peer.lease(1, 1)
    assert pairs(peer.lease(1, 2)) == []
    [row] = node.engine.leases()
    assert row.blocks == 1


def test_leases_are_limited_in_number_per_session() -> None:
    node = Node(lease_count_max=2)
    peer, other = Peer(node, "a"), Peer(node, "b")
    peer.seal(1)
    assert [len(pairs(peer.lease(i, 1))) for i in range(3)] == [1, 1, 0]
    assert len(pairs(other.lease(1, 1))) == 1
    node.hear(peer.scheduler, LeaseRelease([0]))
    assert len(pairs(peer.lease(3, 1))) == 1


def test_an_answer_fits_a_datagram_however_many_shards_there_are() -> None:
    """64 shards of 100 keys would be 175 KiB."""
    wide = msgspec.structs.replace(SMALL, layer_count=32)
    shards = tuple(Shard(n // 2, n // 2 + 1, n % 2, n % 2 + 1) for n in range(64))
    node, peer = attached(
        Node(slots=10240, slab_slots=512, credit_share=1.0, block_count_max=10240),
        shards=shards,
        space=wide,
    )
    for begin in range(0, 100, 25):
        node.step(*(peer.sealed(*range(begin, begin + 25), rank=rank) for rank in range(64)))
    assert peer.hint(*range(100)) == [True] * 100
    reply = peer.lease(1, *range(100), with_checksums=True)
    assert len(pairs(reply)) == KEYS_PER_DATAGRAM_MAX
    assert len(encode(reply)) <= DATAGRAM_BYTES_MAX


def test_slots_of_several_shards_are_put_side_by_side_three_times_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To see what fits, to pin and tell it, and for its checksums: of eight shards a twentieth of
    the lookup each time."""
    _, peer = attached(Node(slots=64), shards=HALVES)
    for rank in (0, 1):
        peer.seal(1, 2, rank=rank)
    counted = Mock(wraps=residency._interleave)
    monkeypatch.setattr(residency, "_interleave", counted)
    assert len(pairs(peer.lease(1, 1, 2))) == 4
    assert counted.call_count <= 3
