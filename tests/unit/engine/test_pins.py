"""What one who pins all that he can leaves to others: something, and all that is promised."""

from __future__ import annotations

import pytest

from kvstore.engine.events import PeerGone
from kvstore.engine.memory.shares import Pins
from kvstore.engine.why.reasons import Reason
from kvstore.types import SLOT_BYTES_MIN
from kvstore.wire.messages import LEASE_LIVES_MAX, LeaseRelease, LeaseRenew, Story
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import Node, Peer, attached
from tests.unit.engine.peers import PeerNode
from tests.unit.engine.test_quotas import fill, held, quotas

MANY = 1000
"""First lease of a hoarder."""


def hoard(peer: Peer, first: int, count: int) -> None:
    """Store new blocks and lease each at once, as far as credits come and leases are given."""
    for number in range(first, first + count):
        if peer.unused():
            peer.seal(number)
        peer.lease(MANY + number, number)


def renew(peer: Peer, first: int, count: int) -> None:
    numbers = [MANY + number for number in range(first, first + count)]
    peer.node.hear(peer.scheduler, LeaseRenew(numbers))


def pinned(node: Node) -> int:
    return sum(node.state.slots.pins.node.held) // SLOT_BYTES_MIN


def fetched(node: Node) -> int:
    accounts = node.state.slots.pins.accounts
    return sum(sum(accounts[name].held) for name in accounts if name == ("node",)) // (
        SLOT_BYTES_MIN
    )


def test_an_engine_that_pins_all_that_it_can_leaves_something_to_another_tenant() -> None:
    node = Node(slots=64)
    hoard(Peer(node, "greedy", tenant="u"), 0, 80)
    modest = Peer(node, "modest")
    fill(modest, 500, 20)
    assert modest.hint(519) == [True]
    assert len(modest.lease(1, 519).slots) == 4


def test_what_is_promised_comes_though_everything_else_is_pinned() -> None:
    node = Node(slots=32, quotas=quotas(modest=12))
    greedy = Peer(node, "greedy", tenant="u")
    fill(greedy, 0, 40)
    for number in range(40):
        greedy.lease(MANY + number, number)
    modest = Peer(node, "modest")
    for number in range(500, 560):
        fill(modest, number, 1)
        hoard(greedy, number + 1000, 1)
        renew(greedy, 0, 2000)
    assert held(node, "modest") >= 10, "all but what its watermark keeps free"


def test_credits_of_engines_that_hang_up_and_live_leave_something() -> None:
    """Their slots are in quarantine until they die."""
    node = Node(slots=256)
    for number in range(20):
        gone = Peer(node, f"g{number}", tenant="u")
        node.end(gone.scheduler, *gone.ranks)
    assert 200 < node.quarantined() <= 241, "15/16"
    modest, found = Peer(node, "modest"), 0
    for number in range(500, 520):
        fill(modest, number, 1)
        found += modest.hint(number) == [True]
    assert found > 10, "all but what its watermark takes at times"


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_process_that_comes_under_many_names_has_one_part(hangs_up: bool) -> None:
    node = Node(slots=128)
    for number in range(20):
        gone = Peer(node, f"g{number}", tenant=f"u{number}", process=-7)
        if hangs_up:
            node.end(gone.scheduler, *gone.ranks)
    assert 48 < node.quarantined() + node.granted() <= 64, "a half"
    for number in range(20):
        other = Peer(node, f"h{number}", tenant=f"v{number}", process=-8)
        node.end(other.scheduler, *other.ranks)
    assert 64 < node.quarantined() + node.granted() <= 96, "a half of what the first one left"
    modest = Peer(node, "modest")
    fill(modest, 500, 20)
    assert sum(modest.hint(number) == [True] for number in range(500, 520)) >= 10


def test_a_process_may_write_half_of_what_others_leave_and_one_block_at_least() -> None:
    node = Node(slots=4)
    pins, share = node.state.slots.pins, node.state.slots.quotas.share
    for connection, process in ((1, -7), (2, -8), (3, -9)):
        pins.join_engine(connection, ("t", str(connection), ""), process)

    def blocks(share_bytes: int, *connections: int) -> int:
        share[0] = share_bytes
        return pins.writable([(connection, 10) for connection in connections], 0)

    assert blocks(160, 1) == 8
    pins.process(1).add([(0, 80)], 1)
    assert blocks(160, 1) == 0
    assert blocks(160, 2) == blocks(240, 1, 2) == 4
    pins.process(2).add([(0, 75)], 1)
    assert blocks(160, 3) == 1
    pins.process(1).add([(0, 80)], -1)
    assert blocks(160, 1) == 5, "what is left of a block is one"


