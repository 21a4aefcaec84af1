"""What a decode node grants, and how long it waits: bounds that neither other engines, nor other
nodes, nor sizes move."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.engine.events import AnswerPeer, LandingUp
from kvstore.engine.moves import grants, pushes
from kvstore.engine.moves.grants import LandingSlab
from kvstore.engine.moves.pushes import LOOK_NS, NEWS_NS
from kvstore.engine.sessions import awaited
from kvstore.engine.sessions.awaited import STALLED_NS
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import PushCancel, PushEnd, PushExpect, PushOpen
from kvstore.wire.peers import Pushed, PushOver
from tests.kit.moves_check import check_slab
from tests.unit.engine.harness import SMALL, Peer, keys
from tests.unit.engine.pushing import PushPair, opened

STALLED = "nothing was heard of its prefill for too long"
LOOK_MS = LOOK_NS / NS_PER_MS
EMPTY: dict[str, Any] = {"first": 0, "shards": (), "block_bytes": (), "checksums": b""}
"""A message without blocks."""


def test_a_node_that_was_suspended_goes_on_waiting() -> None:
    """It could not hear of blocks; the prefill node may be as well as ever."""
    pair = opened()
    pair.expect(1, ms=600_000)
    stalled_ms = STALLED_NS / NS_PER_MS
    pair.pass_time(stalled_ms / 2)
    pair.d.tick(2 * stalled_ms)
    pair.pass_time(stalled_ms - 1)
    assert not pair.ends
    pair.tick(1)
    assert [end.reason for end in pair.ends] == [STALLED]


def in_a_queue(here: bool) -> PushPair:
    """A transfer whose prefill waits for those of other requests, on another node or `here`."""
    pair = PushPair(slots=64)
    if here:
        pair.prefill_here()
    pair.open()
    pair.expect(1, node="d" if here else "p", ms=600_000)
    pair.pump()
    for number in range(100, 110):
        pair.pass_time(STALLED_NS / NS_PER_MS / 2 - LOOK_MS)
        pair.store(number)
        pair.pump(after_ms=LOOK_MS)
    return pair


@pytest.mark.parametrize("here", [False, True])
def test_a_prefill_that_waits_for_others_is_waited_for(here: bool) -> None:
    pair = in_a_queue(here)
    assert not pair.ends
    pair.store(1)
    pair.pump(after_ms=0)
    assert [(end.blocks, end.reason) for end in pair.ends] == [(1, "")]
    if not here:
        assert pair.d.engine.counters.push_words_dropped == 0
        pair.at_rest()


@pytest.mark.parametrize("here", [False, True])
def test_a_prefill_behind_one_that_hangs_is_not_waited_for(here: bool) -> None:
    pair = in_a_queue(here)
    for _ in range(int(3 * STALLED_NS / NS_PER_MS / 2 // 1000)):  # waits of 5 s were seen
        assert not pair.ends
        pair.pump(after_ms=1000)
    assert [(end.blocks, end.reason) for end in pair.ends] == [(0, STALLED)]


def test_that_an_engine_computes_is_said_sometimes_and_of_what_is_open() -> None:
    pair = opened(slots=64)
    pair.expect(1, ms=600_000)
    pair.pump()
    for number in range(100, 140):
        pair.store(number)
        pair.pump(after_ms=100)
    words = [each.its for each in pair.p.said if isinstance(each, AnswerPeer)]
    assert len(words) == 40 * 100 // (NEWS_NS / NS_PER_MS)
    found = {(word.shards, word.checksums) for word in words if isinstance(word, Pushed)}
    assert found == {((), b"")}
    pair.close(reason="aborted")
    pair.pump()
    assert [end.reason for end in pair.ends] == ["aborted"]


@pytest.fixture
def pair() -> PushPair:
    """Two transfers, the second of which waits for room."""
    pair = opened("first", slots=64, landing=4)
    pair.open("next")
    pair.expect(1, 2, transfer="first", ms=600_000)
    pair.expect(3, transfer="next", ms=600_000)
    return pair


def test_who_waits_for_room_here_waits_as_long_as_blocks_of_others_come(pair: PushPair) -> None:
    for number in (1, 2):
        assert not pair.ends
        pair.pump()
        pair.pass_time(STALLED_NS / NS_PER_MS - 1000)
        pair.store(number)
        pair.pump(after_ms=LOOK_MS)
    assert [(end.transfer, end.reason) for end in pair.ends] == [("first", "")]
    pair.pass_time(STALLED_NS / NS_PER_MS - 1000)
    pair.store(3)
    pair.pump(after_ms=0)
    assert [(end.transfer, end.reason) for end in pair.ends[1:]] == [("next", "")]
    pair.at_rest()


def test_who_waits_for_room_here_does_not_wait_for_words_without_blocks(pair: PushPair) -> None:
    pair.pump()
    for number in range(100, 104):
        pair.pass_time(STALLED_NS / NS_PER_MS / 2)
        pair.store(number)
        pair.pump(after_ms=0)
    (end,) = pair.ends
    assert (end.transfer, end.blocks) == ("next", 0)
    assert "landing memory" in end.reason


def test_without_a_transfer_worker_a_request_waits_no_longer_and_the_reason_says_so() -> None:
    pair = PushPair()
    pair.tick()
    pair.d.step(LandingUp(0))
    pair.expect(1, ms=600_000)
    pair.pass_time(STALLED_NS / NS_PER_MS)
    pair.tick()
    assert [end.reason for end in pair.ends] == ["there was no transfer worker for too long"]


@pytest.mark.parametrize(("engine", "node"), [("other", "p"), ("d", "elsewhere")])
def test_the_same_name_elsewhere_is_no_news(engine: str, node: str) -> None:
    """Names come from requests: anybody can give two of them the same."""
    pair = PushPair()
    pair.tick()
    pair.open()
    its = pair.decode if engine == "d" else Peer(pair.d, engine, tenant="u")
    pair.d.hear(its.scheduler, PushExpect("r", node, keys(5), 600_000))
    pair.d.commands.clear()  # nobody takes its grant
    pair.expect(1, 2, ms=600_000)
    pair.pass_time(STALLED_NS / NS_PER_MS - 1)
    pair.store(1)
    pair.pump()
    pair.tick(1)
    (end,) = [m for m in pair.d.sent[its.scheduler] if isinstance(m, PushEnd)]
    assert (end.blocks, end.reason) == (0, STALLED)


FEW_ASKS = 8


@pytest.fixture
def few_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grants, pushes):
        monkeypatch.setattr(module, "ASKS_MAX", FEW_ASKS)


@pytest.mark.usefixtures("few_asks")
def test_more_requests_than_a_peer_takes_grants_wait_for_their_turn() -> None:
    pair = PushPair(slots=64, landing=32)
    pair.prefill, pair.decode = (Peer(node, node.name, space=SMALL) for node in (pair.p, pair.d))
    pair.open()
    numbers = range(1, FEW_ASKS + 10)
    for number in numbers:
        pair.expect(number)
    pair.pump()
    assert not pair.ends
    for number in numbers:
        pair.store(number)
        pair.pump()
    assert [end.reason for end in pair.ends] == [""] * len(numbers)
    pair.at_rest()


@pytest.mark.usefixtures("few_asks")
def test_a_long_prompt_whose_blocks_come_one_by_one_is_pushed_to_its_end() -> None:
    """Each that was copied out makes room for a grant of one block."""
    pair = PushPair(slots=64, landing=16)
    pair.prefill, pair.decode = (Peer(node, node.name, space=SMALL) for node in (pair.p, pair.d))
    pair.open()
    pair.expect(*range(1, 30))
    pair.pump()
    for number in range(1, FEW_ASKS + 10):
        pair.store(number)
        pair.pump()
    assert not pair.ends


def test_a_peer_with_more_than_its_share_takes_nothing() -> None:
    """A block may be more than half of the slab; of smaller blocks there is less than no room."""
    slab = LandingSlab(begin_bytes=0, size_bytes=8 * PAGE_BYTES)
    others = slab.take(2, 1)
    its = slab.take(6, 1)
    slab.free(others, 2)
    assert not len(slab.take(1, -2))
    check_slab(slab, [(its, 6)])


def test_another_engine_can_name_as_many_transfers_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pushes, "TRANSFERS_MAX", 4)
    monkeypatch.setattr(pushes, "ALL_MAX", 8)
    pair = opened()
    other = Peer(pair.p, "other", tenant="u")
    for number in range(20):
        pair.p.hear(other.scheduler, PushOpen(f"x{number}", ""))
    pair.expect(1)
    pair.pump()
    pair.pump(after_ms=3000)
    assert not pair.ends, "its prefill goes on"


def test_an_engine_forgets_transfers_that_have_ended_before_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pushes, "TRANSFERS_MAX", 4)
    pair = opened()
    for number in range(20):
        pair.open(f"x{number}")
        pair.close(f"x{number}")
    pair.expect(1, ms=600_000)
    pair.pump()
    pair.pump(after_ms=3000)
    assert not pair.ends
    pair.open("one too many")
    pair.expect(2, transfer="x2", ms=600_000)
    pair.pump()
    pair.pump(after_ms=3000)
    assert [end.reason for end in pair.ends] == ["no engine here prefills it"]


def test_transfers_of_engines_that_are_gone_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "ALL_MAX", 8)
    pair = opened()
    for number in range(3):
        gone = Peer(pair.p, f"gone{number}", tenant="u")
        for each in range(5):
            pair.p.hear(gone.scheduler, PushOpen(f"{number}/{each}", ""))
        pair.p.end(gone.scheduler, *gone.ranks)
    pair.expect(1)
    pair.pump()
    pair.pump(after_ms=3000)
    assert not pair.ends


def test_a_process_and_all_processes_expect_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of engines are no way around it; what is refused is reported as any other push."""
    monkeypatch.setattr(awaited, "KEYS_MAX", 4)
    monkeypatch.setattr(awaited, "ALL_KEYS_MAX", 5)
    monkeypatch.setattr(awaited, "EXPECTS_MAX", 2)
    monkeypatch.setattr(awaited, "ALL_EXPECTS_MAX", 3)
    pair = PushPair()
    engines = [Peer(pair.d, f"e{n}", process=process) for n, process in enumerate((1, 1, 2, 3))]

    def expect(engine: int, *numbers: int) -> str:
        message = PushExpect("r", "p", keys(*numbers), 5000)
        scheduler = engines[engine].scheduler
        pair.d.sent.clear()
        pair.d.hear(scheduler, message)
        ends = [m for m in pair.d.sent[scheduler] if isinstance(m, PushEnd)]
        return ends[-1].reason if ends else ""

    assert not expect(0, 1, 2)
    assert expect(1, 3, 4, 5) == "too many blocks are expected"
    assert not expect(0, 3)
    assert expect(1, 4) == "too many transfers are expected"
    assert expect(2, 6, 7, 8) == "too many blocks are expected"
    pushed = pair.d.state.trail.pushes("t", "r")
    assert [(each.blocks, each.reason) for each in pushed] == [
        (3, "too many blocks are expected"),
        (1, "too many transfers are expected"),
        (3, "too many blocks are expected"),
    ]
    assert not expect(3, 6)
    assert expect(2, 7) == "too many transfers are expected"
    pair.d.hear(engines[0].scheduler, PushCancel("r"))
    assert not expect(2, 7)


