"""What one who pins all that he can leaves to others: something, and all that is promised. Nobody
loses a slot to others at or below his share, and nobody above his share makes others give way
first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kvstore.engine.events import PeerGone
from kvstore.engine.memory.shares import OTHERS, Pins, QuotaGroup, Quotas
from kvstore.engine.memory.slots import Pool
from kvstore.engine.moves.intake import Admission
from kvstore.engine.sessions.owners import Asker, OwnerGroup
from kvstore.engine.why.reasons import Reason
from kvstore.types import SLOT_BYTES_MIN
from kvstore.wire.messages import LEASE_LIVES_MAX, LeaseRelease, LeaseRenew
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import SMALL, Node, Peer, attached, space
from tests.unit.engine.peers import PeerNode
from tests.unit.engine.test_explain import told

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
    part = told(node, peer, blocks=len(there), outcome="")
    nothing = told(node, peer, blocks=1, leases=[2])
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


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────


LARGE = space("large", layer_bytes=64 << 10)
"""Four times the slot of SMALL."""


def quotas(**slots: int) -> tuple[tuple[str, int], ...]:
    return tuple((name, count * SLOT_BYTES_MIN) for name, count in slots.items())


def held(node: Node, name: str) -> int:
    """Slots of the least size that a group has."""
    table = node.state.slots.quotas
    return int(table.held[table.names.index(name)]) // SLOT_BYTES_MIN


def fill(peer: Peer, first: int, count: int) -> None:
    """Store new blocks one by one, as far as credits come."""
    for number in range(first, first + count):
        if peer.unused():
            peer.seal(number)


def test_who_gives_way_to_whom() -> None:
    table = Quotas([("a", 30), ("b", 30)], arena_bytes=100)
    a, b = QuotaGroup(1), QuotaGroup(2)
    table.held[:] = [45, 10, 45]
    assert table.givers(a, 20) == [b, OTHERS, a], "below its share: the furthest above gives first"
    assert table.givers(a, 21) == [a, b, OTHERS], "above it: its own first"
    assert table.givers(b, 0) == [b, OTHERS], "who is below his share gives nothing"
    assert [table.spare_bytes(g, a) for g in (OTHERS, a, b)] == [5, 10, 15]
    assert table.can_lose(a, 10).tolist() == [False, True, True]


def test_memory_that_nobody_uses_is_for_everybody_and_comes_back() -> None:
    node = Node(slots=32, quotas=quotas(modest=12))
    greedy = Peer(node, "greedy", tenant="u")
    fill(greedy, 100, 200)
    assert held(node, "") > 28, "more than the 20 that are promised to the others"
    modest = Peer(node, "modest")
    fill(modest, 0, 60)
    assert held(node, "modest") >= 10, "all but what its watermark keeps free"
    assert held(node, "") >= 18
    fill(greedy, 400, 60)
    assert held(node, "modest") >= 10


@pytest.mark.parametrize(
    ("promised", "greedy_slots", "modest_slots"),
    # A slab of four holds one large slot of three.
    [({"modest": 20}, 12, 15), ({"greedy": 20}, 20, 9)],
)
def test_slabs_of_another_slot_size_are_kept_and_claimed(
    promised: dict[str, int], greedy_slots: int, modest_slots: int
) -> None:
    node = Node(slots=32, quotas=quotas(**promised))
    greedy = Peer(node, "greedy", tenant="u")
    fill(greedy, 100, 80)
    modest = Peer(node, "modest", space=LARGE)
    for first in (0, 1000):
        fill(modest, first, 30)
        fill(greedy, 400 + first, 80)
        (name,) = promised
        assert held(node, name) == max(greedy_slots, modest_slots)
        assert held(node, "") == min(greedy_slots, modest_slots)


def test_a_claim_is_one_against_others() -> None:
    """A group of two slot sizes below its share takes a slab of others, not its own coldest."""
    node = Node(slots=32, quotas=quotas(team=20))
    small = Peer(node, "small", tenant="team")
    fill(small, 0, 6)  # its first slab is full, and the coldest of all
    greedy = Peer(node, "greedy", tenant="u")
    fill(greedy, 100, 80)
    large = Peer(node, "large", tenant="team", space=LARGE)
    fill(large, 0, 1)
    assert small.hint(*range(6)) == [True] * 6
    assert large.hint(0) == [True]


def test_credits_stay_below_a_small_share() -> None:
    node = Node(slots=32, credit_share=1.0, quotas=quotas(tiny=8))
    tiny = Peer(node, "tiny")
    assert len(tiny.unused()) == 2
    rest = Peer(node, "rest", tenant="u")
    assert len(rest.unused()) == 6


def test_credits_cost_no_more_a_session_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looks(sessions: int) -> int:
        """At what an engine's session asks for, in one step of a node with so many."""
        node, count = Node(slots=32, quotas=quotas(modest=12)), 0
        for number in range(sessions):
            Peer(node, f"e{number}", tenant="modest")
        member = OwnerGroup.__dict__["asker"]

        def looked(group: OwnerGroup) -> Asker:
            nonlocal count
            count += 1
            asker: Asker = member.__get__(group, OwnerGroup)
            return asker

        with monkeypatch.context() as patch:
            patch.setattr(OwnerGroup, "asker", property(looked, member.__set__))
            node.tick()
        return count

    assert looks(20) <= 16 * 20
    assert looks(40) <= 16 * 40


ops = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 40), st.booleans())


@settings(max_examples=40)  # each has up to 80 steps
@given(
    promised=st.sampled_from([{"a": 8}, {"a": 8, "b": 16}, {"a": 0}, {"a": 16, "c": 16}]),
    steps=st.lists(ops, max_size=80),
    large=st.booleans(),
)
def test_nobody_loses_his_share_to_others(
    promised: dict[str, int], steps: list[tuple[str, int, bool]], *, large: bool
) -> None:
    node = Node(slots=32, quotas=quotas(**promised))
    table = node.state.slots.quotas
    make_room = Admission.make_room

    def watched(
        self: Admission, pool: Pool, wanted: int, active: set[int], asker: QuotaGroup
    ) -> None:
        before = table.held.copy()
        make_room(self, pool, wanted, active, asker)
        for group, share in enumerate(table.share.tolist()):
            if group != asker:
                kept = min(int(before[group]), share)
                assert table.held[group] >= kept, f"group {group} lost of its share to {asker}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "make_room", watched)
        spaces = {"a": SMALL, "b": SMALL, "c": LARGE if large else SMALL}
        peers = {name: Peer(node, name, space=spaces[name], tenant=name) for name in spaces}
        for lease, (name, number, stores) in enumerate(steps, 1):
            if stores:
                fill(peers[name], number, 3)
            else:
                peers[name].lease(lease, number, number + 1)
