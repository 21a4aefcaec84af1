"""What an event costs: as much as it is long, however large the arena is. Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.engine.events import (
    AskPush,
    Ended,
    Event,
    Exited,
    Land,
    Landed,
    LandingUp,
    PeerAsked,
    Received,
    Tick,
)
from kvstore.engine.moves import files as queue_module
from kvstore.engine.moves.grants import LandingSlab
from kvstore.engine.moves.jobs import ReadPace
from kvstore.tier_events import FileLate, FileRead, ReadFile
from kvstore.types import PAGE_BYTES, ConnectionId
from kvstore.wire.messages import (
    Distrust,
    Drop,
    EngineMessage,
    Hint,
    LeaseAsk,
    LeaseRelease,
    LeaseRenew,
    Pinned,
    PushCancel,
    PushClose,
    PushExpect,
    PushOpen,
    Quiesce,
    Quiet,
    Verified,
)
from kvstore.wire.peers import Pushed
from tests.unit.engine.disk import SPACE, DiskNode, gone, known
from tests.unit.engine.harness import HALVES, SMALL, WHOLE, Node, Peer, arrays, checksum, keys
from tests.unit.engine.pushing import PushNode, push_grant
from tests.unit.engine.watched import Watched, elements_of, instructions_of, watch

SLOTS = 1 << 10
TIMES = 16
"""As many slots, in the second of two nodes."""
FEW, MANY = 64, 256
"""Requests that wait: more than there is room for."""


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
    "seal": lambda _, peer: [peer.sealed(1, 2, 3)],
    "end": lambda _, peer: [Ended(ConnectionId(peer.ranks[0]))],
    "exit": lambda _, peer: [Exited(ConnectionId(peer.ranks[0]))],
    "drop": _from_rank(Drop),
    "distrust": _from_rank(Distrust),
    "verified": _from_rank(Verified),
    "pinned": lambda _, peer: [Received(ConnectionId(peer.ranks[0]), Pinned(4096))],
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


def test_what_inspect_asks_looks_at_no_column_for_each_space_or_rank() -> None:
    found = []
    for engines in (2, 12):
        node = Node(slots=64, credit_share=0.05, credit_blocks_max=1)
        for number in range(engines):
            Peer(node, f"e{number}", epoch=str(number)).seal(number)
        watch(node.engine)
        before = Watched.elements
        assert len(node.engine.spaces()) == len(node.engine.jobs()) == engines
        found.append(Watched.elements - before)
    few, many = found
    assert many <= 6 * few < node.config.block_count_max, "some numbers for each row, no column"


# ── the queue for the disk, and pushes ───────────────────────────────────────────────────────────


def _disk_crowd(waiting: int) -> tuple[DiskNode, Peer]:
    """An engine that waits for so many prompts of two blocks on a disk that reads one at a time."""
    node = DiskNode(slots=64, block_count_max=8 * MANY)
    peer = Peer(node)
    node.engine.files.pace = ReadPace(10**10)
    node.step(known(*range(2 * MANY + 4)))
    for number in range(waiting):
        ask = LeaseAsk(number + 10, keys(2 * number, 2 * number + 1))
        commands = node.engine.step([Received(ConnectionId(peer.scheduler), ask)], node.now_ns)
        node.reads += [command for command in commands if isinstance(command, ReadFile)]
    assert len(node.engine.files._queue) == waiting
    return node, peer


DISK: dict[str, Callable[[DiskNode, Peer], list[Event]]] = {
    "read": lambda node, _: [FileRead(node.reads[0].job, b"\1")],
    "late": lambda node, _: [FileLate(node.reads[0].job)],
    "release": lambda _, peer: [Received(ConnectionId(peer.scheduler), LeaseRelease(leases=[30]))],
    "gone": lambda *_: [gone(7, at=8)],
}


def crowd(waiting: int, *, is_here: bool = False) -> tuple[PushNode, Peer]:
    """A decode node whose engine waits for so many prompts of one block, of four nodes."""
    node = PushNode("d", slots=64, landing=32)
    peer = Peer(node, space=SMALL)
    node.engine.step([LandingUp(1)], node.now_ns)
    for number in range(waiting):
        source = "d" if is_here else f"p{number % 4}"
        expect = PushExpect(f"r{number}", source, keys(1000 + number), 600_000)
        events = [Received(ConnectionId(peer.scheduler), expect)]
        node.commands += node.engine.step(events, node.now_ns)
        node.commands += node.engine.step([Tick()], node.now_ns)
    assert len(node.engine._awaited) == waiting
    return node, peer


def _lands(node: PushNode, peer: Peer) -> list[Event]:
    """A block is written, and there is room for another one."""
    asked = next(each for each in node.commands if isinstance(each, AskPush))
    size, sums = SMALL.layer_count * sum(SMALL.head_bytes) * SMALL.kv_head_count, checksum(0, 0)
    pushed = Pushed(
        grant=asked.its.grant,
        epoch=1,
        first=0,
        shards=(WHOLE,),
        block_bytes=(size,),
        checksums=sums,
    )
    commands = node.engine.step([pushed], node.now_ns)
    (land,) = [each for each in commands if isinstance(each, Land)]
    return [Landed(land.job, b"\1", sums)]


def _from_decode(message: EngineMessage) -> Callable[[PushNode, Peer], list[Event]]:
    return lambda _, peer: [Received(ConnectionId(peer.scheduler), message)]


PUSHES: dict[str, Callable[[PushNode, Peer], list[Event]]] = {
    "landed": _lands,
    "expect": _from_decode(PushExpect("new", "p0", keys(1), 1000)),
    "cancel": _from_decode(PushCancel("r3")),
    "ask": _from_decode(LeaseAsk(lease=1, keys=keys(1, 2, 3, 4))),
    "tick": lambda _node, _peer: [Tick()],
    "open": _from_decode(PushOpen("another")),
    "close": _from_decode(PushClose("another")),
}


def _grants(waiting: int) -> tuple[PushNode, Peer]:
    """A prefill node that was asked for so many prompts of one block, by several nodes."""
    node = PushNode("p", slots=64)
    peer = Peer(node)
    for number in range(waiting):
        its = {"transfer": f"r{number}", "space": SPACE, "deadline_ms": 600_000}
        asked = PeerAsked(number // 64 + 1, "d", push_grant(number, keys(number), **its))
        opened = Received(ConnectionId(peer.scheduler), PushOpen(f"r{number}"))
        node.engine.step([opened, asked, Tick()], node.now_ns)
    assert len(node.engine._pushes) == waiting
    return node, peer


CROWDS: dict[
    str, tuple[Callable[[int], tuple[Any, Peer]], dict[str, Callable[..., list[Event]]]]
] = {
    "disk": (_disk_crowd, DISK),
    "pushes": (crowd, PUSHES),
    # A prefill on this node has no landing.
    "pushes here": (
        partial(crowd, is_here=True),
        {name: event for name, event in PUSHES.items() if name != "landed"},
    ),
    "grants": (_grants, {name: PUSHES[name] for name in ("open", "close", "tick")}),
}


@pytest.mark.parametrize(
    ("crowd", "event"), [(name, event) for name, (_, events) in CROWDS.items() for event in events]
)
def test_no_event_looks_at_all_that_wait(crowd: str, event: str) -> None:
    make_crowd, events = CROWDS[crowd]
    found = []
    for waiting in (FEW, MANY):
        node, peer = make_crowd(waiting)
        its = events[event](node, peer)
        found.append(instructions_of(node.engine, *its, now_ns=node.now_ns + 1))
    few, many = found
    assert many < few + MANY, "instructions; a look at one takes some"


def test_an_ask_adds_up_a_bounded_number_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "READS_COUNTED", FEW)
    found = []
    for waiting in (FEW, MANY):
        node, peer = _disk_crowd(waiting)
        asked = Received(
            ConnectionId(peer.scheduler), LeaseAsk(lease=1, keys=keys(*range(1024, 1028)))
        )
        found.append(instructions_of(node.engine, asked, now_ns=node.now_ns + 1))
    few, many = found
    assert many < few + MANY


def test_ends_of_all_that_an_engine_expects_are_spread_over_ticks() -> None:
    """Lookups of others are answered in between."""
    node, peer = crowd(MANY)
    node.engine.step([Ended(ConnectionId(peer.scheduler))], node.now_ns)
    costs = [instructions_of(node.engine, Tick(), now_ns=node.now_ns)]
    while node.engine.is_behind:
        costs.append(instructions_of(node.engine, Tick(), now_ns=node.now_ns))
    assert not node.engine._awaited
    assert max(costs) < sum(costs) / 2


@pytest.mark.parametrize("pages", [1, 8])
def test_room_in_the_landing_slab_is_found_without_a_look_at_it(pages: int) -> None:
    found = []
    for size in (1 << 10, 1 << 18):
        slab = LandingSlab(begin_bytes=0, size_bytes=size * PAGE_BYTES)
        held = [slab.take(pages, 4) for _ in range(8)]
        for name, value in vars(slab).items():
            if isinstance(value, np.ndarray):
                setattr(slab, name, value.view(Watched))
        before = Watched.elements
        for extents in held[::2]:
            slab.free(extents, pages)
        assert len(slab.take(pages, 4)) == 4
        assert not len(slab.take(size, 1))
        found.append(Watched.elements - before)
    assert found[1] <= found[0] <= 8 * 4 * pages
