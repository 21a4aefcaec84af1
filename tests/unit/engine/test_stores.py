"""Stores: what a seal publishes, joins or ignores; credits; full and tiny arenas."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.engine.events import Clear, Cleared, Ended, Exited, Received
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Shard
from kvstore.wire.messages import Drop, Grant, LeaseAsk, LeaseRelease, LeaseReply
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import known
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    Hellos,
    Node,
    Peer,
    attached,
    keys,
    pairs,
    short,
    space,
)

FOUR = tuple(Shard(0, 1, head, head + 1) for head in range(4))
QUARTERS = msgspec.structs.replace(
    space("four ranks"), layer_count=1, kv_head_count=4, head_bytes=(16 << 10,)
)


def test_a_store_of_what_is_there_is_joined() -> None:
    node = Node()
    first, second = Peer(node, "a"), Peer(node, "b")
    [there] = first.seal(1)
    [mine, other] = second.seal(1, 2)
    assert pairs(second.lease(1, 1, 2)) == [there, other]
    assert node.engine.counters.stores_joined == 1
    assert node.raised[mine[0]] == mine[1] + 1, "the slot is free again"
    assert not second.hint(3)[0]


# ── seals that do not count ──────────────────────────────────────────────────────────────────────


def test_a_seal_with_another_generation_or_of_what_is_no_slot_is_ignored() -> None:
    node, peer = attached(Node())
    granted = node.granted()
    slot, generation = peer.unused()[0]
    wrong = [(slot, generation - 1), (slot, generation + 1)]
    no_slot = [(slot + 1, generation), (2**32 - 1, 1), (32 * 16, 1)]
    for place in (*wrong, *no_slot):
        peer.seal(1, places=[place])
    assert node.blocks() == {}
    assert node.engine.counters.stale_slots == len(wrong) + len(no_slot)
    assert node.granted() == granted
    assert peer.seal(1, places=[(slot, generation)])
    assert peer.hint(1) == [True]


def test_a_late_seal_of_an_earlier_session_frees_its_slot() -> None:
    node, peer = attached(Node(), shards=HALVES)
    late = peer.unused(0)[0]
    node.end(peer.ranks[1])
    peer.seal(1, places=[late], rank=0)
    assert node.blocks() == {}
    assert node.raised[late[0]] == late[1] + 1
    peer.ranks[1] = node.connect(peer.rank_hello(1))
    # It may also come with the session after the next already forming.
    later = peer.unused(0)[0]
    peer.seal(1, places=[later], rank=0)
    assert node.blocks() == {}
    peer.be_quiet()
    peer.seal(1, places=[late, later][:1], rank=0)
    assert node.blocks() == {}


@pytest.mark.parametrize("twice", ["key", "slot"])
def test_a_seal_that_names_something_twice_ends_the_connection(twice: str) -> None:
    node, peer = attached(Node())
    a, b = peer.unused()[:2]
    if twice == "key":
        peer.seal(1, 1, places=[a, b])
    else:
        peer.seal(1, 2, places=[a, a])
    assert node.hangups[peer.ranks[0]] == "a Seal that names a key or slot twice"
    assert node.blocks() == {}


# ── drops and bad copies ─────────────────────────────────────────────────────────────────────────


def test_a_dropped_slot_is_free_with_a_new_generation() -> None:
    node, peer = attached(Node())
    a, b = peer.unused()[:2]
    granted = node.granted()
    peer.drop(a, a, (b[0], b[1] + 1))
    assert node.granted() == granted - 1
    assert node.engine.counters.stores_dropped == 1
    assert node.raised == {a[0]: a[1] + 1}
    peer.seal(1, places=[a])
    assert node.blocks() == {}


def test_distrust_forgets_the_copy_and_voids_who_reads_it() -> None:
    node = Node()
    writer, reader = Peer(node, "a"), Peer(node, "b")
    places = writer.seal(1, 2)
    reader.lease(1, 1, 2)
    reader.distrust(places[0])
    assert reader.hint(1, 2) == [False, True]
    assert node.raised[places[0][0]] == places[0][1] + 1
    assert node.engine.counters.blocks_distrusted == 1
    assert node.engine.leases()[0].blocks == 2, "the lease lives on until it is given back"
    reader.distrust(places[0], places[1], places[1], (places[1][0], 77))
    assert node.engine.counters.blocks_distrusted == 2
    writer.seal(1)
    assert pairs(reader.lease(2, 1)) != [places[0]]


def test_distrust_of_what_an_engine_cannot_read_does_nothing() -> None:
    node = Node(slots=64)
    mine, other = Peer(node, "a"), Peer(node, "b", tenant="u")
    place = mine.seal(1)[0]
    other.distrust(place)
    mine.distrust((place[0] + 1, place[1]))  # no slot begins there
    assert mine.hint(1) == [True]
    assert node.engine.counters.blocks_distrusted == 0
    mine.distrust(place)
    assert mine.hint(1) == [False]


def test_clear_takes_what_was_named_and_leaves_credits() -> None:
    node = Node(slots=64)
    here, there = Peer(node, "a"), Peer(node, "b", tenant="u")
    other = Peer(node, "c", space=space("other", layer_bytes=16 << 10))
    for peer in (here, there, other):
        peer.seal(1, 2)
    node.step(known(2, 3))
    granted = node.granted()
    here.lease(1, 1)
    assert node.step(Clear(fingerprint(SMALL, weights_epoch=""), "t"))[-1] == Cleared(3)
    assert [peer.hint(1, 2) for peer in (here, there, other)] == [
        [False] * 2,
        [True] * 2,
        [True] * 2,
    ]
    assert node.granted() == granted
    assert node.step(Clear(None, "u"))[-1] == Cleared(2)
    assert node.step(Clear(None, None))[-1] == Cleared(2)
    assert node.blocks() == {}
    here.seal(9)
    assert here.hint(9) == [True]


# ── credits ──────────────────────────────────────────────────────────────────────────────────────


def test_credits_are_topped_up_when_half_is_used() -> None:
    node, peer = attached(Node(slots=32))
    assert [len(pairs(g)) for g in node.sent[peer.scheduler] if isinstance(g, Grant)] == [8]
    for i in range(3):
        peer.seal(i)
    assert node.count(peer.scheduler, Grant) == 1
    peer.seal(3)
    assert len(pairs(node.last(peer.scheduler, Grant))) == 4
    assert node.engine.counters.blocks_granted == 12
    peer.drop(*peer.unused()[:4])
    assert len(pairs(node.last(peer.scheduler, Grant))) == 4
    assert len(Peer(Node(slots=64, credit_blocks_max=3)).credits()) == 3


def release(*leases: int) -> LeaseRelease:
    return LeaseRelease(list(leases))


@pytest.mark.usefixtures("each_policy")
@pytest.mark.parametrize("how", ["release", "expiry", "session"])
def test_an_arena_full_of_leases_grants_nothing_and_recovers(how: str) -> None:
    node = Node(slots=4, lease_ttl_ms=1000)
    reader, writer = Peer(node, "reader"), Peer(node, "writer")
    number = 0
    while writer.unused():
        # In one step: a block that nobody leased yet would go first.
        node.step(
            writer.sealed(number),
            Received(ConnectionId(reader.scheduler), LeaseAsk(lease=number, keys=keys(number))),
        )
        assert pairs(node.last(reader.scheduler, LeaseReply)), number
        number += 1
    refused = node.engine.counters.grants_refused
    node.tick()
    node.tick()
    assert not writer.unused()
    assert node.engine.counters.grants_refused > refused
    assert len(node.blocks()) == number
    if how == "release":
        node.hear(reader.scheduler, release(0))
    elif how == "expiry":
        node.tick(1001)
    else:
        node.end(reader.scheduler)
    assert writer.unused()
    assert len(node.blocks()) == number - 1


def test_room_for_half_a_block_is_no_credit_but_its_generation_is_published() -> None:
    """Everything leased but one slot: two ranks of one slot size cannot use it alone."""
    # More is promised than there is yet: else one who may pin no block makes no room either.
    node = Node(slots=8, slab_slots=4, ready_slots=4)
    whole, halves = Peer(node, "whole"), Peer(node, "halves", shards=HALVES)
    assert (len(whole.unused()), len(halves.unused())) == (1, 1)
    ask = Received(ConnectionId(halves.scheduler), LeaseAsk(lease=1, keys=keys(1)))
    node.step(halves.sealed(1, rank=0), halves.sealed(1, rank=1), ask)
    assert halves.unused() == []
    before = node.engine.counters.evictions
    node.step(whole.sealed(2))  # `Node.step` checks that nothing is left unpublished
    assert node.engine.counters.evictions == before + 1
    assert halves.unused() == []


@pytest.mark.usefixtures("each_policy")
def test_room_is_made_ahead_of_need_and_the_oldest_goes() -> None:
    node, peer = attached(
        Node(slots=40, slab_slots=40, low_watermark=0.1, high_watermark=0.3), name="a"
    )
    for number in range(36):
        peer.seal(number)
    tier = node.engine.tiers()[0]
    free = 40 - tier.slots_sealed - tier.slots_granted
    assert free >= 4, "never below the low mark"
    present = peer.hint(*range(36))
    assert present == sorted(present), "older blocks went first"
    assert not all(present)


def test_a_session_of_many_ranks_leaves_what_is_stored() -> None:
    node, peer = attached(Node(slots=32, credit_share=0.125), shards=FOUR, space=QUARTERS)
    for number in range(20):
        peer.store(number)
    held = node.engine.tiers()[0].slots_sealed
    assert held >= 24, "credits took the room of blocks"
    assert len(peer.lease(1, 19).slots) == 4 * 4


def test_a_slab_that_a_living_process_may_write_never_changes_hands() -> None:
    node = Node(slots=16, slab_slots=4, credit_share=0.25)
    gone = Peer(node, "gone")
    for number in range(10):
        gone.store(number)
    writable = {slot for slot, _ in gone.unused()}
    node.end(gone.scheduler, *gone.ranks)
    assert node.quarantined() == len(writable) > 0
    new = Peer(node, "new", space=space("new", layer_bytes=SLOT_BYTES_MIN))
    for number in range(20):
        new.store(number)
    assert node.quarantined() == len(writable)
    pages = {slot + page for slot, _ in new.credits() for page in range(48)}
    assert not pages & writable


def test_nothing_is_heard_after_a_hangup_in_the_same_batch() -> None:
    """A second Hello behind the fault would attach a connection that has no socket any more."""
    node = Node()
    hello = Hellos().scheduler_hello()
    wrong = Drop(session=1, slots=b"", generations=b"")
    node.step(*(Received(ConnectionId(9), m) for m in (hello, wrong, hello)))
    assert 9 in node.hangups
    assert node.engine.nodes()[0].connections == 0
    assert node.admitted == [9]
    assert node.released == [9]


# ── slot sizes ───────────────────────────────────────────────────────────────────────────────────


def test_a_size_that_nobody_uses_any_more_gives_its_slabs_away() -> None:
    node = Node(slots=16)
    old = Peer(node, "old")
    for number in range(30):
        old.seal(number)
    for connection in (old.scheduler, *old.ranks):
        node.step(Ended(ConnectionId(connection)), Exited(ConnectionId(connection)))
    new = Peer(node, "new", space=space())
    for number in range(20):
        new.seal(number)
    assert new.hint(19) == [True]
    (size,) = node.sizes()
    assert len(node.state.slots.pools[size].slabs) == 4, "the other size is forgotten"


def test_events_of_one_step_are_taken_in_order() -> None:
    node, peer = attached(Node())
    node.step(peer.sealed(1), Ended(ConnectionId(peer.ranks[0])), peer.sealed(2))
    assert node.blocks() == {short(1): "dram"}
