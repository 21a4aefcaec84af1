"""The loop with a scripted engine: order of effects, isolation of failures, heartbeat, queries."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import pytest

from kvstore.engine.counters import Counters
from kvstore.engine.engine import Engine
from kvstore.engine.events import (
    Clear,
    Cleared,
    Command,
    Ended,
    Event,
    Hangup,
    RaiseGenerations,
    Ready,
    Received,
    Release,
    Send,
    Tick,
)
from kvstore.serve import driver as driver_module
from kvstore.serve.clock import MonotonicClock
from kvstore.serve.driver import (
    QUERY_COUNT_MAX,
    RECOVERIES_MAX,
    STEP_BUCKETS_NS,
    Driver,
    NodeBusy,
    NotDurable,
)
from kvstore.serve.executor import Executor, Poisoned
from kvstore.serve.files import FileEnd
from kvstore.tiers.memory import MemoryTier
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, ConnectionId, SlotId
from kvstore.wire.messages import Quiesce, Quiet, decode_from_node
from tests.unit.engine.harness import Node
from tests.unit.engine.harness import Peer as EnginePeer
from tests.unit.serve.conftest import MakeAttach, Peer, hello_rank, hello_scheduler

Connect = Callable[[], Peer]


LEFT_OUT_BLOCKS = 4
SPENT_BYTES = 77


class ScriptedEngine:
    """Answers `Quiet(n)` as `answers[n]` says; keeps what it saw."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.seen: list[Event] = []
        self.answers: dict[int, Callable[[ConnectionId], list[Command]]] = {}
        self.decided: list[Command] = []
        """What `salvage` returns, once."""

    def step(self, events: list[Event], now_ns: int) -> list[Command]:
        assert now_ns > 0
        commands: list[Command] = []
        for event in events:
            self.seen.append(event)
            match event:
                case Received(connection=number, message=Quiet(session=session)):
                    commands += self.answers[session](number)
                case Clear():
                    commands.append(Cleared(blocks=41))
                    commands.append(Cleared(blocks=1))
                case _:
                    pass
        return commands

    left_out_blocks = LEFT_OUT_BLOCKS

    def spent_bytes(self) -> int:
        return SPENT_BYTES

    def learned(self) -> str:
        return "learned"

    def salvage(self) -> list[Command]:
        decided, self.decided = self.decided, []
        return decided

    def kinds(self) -> list[type]:
        return [type(event) for event in self.seen if not isinstance(event, Tick | Ready)]


class Loop:
    """A driver in a thread of its own."""

    def __init__(self, attach: MakeAttach, tier: MemoryTier, engine: Engine | None = None) -> None:
        self.engine = ScriptedEngine()
        self.tier = tier
        self.attach = attach()
        self.driver = Driver(
            engine=engine or cast("Engine", self.engine),
            tier=tier,
            attach=self.attach,
            executor=Executor(tier=tier, attach=self.attach, arena_fd=0, generation_fd=1),
            clock=MonotonicClock(),
        )
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.driver.run()
        except Poisoned as error:
            self.failure = error

    def settle(self) -> None:
        """Wait until what was sent before is read."""
        for _ in range(3):
            self.driver.query(lambda _: None, timeout_s=5)

    def close(self) -> None:
        self.driver.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def loop(make_attach: MakeAttach) -> Iterator[Loop]:
    made = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))
    yield made
    made.close()


def attached(loop: Loop, connect: Connect) -> Peer:
    peer = connect()
    peer.introduce(hello_rank())
    loop.settle()
    return peer


def test_generations_are_raised_before_anybody_is_told(loop: Loop, connect: Connect) -> None:
    generation_when_told: list[int] = []
    raised = loop.tier.raise_generations

    def watch(number: ConnectionId) -> list[Command]:
        send = loop.attach.send

        def watched(*args: object) -> object:
            generation_when_told.append(loop.tier.generation(16))  # type: ignore[arg-type]
            return send(*args)  # type: ignore[arg-type]

        loop.attach.send = watched  # type: ignore[method-assign,assignment]
        return [
            Send(connection=number, message=Quiesce(session=1), cause=0),
            RaiseGenerations(slots=[16], generations=[5], cause=0),
        ]

    assert raised is not None
    loop.engine.answers[1] = watch
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    assert decode_from_node(peer.hear()) == Quiesce(session=1)
    assert generation_when_told == [5]