def test_a_lease_that_loads_nothing_is_not_renewed_for_ever() -> None:
    node, peer = attached(Node(lease_ttl_ms=1000))
    peer.seal(1)
    peer.lease(MANY + 1, 1)
    for _ in range(2 * LEASE_LIVES_MAX - 1):
        assert node.engine.leases()
        node.tick(500)
        renew(peer, 1, 1)
    node.tick(500)
    assert not node.engine.leases()
    assert len(peer.lease(1, 1).slots) == 4, "it may be asked for again"


def test_a_prefix_that_many_requests_lease_is_pinned_once() -> None:
    node, peer = attached(Node(slots=32))
    peer.seal(*range(8))
    before = pinned(node)
    for lease in range(1, 101):
        assert len(peer.lease(lease, *range(8)).slots) == 8 * 4
    assert pinned(node) == before + 8
    pins, quotas_ = node.state.slots.pins, node.state.slots.quotas
    assert pins.room(pins.node, 0, 1) == quotas_.share[0] - pins.node.held[0] > 0
    node.hear(peer.scheduler, LeaseRelease(list(range(1, 101))))
    assert pinned(node) == before


def test_who_may_pin_no_more_is_given_the_part_that_fits_and_explain_says_why() -> None:
    node, peer = attached(Node(slots=64))
    fill(peer, 0, 64)
    there = [number for number in range(64) if peer.hint(number) == [True]]
    node.state.slots.quotas.share[:] //= 2  # as if others pinned the rest
    got = len(peer.lease(1, *there).slots) // 4
    assert 0 < got < len(there)
    assert not peer.lease(2, there[-1]).slots
    assert node.engine.counters.pins_refused == len(there) - got + 1
    for request, lease, blocks, outcome in (("a", 1, len(there), ""), ("b", 2, 1, "not stored")):
        story = Story(
            request=request,
            prompt_tokens=16 * blocks,
            outcome=outcome,
            session=peer.session,
            leases=[lease],
        )
        node.hear(peer.scheduler, story)
    nothing, part = node.engine.explain.requests("", limit=2)
    assert nothing.outcome is Reason.PINNED_SHARE_USED_UP
    for row in (part, nothing):
        reasons = [its.reason for its in node.engine.explain.request(row.number)[1]]
        assert Reason.PINNED_SHARE_USED_UP in reasons


def test_a_node_that_fetches_again_and_again_leaves_most() -> None:
    node = PeerNode(slots=64)
    engine = Peer(node)
    fill(engine, 0, 70)
    there = [number for number in range(70) if engine.hint(number) == [True]]
    for serving, number in enumerate(there, 1):
        node.serve(serving, number)
    free_of_servings = 64 - node.granted()
    served = fetched(node)
    assert 8 <= served <= free_of_servings // 4, "a quarter, where nobody else fetches"
    assert node.engine.counters.pins_refused == len(there) - served
    for serving, number in enumerate(reversed(there), 1000):
        node.serve(serving, number, peer=2)
    assert served < fetched(node) <= free_of_servings // 2
    node.step(PeerGone(1))
    node.step(PeerGone(2))
    assert fetched(node) == 0


def test_what_is_served_of_a_promise_counts_for_it() -> None:
    """Where everything is promised, nodes can fetch all the same."""
    node = PeerNode(slots=64, quotas=quotas(e=32, f=32))
    engine = Peer(node)
    fill(engine, 0, 20)
    assert node.serve(1, 0, 1, 2).slots
    assert SPACE in {space for _, space in node.state.known}


def test_a_share_of_less_than_a_block_is_one_block() -> None:
    node = Node(slots=32, quotas=quotas(e=32))
    other = Peer(node, "other", tenant="u")
    assert len(other.unused()) == 1
    other.seal(1)
    assert pinned(node) == len(other.unused()) == 1


@pytest.mark.parametrize("kind", ["engine", "node"])
def test_accounts_end_with_those_who_pin(kind: str) -> None:
    node, peer = attached(PeerNode())
    peer.seal(1)
    if kind == "node":
        node.serve(1, 1)
        node.step(PeerGone(1))
    pins: Pins = node.state.slots.pins
    assert {name[0] for name in pins.accounts} == {"engine", "process"}
    node.end(peer.scheduler)
    node.end(*peer.ranks)
    assert len(pins.accounts) == 4, "its credits are in quarantine"
