"""Any order of what other nodes hold, serve, want and break, beside stores, lookups and a disk.

The oracle is that of `test_files_machine`: what was put into each slot, by generation. A block that
another node said to be damaged is garbage; nobody may be served it, neither an engine nor a node.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import initialize, invariant, rule

from kvstore.engine.events import (
    AnswerPeer,
    Candidate,
    Fetched,
    Located,
    PeerAsked,
    PeerGone,
)
from kvstore.engine.moves.fetches import Fetches
from kvstore.engine.moves.servings import Servings
from kvstore.wire.peers import GiveBack, GivenBack, ServeAnswer
from tests.amounts import amount
from tests.kit.planted import Patch, instead_of
from tests.steps import verify_machine
from tests.unit.engine.harness import checksum
from tests.unit.engine.peers import PeerNode, serve
from tests.unit.engine.test_files_machine import (
    BLOCKS,
    KEY_OF,
    DiskMachine,
    numbers,
)

GARBAGE = -1
PEERS = (1, 2)


class PeersMachine(DiskMachine):
    """One engine, a disk and other nodes."""

    node: PeerNode

    def __init__(self) -> None:
        super().__init__()
        self.serving = 0
        self.served: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Places of servings that were answered and not given back: slots and generations."""
        self.answered = 0

    def make_node(self, **config: Any) -> PeerNode:
        return PeerNode(**config)

    @initialize()
    def a_disk_with_records(self) -> None:
        """None: what is here is not fetched."""

    # ── what is fetched ──────────────────────────────────────────────────────────────────────────

    @rule(blocks=st.integers(0, BLOCKS), is_known=st.booleans(), pick=st.integers(0, 9))
    def the_index_answers(self, blocks: int, pick: int, *, is_known: bool) -> None:
        if self.node.locates:
            question = self.node.locates.pop(pick % len(self.node.locates))
            found = (Candidate("far", blocks),) if blocks and is_known else ()
            self.node.step(Located(question.locate, found, is_known))
            self.listen()

    @rule(good=st.lists(st.booleans(), min_size=BLOCKS), pick=st.integers(0, 9))
    def a_fetch_ends(self, good: list[bool], pick: int) -> None:
        if not self.node.fetches:
            return
        fetch = self.node.fetches.pop(pick % len(self.node.fetches))
        generations = self.node.state.slots.generation
        flags, sums = [], b""
        for at, slot in enumerate(fetch.slots.tolist()):
            number = KEY_OF[fetch.keys[32 * at : 32 * at + 32]]
            is_good = good[at % len(good)]
            flags.append(is_good)
            sums += checksum(number)
            self.arena[slot, int(generations[slot // 16])] = number if is_good else GARBAGE
        self.node.step(Fetched(fetch.job, bytes(flags), sums, peer_failed=not any(flags)))
        self.listen()

    # ── what is served ────────────────────────────────────────────────────────────────────────────

    @rule(peer=st.sampled_from(PEERS), first=numbers, count=st.integers(1, 6))
    def another_node_asks(self, peer: int, first: int, count: int) -> None:
        self.serving += 1
        wanted = range(first, min(first + count, BLOCKS))
        self.node.step(serve(peer, self.serving, *wanted))
        self.listen()

    @rule(pick=st.integers(0, 9))
    def another_node_has_read(self, pick: int) -> None:
        if not self.served:
            return
        name = sorted(self.served)[pick % len(self.served)]
        places = self.served.pop(name)
        self.node.step(PeerAsked(name[0], "n", GiveBack(name[1])))
        intact = self.node.given_back[-1].intact
        generations = self.node.state.slots.generation
        for flag, (slot, generation) in zip(intact, places, strict=len(intact) > 0):
            assert not flag or generations[slot // 16] == generation, "it did not stay"

    @rule(peer=st.sampled_from(PEERS))
    def another_node_goes(self, peer: int) -> None:
        self.node.step(PeerGone(peer))
        self.served = {name: served for name, served in self.served.items() if name[0] != peer}
        self.listen()

    def listen(self) -> None:
        """Whoever is served blocks is served those that he asked for."""
        super().listen()
        generations = self.node.state.slots.generation
        for answer in self.node.answers[self.answered :]:
            served = answer.its
            if not isinstance(served, ServeAnswer) or not served.slots:
                continue
            slots = np.frombuffer(served.slots, "<u4").tolist()
            places = [(slot, int(generations[slot // 16])) for slot in slots]
            self.served[answer.peer, served.serving] = places
            for at, place in enumerate(places):
                number = self.arena.get(place)
                assert number not in (None, GARBAGE), "served what is no block"
                assert served.checksums[16 * at : 16 * at + 16] == checksum(number)
        self.answered = len(self.node.answers)

    @invariant()
    def consistent(self) -> None:
        super().consistent()
        held = (self.node.state.slots.writer == -2).sum()
        assert held == sum(len(fetch.slots) for fetch in self.node.fetches)

    def teardown(self) -> None:
        """Everybody answers, everything is given back: nothing is held any more."""
        while self.node.locates:
            self.the_index_answers(0, 0, is_known=True)
        while self.node.fetches:
            self.a_fetch_ends([True] * BLOCKS, 0)
        for peer in PEERS:
            self.another_node_goes(peer)
        super().teardown()
        fetches = self.node.engine._fetches
        assert not fetches._coming
        assert fetches._fetching.moving_bytes == 0
        assert not self.node.engine._servings._waiting


def test_any_order_of_what_other_nodes_do_keeps_the_promises() -> None:
    verify_machine(PeersMachine, examples=amount(60, nightly=500))


@instead_of(Fetches, "fetched")
def every_fetch_is_trusted(fetched: Any, self: Fetches, event: Fetched) -> None:
    fetched(self, Fetched(event.job, b"\x01" * len(event.good), event.checksums))


@instead_of(Servings, "returned")
def all_stayed(returned: Any, self: Servings, event: PeerAsked[GiveBack]) -> None:
    returned(self, event)
    answer = GivenBack(event.its.serving, b"\x01" * 8)
    self._state.commands[-1] = AnswerPeer(event.peer, answer)


@pytest.mark.parametrize(("broken", "seed"), [(every_fetch_is_trusted, 14), (all_stayed, 0)])
def test_a_broken_side_of_peers_is_noticed(
    broken: Patch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        verify_machine(PeersMachine, examples=3000, broken_seed=seed)