def test_a_tick_looks_for_so_many_blocks_of_prefills_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (awaited, pushes):
        monkeypatch.setattr(module, "LOOK_COST_MAX", 1)
    pair = PushPair()
    pair.prefill_here()
    pair.open()
    for first in (1, 3, 5):
        pair.expect(first, first + 1, node="d", ms=600_000)
    pair.store(*range(1, 7))
    found = []
    while pair.d.engine.is_behind:
        pair.d.tick(0)
        found.append(len(pair.ends))
    assert found == [0, 1, 1, 2, 2, 3, 3], "one look, or one end, in a tick"


@pytest.mark.parametrize("side", [pushes.Pushes, awaited.Awaited])
def test_a_tick_looks_at_so_many_sides_of_pushes(
    monkeypatch: pytest.MonkeyPatch, side: type[Any]
) -> None:
    looked, look = list[object](), side._look_at

    def seen(self: Any, its: object) -> None:
        looked.append(its)
        look(self, its)

    monkeypatch.setattr(side, "_look_at", seen)
    pair = opened("r1", slots=64)
    for number, transfer in enumerate(("r1", "r2", "r3"), start=1):
        pair.open(transfer)
        pair.expect(number, transfer=transfer, ms=600_000)
    pair.pump()
    for module in (awaited, pushes):
        monkeypatch.setattr(module, "LOOK_COST_MAX", 1)
    looked.clear()
    pair.tick(STALLED_NS / NS_PER_MS)
    assert len(looked) == 1
    pair.pump()
    assert len(set(looked)) == 3


@pytest.mark.parametrize("here", [False, True])
def test_what_no_watch_reports_is_found_when_its_transfer_is_named(here: bool) -> None:
    pair = opened(slots=64)
    if here:
        pair.prefill_here()
    pair.expect(1, node="d" if here else "p", ms=600_000)
    pair.pump()
    arrivals = pair.p.engine._arrivals
    for name in list(arrivals._watches):
        arrivals.unwatch(name)
    pair.store(1)
    pair.pump()
    assert not pair.ends
    pair.open()
    pair.pump()
    assert [(end.blocks, end.reason) for end in pair.ends] == [(1, "")]


def test_a_peer_that_calls_its_push_whole_too_early_is_not_waited_for() -> None:
    pair = opened()
    pair.expect(1, 2)
    pair.to_p.clear()
    (grant,) = pair.extents
    pair.d.step(PushOver(grant, pair.epochs, "", is_quiet=True))
    assert [(end.blocks, end.reason) for end in pair.ends] == [
        (0, "node p says that all is pushed, and 2 blocks are not here")
    ]
