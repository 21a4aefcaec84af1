"""Any order of stores, lookups, clears and copies: whoever follows a place in hbm finds the block.

The oracle is memory outside the engine: the number of the block in each slot of dram, by
generation, and in each slot of hbm. A copy reads dram when it is ordered, or when it ends. After
each step every place that is shown leads to the block that its slot of dram holds now.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import initialize, invariant, rule

from kvstore.engine.events import Clear
from kvstore.engine.memory.policies import Words
from kvstore.engine.state import State
from kvstore.tier_events import Promoted
from kvstore.types import PAGES_PER_GENERATION
from kvstore.wire.messages import LeaseRelease
from kvstore.wire.space import shard_bytes, slot_bytes
from tests.amounts import amount
from tests.kit.planted import Patch, instead_of
from tests.sim import planted_hbm
from tests.steps import CountedMachine, verify_machine
from tests.unit.engine.harness import Peer, key, pairs, space
from tests.unit.engine.slab import GPU, SlabNode

BLOCKS = 4
OTHERS = range(BLOCKS, 2 * BLOCKS)
"""Blocks that come into slots that others have left."""
numbers = st.integers(0, BLOCKS - 1)
whos = st.integers(0, 2)
KEY_OF = {key(number): number for number in range(2 * BLOCKS)}


class HbmMachine(CountedMachine):
    """Two engines on the GPU, with blocks of two sizes, and one elsewhere, on 16 slots of dram."""

    def __init__(self) -> None:
        super().__init__()
        self.node = SlabNode(slots=16, slab_slots=4, hbm_slots=8, credit_share=0.25)
        self.peers = [
            Peer(self.node, "a", gpu=GPU),
            Peer(self.node, "b", gpu=GPU, space=space("large")),
            Peer(self.node, "c"),
        ]
        self.dram: dict[tuple[int, int], tuple[str, int]] = {}
        """Model and number of the block in each slot, by generation."""
        self.hbm: dict[int, object] = {}
        """The same of each slot of hbm."""
        self.models = {
            shard_bytes(peer.space, peer.shards[0]): peer.space.model for peer in self.peers
        }
        self.lease = 0
        self.held: list[tuple[Peer, int]] = []

    @rule(who=whos, first=st.integers(0, 1), count=st.integers(1, 4))
    def stores(self, who: int, first: int, count: int) -> None:
        peer = self.peers[who]
        for number in range(first, min(first + count, BLOCKS)):
            if unused := peer.unused():
                self.dram[unused[0]] = (peer.space.model, number)
                peer.seal(number)

    @initialize()
    def has_blocks(self) -> None:
        for who in range(2):
            self.loads_all_again(who)

    @rule(who=whos, first=st.integers(0, 1), count=st.integers(1, 4), times=st.integers(2, 3))
    def looks_up(self, who: int, first: int, count: int, times: int) -> None:
        for _ in range(times):
            self.look_up(self.peers[who], first, count)
            self.lets_go()

    @rule(who=whos, first=numbers)
    def looks_up_and_keeps_it(self, who: int, first: int) -> None:
        self.look_up(self.peers[who], first, 2)

    def look_up(self, peer: Peer, first: int, count: int) -> None:
        self.lease += 1
        reply = peer.lease(self.lease, *range(first, min(first + count, BLOCKS)))
        for number, place in enumerate(pairs(reply), first):
            assert self.dram.get(place) == (peer.space.model, number), "another block's bytes"
        self.held.append((peer, self.lease))

    @rule()
    def lets_go(self) -> None:
        if self.held:
            peer, lease = self.held.pop(0)
            self.node.hear(peer.scheduler, LeaseRelease([lease]))

    @rule(
        what=st.sampled_from(["distrust", "distrust", "distrust", "clear", "wait", "wait long"]),
        pick=st.integers(0, 15),
    )
    def loses(self, what: str, pick: int) -> None:
        """A block, all of them, or the memory of what was leased."""
        rows = self.node.engine.blocks()
        if what == "distrust" and rows:
            row = rows[pick % len(rows)]
            self.peers[0].distrust((row.slot, row.generation))
        elif what == "clear":
            self.node.step(Clear(None, None))
        else:
            self.node.tick(40_000 if what == "wait long" else 1)

    @rule(who=whos)
    def loads_all_again(self, who: int) -> None:
        self.stores(who, 0, BLOCKS)
        self.looks_up(who, 0, BLOCKS, 2)

    @rule(pick=st.integers(0, 9), at=numbers, is_same=st.booleans(), ends=st.booleans())
    def a_slot_is_sealed_again_while_it_is_copied(
        self, pick: int, at: int, *, is_same: bool, ends: bool
    ) -> None:
        """By another block, or by the one that was there; the copy had read it before that."""
        if self.node.copying:
            order = self.node.copying[pick % len(self.node.copying)]
            at %= len(order.slots)
            number = KEY_OF[order.keys[32 * at :][:32]]
            self.seal_again(int(order.slots[at]), *((number,) if is_same else ()))
            if ends:
                self.a_copy_ends(pick, works=True, early=True)

    @rule(pick=st.integers(0, 9))
    def a_slot_with_a_copy_is_sealed_again(self, pick: int) -> None:
        if self.node.pages:
            self.seal_again(sorted(self.node.pages)[pick % len(self.node.pages)])

    def seal_again(self, slot: int, *first: int) -> None:
        """Its block leaves, and others are stored until one is there: free slots are granted in the
        order in which they came back, the last one first."""
        row = next((row for row in self.node.engine.blocks() if row.slot == slot), None)
        words, _ = self.node.state.slots.words_of(np.array([slot], np.uint32))
        size = int(self.node.state.slots.sizes(words)[0])
        peer = next(peer for peer in self.peers if self.slot_bytes(peer) == size)
        if row is not None:
            peer.distrust((slot, row.generation))
        for number in (*first, *OTHERS):
            unused = peer.unused()
            there = [place for place in unused if place[0] == slot]
            for place in there or unused[:1]:
                self.dram[place] = (peer.space.model, number)
                peer.seal(number, places=[place])
            if there:
                return

    @staticmethod
    def slot_bytes(peer: Peer) -> int:
        return slot_bytes(shard_bytes(peer.space, peer.shards[0]))

    @rule(
        pick=st.integers(0, 9),
        works=st.sampled_from([True, True, True, False]),
        early=st.booleans(),
    )
    def a_copy_ends(self, pick: int, *, works: bool, early: bool = False) -> None:
        if not self.node.copying:
            return
        order = self.node.copying.pop(pick % len(self.node.copying))
        good = []
        for at, (slot, target) in enumerate(zip(order.slots, order.targets, strict=True)):
            generation = int(self.node.state.slots.generation[int(slot) // PAGES_PER_GENERATION])
            wanted = self.models[order.scope.block_bytes], KEY_OF[order.keys[32 * at :][:32]]
            read = wanted if early else self.dram.get((int(slot), generation))
            found = self.hbm[int(target)] = read if works else None
            good.append(found == wanted)
        self.node.step(Promoted(order.job, bytes(good)))

    @invariant()
    def places_lead_to_their_blocks(self) -> None:
        generations = self.node.state.slots.generation
        for slot, target in self.node.pages.items():
            place = slot, int(generations[slot // PAGES_PER_GENERATION])
            assert self.hbm[target] == self.dram.get(place), "another block's bytes in hbm"
        assert self.node.copies == len(self.node.pages), "shown is what is there"
        busy = [target for order in self.node.copying for target in order.targets.tolist()]
        assert not set(busy) & set(self.node.pages.values()), "a place is written that is read"

    def teardown(self) -> None:
        """All copies end and all blocks go: hbm is empty."""
        while self.node.copying:
            self.a_copy_ends(0, works=True)
        self.node.step(Clear(None, None))
        assert self.node.state.hbm is not None
        assert not self.node.state.hbm.state.any()


def test_any_order_keeps_places_and_blocks_together() -> None:
    verify_machine(HbmMachine, examples=amount(25, nightly=1500), steps=50)


# ── broken on purpose ────────────────────────────────────────────────────────────────────────────


@instead_of(State, "drop_copies")
def copies_that_give_way_stay_shown(drop_copies: Any, self: State, words: Words) -> None:
    drop_copies(self, words)
    assert self.hbm is not None
    self.hbm.raised.clear()


@instead_of(State, "empty")
def slots_are_given_back_early(empty: Any, self: State, words: Words, stamp: int) -> None:
    """Of a block that leaves, the slot of the copy that is being made is free at once."""
    empty(self, words, stamp)
    assert self.hbm is not None
    if len(words):
        self.hbm.free(np.flatnonzero(self.hbm.state == 1))


@pytest.mark.parametrize(
    "broken",
    [
        planted_hbm.copy_of_a_slot_that_is_sealed_again,
        planted_hbm.first_slot_of_hbm_taken_for_none,
        copies_that_give_way_stay_shown,
        slots_are_given_back_early,
    ],
)
def test_broken_copies_are_noticed(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        verify_machine(HbmMachine, examples=400, steps=50, broken_seed=2)
