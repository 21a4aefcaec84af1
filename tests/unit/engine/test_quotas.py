"""What is promised is kept: nobody loses a slot to others at or below his share, and nobody above
his share makes others give way first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kvstore.engine.memory.shares import OTHERS, QuotaGroup, Quotas
from kvstore.engine.memory.slots import Pool
from kvstore.engine.moves.intake import Admission
from kvstore.engine.sessions.owners import Asker, OwnerGroup
from kvstore.types import SLOT_BYTES_MIN
from tests.unit.engine.harness import SMALL, Node, Peer, space

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
