"""Room and credits: what a session may take of a pool, and which slab changes hands."""

from __future__ import annotations

import msgspec

from kvstore.engine.events import Received
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Shard
from kvstore.wire.messages import Drop
from tests.unit.engine.harness import Hellos, Node, Peer, attached, space

FOUR = tuple(Shard(0, 1, head, head + 1) for head in range(4))
QUARTERS = msgspec.structs.replace(
    space("four ranks"), layer_count=1, kv_head_count=4, head_bytes=(16 << 10,)
)


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
