"""What fails in the loop: it costs one connection or one query, or the node; never a wrong byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.events import Command, Ended, Event, Send, Tick
from kvstore.engine.trust import Sealed
from kvstore.errors import NodeBusy
from kvstore.node import scrub as scrub_module
from kvstore.node.driver import RECOVERIES_MAX, Driver, Poisoned, StepFailed
from kvstore.node.scrub import DramScrub
from kvstore.tier_events import RaiseGenerations, Scrubbed
from kvstore.tiers.file.config import ScrubRate
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, ConnectionId, SlotId
from kvstore.wire.messages import Quiesce, Quiet, decode_from_node
from tests.kit.memory_tier import MemoryTier
from tests.unit.engine.harness import Node, Peer as EnginePeer
from tests.unit.node.conftest import MakeAttach
from tests.unit.node.driver_kit import Connect, Loop, attached


@pytest.fixture
def loop(make_attach: MakeAttach) -> Iterator[Loop]:
    made = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))
    yield made
    made.close()


def test_a_failure_costs_one_connection(
    loop: Loop, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: ConnectionId) -> list[Command]:
        raise RuntimeError("a bug")

    loop.engine.answers[1] = fail
    loop.engine.answers[2] = lambda n: [Send(connection=n, message=Quiesce(session=9))]
    good = attached(loop, connect)
    for _ in range(3):
        bad = attached(loop, connect)
        bad.say(Quiet(session=1))
        good.say(Quiet(session=2))
        assert bad.hear() == b""
        assert decode_from_node(good.hear()) == Quiesce(session=9)
    loop.settle()
    assert loop.engine.kinds().count(Ended) == 3, "the engine is told of the hang-up"
    assert loop.driver.counters.failures == 3
    assert loop.attach.counters.ended["failure"] == 3
    assert caplog.text.count("a bug in the node") == 1, "one place, one log line"


def test_a_failing_tick_does_not_stop_the_loop(
    loop: Loop, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.attach, "expire", lambda _: 1 / 0)
    peer = attached(loop, connect)
    while loop.driver.counters.failures < 2:
        loop.settle()
    loop.engine.answers[1] = lambda n: [Send(connection=n, message=Quiesce(session=9))]
    peer.say(Quiet(session=1))
    assert decode_from_node(peer.hear()) == Quiesce(session=9)


def test_generations_that_a_failed_step_raised_are_published(loop: Loop, connect: Connect) -> None:
    def fail(number: ConnectionId) -> list[Command]:
        slots, generations = [SlotId(16), SlotId(48)], [7, 9]
        loop.engine.decided = [RaiseGenerations(slots=slots, generations=generations)]
        raise RuntimeError("after the slots were freed, before anybody was told")

    loop.engine.answers[1] = fail
    bad = attached(loop, connect)
    bad.say(Quiet(session=1))
    assert bad.hear() == b""
    loop.settle()
    slots = [SlotId(word * PAGES_PER_GENERATION) for word in range(4)]
    assert [loop.tier.generation(slot) for slot in slots] == [1, 7, 1, 9]


def poison(loop: Loop) -> list[Command]:
    """Something that the tier refuses."""
    loop.tier.raise_generations([16], [9])
    return [RaiseGenerations(slots=[16], generations=[8])]


def is_poisoned(loop: Loop, connect: Connect) -> bool:
    """Whether the answer to a peer ends the loop."""
    attached(loop, connect).say(Quiet(session=1))
    loop.thread.join(5)
    return isinstance(loop.failure, Poisoned) and not loop.thread.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_that_cannot_publish_generations_stops(
    make_attach: MakeAttach, connect: Connect, *, fails: bool
) -> None:
    """Also those that a step raised which failed."""
    loop = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))

    def answer(number: ConnectionId) -> list[Command]:
        if not fails:
            return poison(loop)
        loop.engine.decided = poison(loop)
        raise RuntimeError("a bug")

    loop.engine.answers[1] = answer
    assert is_poisoned(loop, connect)
    assert loop.tier.generation(SlotId(16)) == 9


def test_what_a_failed_step_had_decided_and_cannot_be_is_told(loop: Loop, connect: Connect) -> None:
    deaf = attached(loop, connect)

    def fail(number: ConnectionId) -> list[Command]:
        loop.engine.decided = [
            Send(connection=ConnectionId(1), message=Quiesce(session=k)) for k in range(5000)
        ]
        raise RuntimeError("a bug")

    loop.engine.answers[1] = fail
    bad = attached(loop, connect)
    bad.say(Quiet(session=1))
    assert bad.hear() == b""
    loop.settle()
    ended = [event for event in loop.engine.seen if isinstance(event, Ended)]
    assert sorted(event.connection for event in ended) == [1, 2]
    assert loop.attach.counters.ended["overflow"] == 1
    assert deaf.hear()


def test_a_node_that_fails_at_its_failures_ends(
    make_attach: MakeAttach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "_tick", lambda *_: None)
    loop = Loop(make_attach, MemoryTier(capacity_bytes=SLOT_BYTES_MIN))
    monkeypatch.setattr(loop.engine, "salvage", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.driver._recover(RuntimeError("a bug"), None)
    assert loop.driver.counters.failures == RECOVERIES_MAX
    loop.close()


def test_generations_that_a_failed_clear_raised_are_published(
    make_attach: MakeAttach, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(slots=8, tell_changes=False, tell_offers=False)
    monkeypatch.setattr(node, "_held", lambda: node.told)
    places = EnginePeer(node).seal(1, 2)
    engine, tier = node.engine, MemoryTier(capacity_bytes=8 * SLOT_BYTES_MIN)
    tier.raise_generations(list(node.raised), list(node.raised.values()))
    monkeypatch.setattr(Driver, "_tick", lambda *_: None)
    monkeypatch.setattr(engine._stores, "grant_all", lambda: 1 / 0)
    loop = Loop(make_attach, tier, engine)
    with pytest.raises(ZeroDivisionError):
        loop.driver.clear(space=None, tenant=None, timeout_s=5)
    loop.close()
    for slot, generation in places:
        raised = int(engine._state.slots.generation[slot // PAGES_PER_GENERATION])
        assert tier.generation(SlotId(slot)) == raised > generation
    assert loop.driver.counters.failures == 1


def test_a_clear_or_a_word_that_cannot_be_published_stops_the_node(
    make_attach: MakeAttach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "_tick", lambda *_: None)
    loop = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))
    refused = poison(loop)
    later: list[Engine] = []
    seen: list[list[Event]] = []

    def step(events: list[Event], now_ns: int) -> list[Command]:
        seen.append(events)
        return refused

    monkeypatch.setattr(loop.engine, "step", step)
    entered, leave = threading.Event(), threading.Event()

    def hold(_: Engine) -> None:
        entered.set()
        assert leave.wait(10)

    with ThreadPoolExecutor(3) as pool:
        holding = pool.submit(lambda: loop.driver.query(hold, timeout_s=10))
        assert entered.wait(10)
        told = pool.submit(lambda: loop.driver.tell(Tick(), timeout_s=10))
        while len(loop.driver._queries._waiting) < 1:
            threading.Event().wait(0.001)
        after = pool.submit(lambda: loop.driver.query(later.append, timeout_s=10))
        while len(loop.driver._queries._waiting) < 2:
            threading.Event().wait(0.001)
        leave.set()
        holding.result(10)
        with pytest.raises(StepFailed):
            told.result(10)
        with pytest.raises(NodeBusy):
            after.result(10)
    loop.thread.join(5)
    assert isinstance(loop.failure, Poisoned)
    assert (len(seen), later) == (1, []), "nobody is served any more"


def test_a_scrub_whose_word_fails_tries_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, words, taken = loop.engine.step, iter(range(3)), threading.Event()

    def fail_twice(events: list[Event], now_ns: int) -> list[Command]:
        if any(isinstance(event, Scrubbed) for event in events):
            if next(words) < 2:
                raise RuntimeError("a bug")
            taken.set()
        return step(events, now_ns)

    monkeypatch.setattr(loop.engine, "step", fail_twice)
    scrubs = SimpleNamespace(sealed=lambda _: Sealed([], 0))
    monkeypatch.setattr(loop.engine, "scrubs", scrubs, raising=False)
    for pause in ("BUSY_PAUSE_S", "IDLE_PAUSE_S"):
        monkeypatch.setattr(scrub_module, pause, 0.001)
    scrub = DramScrub(loop.driver, loop.tier, ScrubRate(1, daily=False))
    scrub.start()
    assert taken.wait(20), "the scrub has ended"
    scrub.close()
    assert caplog.text.count("trying again") == 1