def test_a_failure_costs_one_connection(
    loop: Loop, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: ConnectionId) -> list[Command]:
        raise RuntimeError("a bug")

    loop.engine.answers[1] = fail
    loop.engine.answers[2] = lambda n: [Send(connection=n, message=Quiesce(session=9), cause=0)]
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


def test_generations_that_a_failed_step_raised_are_published(loop: Loop, connect: Connect) -> None:
    def fail(number: ConnectionId) -> list[Command]:
        slots, generations = [SlotId(16), SlotId(48)], [7, 9]
        loop.engine.decided = [RaiseGenerations(slots=slots, generations=generations, cause=0)]
        raise RuntimeError("after the slots were freed, before anybody was told")

    loop.engine.answers[1] = fail
    bad = attached(loop, connect)
    bad.say(Quiet(session=1))
    assert bad.hear() == b""
    loop.settle()
    slots = [SlotId(word * PAGES_PER_GENERATION) for word in range(4)]
    assert [loop.tier.generation(slot) for slot in slots] == [1, 7, 1, 9]


def test_a_node_that_cannot_publish_generations_stops(
    make_attach: MakeAttach, connect: Connect
) -> None:
    loop = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))
    loop.tier.raise_generations([16], [9])
    loop.engine.answers[1] = lambda _: [RaiseGenerations(slots=[16], generations=[8], cause=0)]
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    loop.thread.join(5)
    assert not loop.thread.is_alive()
    assert isinstance(loop.failure, Poisoned)
    assert loop.tier.generation(SlotId(16)) == 9


def poison(loop: Loop) -> list[Command]:
    """Something that the tier refuses."""
    loop.tier.raise_generations([16], [9])
    return [RaiseGenerations(slots=[16], generations=[8], cause=0)]


def test_nor_can_it_go_on_when_a_failed_step_raised_them(
    make_attach: MakeAttach, connect: Connect
) -> None:
    loop = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))

    def fail(number: ConnectionId) -> list[Command]:
        loop.engine.decided = poison(loop)
        raise RuntimeError("a bug")

    loop.engine.answers[1] = fail
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    loop.thread.join(5)
    assert not loop.thread.is_alive()
    assert isinstance(loop.failure, Poisoned)


