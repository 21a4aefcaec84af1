"""What an event costs: as much as it is long, however large the arena is. Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.engine.events import Ended, Event, Exited, Received
from kvstore.types import ConnectionId
from kvstore.wire.messages import (
    Distrust,
    Drop,
    EngineMessage,
    Hint,
    LeaseAsk,
    LeaseRelease,
    LeaseRenew,
    Pinned,
    Quiesce,
    Quiet,
    Verified,
)
from tests.unit.engine.harness import HALVES, Node, Peer, arrays, key, keys
from tests.unit.engine.watched import Watched, elements_of, watch

SLOTS = 1 << 10
TIMES = 16
"""As many slots, in the second of two nodes."""


def attached(slots: int) -> tuple[Node, Peer]:
    node = Node(slots=slots, slab_slots=16, block_count_max=4 * slots, credit_blocks_max=8)
    peer = Peer(node, shards=HALVES)
    return node, peer


def _quiet(node: Node, peer: Peer) -> list[Event]:
    """The scheduler attaches again: ranks are asked, and answer with slots in hand."""
    node.hear(peer.scheduler, Hint(request=1, keys=keys(1)))
    node.connect(peer.scheduler_hello(process="again"))
    asked = node.last(peer.ranks[0], Quiesce).session
    return [Received(ConnectionId(peer.ranks[0]), Quiet(asked))]


def _seal(node: Node, peer: Peer) -> list[Event]:
    return [peer.sealed(1, 2, 3)]


def _pinned(node: Node, peer: Peer) -> list[Event]:
    return [Received(ConnectionId(peer.ranks[0]), Pinned(4096))]


def _end(node: Node, peer: Peer) -> list[Event]:
    return [Ended(ConnectionId(peer.ranks[0]))]


def _exit(node: Node, peer: Peer) -> list[Event]:
    return [Exited(ConnectionId(peer.ranks[0]))]


def _from_rank(kind: type[Drop | Distrust | Verified]) -> Make:
    def make(node: Node, peer: Peer) -> list[Event]:
        places = peer.unused()[:2] if kind is Drop else peer.seal(1, 2)
        slots, generations = arrays(places)
        session = {"session": peer.session} if kind is Drop else {}
        message = kind(slots=slots, generations=generations, **session)
        return [Received(ConnectionId(peer.ranks[0]), message)]

    return make


def _from_scheduler(message: EngineMessage) -> Make:
    def make(node: Node, peer: Peer) -> list[Event]:
        for rank in range(len(peer.ranks)):
            peer.seal(1, 2, 3, rank=rank)
        node.hear(peer.scheduler, LeaseAsk(lease=9, keys=keys(1, 2)))
        return [Received(ConnectionId(peer.scheduler), message)]

    return make


Make = Callable[[Node, Peer], list[Event]]
EVENTS: dict[str, Make] = {
    "quiet": _quiet,
    "seal": _seal,
    "end": _end,
    "exit": _exit,
    "drop": _from_rank(Drop),
    "distrust": _from_rank(Distrust),
    "verified": _from_rank(Verified),
    "pinned": _pinned,
    "hint": _from_scheduler(Hint(request=1, keys=keys(1, 2, 3, 4))),
    "ask": _from_scheduler(LeaseAsk(lease=1, keys=keys(1, 2, 3, 4))),
    "renew": _from_scheduler(LeaseRenew(leases=[9])),
    "release": _from_scheduler(LeaseRelease(leases=[9])),
}


@pytest.mark.parametrize("name", EVENTS)
def test_no_event_of_an_engine_costs_more_in_a_larger_arena(name: str) -> None:
    found = []
    for slots in (SLOTS, TIMES * SLOTS):
        node, peer = attached(slots)
        events = EVENTS[name](node, peer)
        watch(node.engine)
        found.append(elements_of(node.engine, *events))
    assert found[1] <= 2 * found[0] < SLOTS, "elements of columns that were looked at"


def test_a_look_at_a_whole_column_is_seen() -> None:
    node, _ = attached(SLOTS)
    watch(node.engine)
    before = Watched.elements
    np.count_nonzero(node.state.slots.state)
    assert Watched.elements - before >= SLOTS


def test_what_a_scrape_and_the_index_ask_looks_at_no_column() -> None:
    node, peer = attached(SLOTS)
    peer.seal(1, 2, 3)
    watch(node.engine)
    before = Watched.elements
    (dram, _), load = node.engine.tiers(), node.engine.load()
    assert dram.slots_sealed == 3
    assert dram.used_bytes == load.dram_used_bytes > 0
    assert Watched.elements - before < SLOTS // TIMES


def test_a_quiet_that_was_said_already_is_refused() -> None:
    node, peer = attached(SLOTS)
    assert peer.ranks[0] not in node.hangups
    node.hear(peer.ranks[0], Quiet(peer.session))
    assert node.hangups[peer.ranks[0]].startswith("a Quiet for a session that it was quiet for")


@pytest.mark.parametrize("session", [0, 1])
def test_a_quiet_of_long_ago_frees_nothing_and_costs_nothing(session: int) -> None:
    """Of numbers that nobody ever asked for there are 2^60."""
    node, peer = attached(SLOTS)
    node.hear(peer.ranks[0], Quiet(session))
    assert peer.ranks[0] in node.hangups
    assert key(1)[:4].hex() not in node.blocks()
    assert np.count_nonzero(node.state.slots.writer) > 0


def test_an_answer_that_comes_after_the_next_question_is_no_answer() -> None:
    node, peer = attached(SLOTS)
    asked = []
    for process in ("b", "c"):
        node.connect(peer.scheduler_hello(process=process))
        asked.append(node.last(peer.ranks[0], Quiesce).session)
    held = node.granted()
    node.hear(peer.ranks[0], Quiet(asked[0]))
    assert node.granted() == held
    node.hear(peer.ranks[0], Quiet(asked[1]))
    assert node.granted() == held // 2
    assert not node.hangups.keys() & set(peer.ranks)