def test_what_a_failed_step_had_decided_and_cannot_be_is_told(loop: Loop, connect: Connect) -> None:
    deaf = attached(loop, connect)

    def fail(number: ConnectionId) -> list[Command]:
        loop.engine.decided = [
            Send(connection=ConnectionId(1), message=Quiesce(session=k), cause=0)
            for k in range(5000)
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


def test_a_failing_tick_does_not_stop_the_loop(
    loop: Loop, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.attach, "expire", lambda _: 1 / 0)
    peer = attached(loop, connect)
    while loop.driver.counters.failures < 2:
        loop.settle()
    loop.engine.answers[1] = lambda n: [Send(connection=n, message=Quiesce(session=9), cause=0)]
    peer.say(Quiet(session=1))
    assert decode_from_node(peer.hear()) == Quiesce(session=9)


def test_a_peer_that_does_not_read_is_hung_up_and_the_engine_told(
    loop: Loop, connect: Connect
) -> None:
    loop.engine.answers[1] = lambda n: [
        Send(connection=n, message=Quiesce(session=k), cause=0) for k in range(5000)
    ]
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    loop.settle()
    assert loop.engine.kinds()[-1] is Ended
    assert loop.engine.kinds().count(Ended) == 1
    assert loop.attach.counters.ended["overflow"] == 1
    heard = 0
    while peer.hear():
        heard += 1
    assert 0 < heard < 5000


def test_the_engine_hangs_up_and_forgets(loop: Loop, connect: Connect) -> None:
    loop.engine.answers[1] = lambda n: [
        Send(connection=n, message=Quiesce(session=7), cause=0),
        Hangup(connection=n, reason="replaced", cause=0),
        Release(connection=n),
    ]
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    assert decode_from_node(peer.hear()) == Quiesce(session=7)
    assert peer.hear() == b""
    loop.settle()
    assert loop.engine.kinds() == [Received, Received], "it knows, so it is not told"


def test_the_heart_beats_while_idle_and_while_busy(loop: Loop, connect: Connect) -> None:
    loop.engine.answers[1] = lambda _: []
    peer = attached(loop, connect)
    done = threading.Event()

    def flood() -> None:
        while not done.is_set():
            peer.say(Quiet(session=1))

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        beats = set()
        for _ in range(2000):
            loop.settle()
            beats.add(loop.tier.heartbeat_ns)
            if len(beats) == 6:
                break
        done.set()
        flooding.result(10)
    assert len(beats) == 6
    gaps = sorted(beats)
    assert max(b - a for a, b in itertools.pairwise(gaps)) < 250_000_000


def test_the_heart_beats_while_nothing_happens(loop: Loop) -> None:
    pause = threading.Event()
    beats: dict[int, None] = {}
    begin_ns = time.monotonic_ns()
    while len(beats) < 6:
        beats[loop.tier.heartbeat_ns] = None
        pause.wait(0.001)
        assert time.monotonic_ns() - begin_ns < 5_000_000_000
    assert loop.driver.counters.queries == 0
    assert loop.driver.counters.beat_gap_ns_max < 250_000_000


def test_ticks_and_readiness_reach_the_engine(loop: Loop) -> None:
    while not any(isinstance(event, Tick) for event in loop.engine.seen):
        loop.settle()
    assert loop.engine.seen[0] == Ready(4 * SLOT_BYTES_MIN)
    assert sum(isinstance(event, Ready) for event in loop.engine.seen) == 1


# ── queries ──────────────────────────────────────────────────────────────────────────────────────


def test_a_query_runs_on_the_loop(loop: Loop) -> None:
    engine, thread = loop.driver.query(
        lambda engine: (engine, threading.current_thread()), timeout_s=5
    )
    assert engine is cast("Engine", loop.engine)
    assert thread is loop.thread


def test_a_failing_query_fails_for_the_one_who_asked(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.driver.query(lambda _: 1 / 0, timeout_s=5)
    assert loop.driver.query(lambda _: 42, timeout_s=5) == 42
    assert loop.driver.counters.failures == 0


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
    refused, later, seen = poison(loop), [], []

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
        while len(loop.driver._queries) < 1:
            threading.Event().wait(0.001)
        after = pool.submit(lambda: loop.driver.query(later.append, timeout_s=10))
        while len(loop.driver._queries) < 2:
            threading.Event().wait(0.001)
        leave.set()
        holding.result(10)
        with pytest.raises(Poisoned):
            told.result(10)
        with pytest.raises(NodeBusy):
            after.result(10)
    loop.thread.join(5)
    assert isinstance(loop.failure, Poisoned)
    assert (len(seen), later) == (1, []), "nobody is served any more"


def test_clear_adds_up_what_was_forgotten(loop: Loop) -> None:
    assert loop.driver.clear(space=b"s", tenant=None, timeout_s=5) == 42
    assert loop.engine.seen.count(Clear(space=b"s", tenant=None)) == 1


class Files:
    """A file tier that takes note of a clear or not, and is told what to remember."""

    path = "/var/lib/kvstore"
    used_bytes = 0
    breakers = ("closed", "closed")
    takes_note = True

    def __init__(self) -> None:
        self.has_spent_much = False
        self.remembered: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def tell_budget(self, over_budget_blocks: int, now_ns: int) -> None:
        assert now_ns > 0
        self.told.put(over_budget_blocks)

    def tell_table(self, *, left_out_blocks: int, crowded_blocks: int) -> None:
        assert (left_out_blocks, crowded_blocks) == (LEFT_OUT_BLOCKS, 0)

    def should_remember(self, spent_bytes: int) -> bool:
        assert spent_bytes == SPENT_BYTES
        return self.has_spent_much

    def remember(self, learned: str, spent_bytes: int) -> None:
        self.remembered.put((learned, spent_bytes))

    def wait_for_voids(self, timeout_s: float) -> bool:
        assert timeout_s == 5
        return self.takes_note


def test_a_clear_of_which_the_disk_takes_no_note_says_so(loop: Loop) -> None:
    loop.driver._files = files = cast("FileEnd", Files())
    assert loop.driver.clear(space=None, tenant=None, timeout_s=5) == 42
    files.takes_note = False  # type: ignore[attr-defined]
    with pytest.raises(NotDurable, match="42 blocks are forgotten, but the disk of /var/lib/kv"):
        loop.driver.clear(space=None, tenant=None, timeout_s=5)
    loop.driver._files = None


def test_what_a_kill_would_forget_is_remembered_at_once_and_the_rest_at_the_end(
    loop: Loop,
) -> None:
    files = Files()
    loop.engine.counters.file_blocks_over_budget = 3
    loop.driver._files = cast("FileEnd", files)
    assert [files.told.get(timeout=30) for _ in range(3)] == [3, 3, 3], "the loop ticks"
    assert files.remembered.empty()
    files.has_spent_much = True
    assert files.remembered.get(timeout=30) == ("learned", SPENT_BYTES)
    files.has_spent_much = False
    loop.close()
    assert files.remembered.qsize() >= 1, "once more at the end"
    assert loop.driver.counters.failures == 0


def test_clear_goes_on_until_a_slice_is_not_full(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "CLEAR_ROWS_MAX", 42)
    counts = iter([42, 42, 5])
    monkeypatch.setattr(loop.engine, "step", lambda *_: [Cleared(blocks=next(counts))])
    monkeypatch.setattr(loop.driver, "_tick", lambda _: None)
    assert loop.driver.clear(space=None, tenant=None, timeout_s=5) == 89


def test_a_loop_that_is_held_up_is_busy_and_bounded(loop: Loop) -> None:
    entered, leave = threading.Event(), threading.Event()
    ran: list[int] = []

    def run(number: int, _: Engine) -> None:
        ran.append(number)

    def hold(_: Engine) -> None:
        entered.set()
        assert leave.wait(10)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(lambda: loop.driver.query(hold, timeout_s=10))
        assert entered.wait(10)
        for number in range(QUERY_COUNT_MAX):
            with pytest.raises(NodeBusy, match=r"did not answer within 0\.001 s"):
                loop.driver.query(partial(run, number), timeout_s=0.001)
        with pytest.raises(NodeBusy, match="busy: ask again later"):
            loop.driver.query(lambda _: None, timeout_s=10)
        leave.set()
        holding.result(10)
    loop.settle()
    assert ran == [], "who gave up is not served"


def test_a_stopped_loop_answers_nobody(make_attach: MakeAttach) -> None:
    loop = Loop(make_attach, MemoryTier(capacity_bytes=SLOT_BYTES_MIN))
    loop.close()
    with pytest.raises(NodeBusy):
        loop.driver.query(lambda _: None, timeout_s=5)


def test_steps_fall_into_the_right_bucket(loop: Loop) -> None:
    loop.close()
    counters = loop.driver.counters
    for bound in STEP_BUCKETS_NS:
        for duration_ns, shift in ((bound - 1, 0), (bound, 1)):
            counters.step_buckets = [0] * (len(STEP_BUCKETS_NS) + 1)
            loop.driver._measure(duration_ns)
            assert counters.step_buckets.index(1) == STEP_BUCKETS_NS.index(bound) + shift
    loop.driver._measure(10**12)
    assert counters.step_buckets[-1] >= 1


def test_the_beat_is_within_the_protocol() -> None:
    assert driver_module.BEAT_NS <= 50_000_000


def test_a_scheduler_is_served_too(loop: Loop, connect: Connect) -> None:
    peer = connect()
    peer.introduce(hello_scheduler())
    loop.settle()
    assert loop.engine.kinds() == [Received]


def test_after_a_datagram_the_loop_looks_again_before_it_sleeps(
    loop: Loop, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, slept = threading.Event(), threading.Event()
    original = loop.attach.ready

    def ready(timeout_s: float) -> list[tuple[int, int]]:
        if timeout_s == 0:
            looked.set()
        elif looked.is_set():
            slept.set()
        return original(timeout_s)

    monkeypatch.setattr(loop.attach, "ready", ready)
    attached(loop, connect)
    assert looked.wait(5), "it looked again at once"
    assert slept.wait(5), "and slept later"
