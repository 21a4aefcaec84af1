"""The loop with a scripted engine: order of effects, heartbeat, queries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast
from unittest.mock import Mock, call, patch

import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.events import Clear, Cleared, Command, Hangup, Ready, Received, Release, Send
from kvstore.errors import NodeBusy
from kvstore.node import driver as driver_module
from kvstore.node.driver import QUERY_COUNT_MAX, DriverCounters, NotDurable
from kvstore.node.files import FileEnd
from kvstore.ports import FileStore
from kvstore.tier_events import RaiseGenerations, Shown
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Tier
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.messages import Quiesce, Quiet, decode_from_node
from tests.integration.node.conftest import eventually
from tests.kit.memory_tier import MemoryTier
from tests.unit.node.conftest import MakeAttach
from tests.unit.node.driver_kit import LEFT_OUT_BLOCKS, SPENT_BYTES, Connect, Loop, attached


@pytest.fixture
def loop(make_attach: MakeAttach) -> Iterator[Loop]:
    made = Loop(make_attach, MemoryTier(capacity_bytes=4 * SLOT_BYTES_MIN))
    yield made
    made.close()


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
            Send(connection=number, message=Quiesce(session=1)),
            RaiseGenerations(slots=[16], generations=[5]),
        ]

    assert raised is not None
    loop.engine.answers[1] = watch
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    assert decode_from_node(peer.hear()) == Quiesce(session=1)
    assert generation_when_told == [5]


def test_each_tier_gets_its_generations_and_places_in_their_order(loop: Loop) -> None:
    calls = Mock()
    loop.driver.executor.hbm = calls.hbm
    with patch.object(loop.tier, "raise_generations", calls.dram):
        shown, dram = Shown(slots=[16], targets=[32]), RaiseGenerations([16], [5])
        loop.driver.executor.carry_out([shown, dram, RaiseGenerations([32], [7], Tier.HBM), shown])
    show = call.hbm.show([16], [32])
    raised = [call.dram([16], [5]), call.hbm.raise_generations([32], [7])]
    assert calls.mock_calls == [show, *raised, show]


def test_pages_that_arrive_while_it_runs_are_ready_with_the_next_tick(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTier, "ready_bytes", 3 * SLOT_BYTES_MIN)
    assert eventually(lambda: Ready(3 * SLOT_BYTES_MIN) in loop.engine.seen)


def test_the_engine_hangs_up_and_forgets(loop: Loop, connect: Connect) -> None:
    loop.engine.answers[1] = lambda n: [
        Send(connection=n, message=Quiesce(session=7)),
        Hangup(connection=n, reason="replaced"),
        Release(connection=n),
    ]
    peer = attached(loop, connect)
    peer.say(Quiet(session=1))
    assert decode_from_node(peer.hear()) == Quiesce(session=7)
    assert peer.hear() == b""
    loop.settle()
    assert loop.engine.kinds() == [Received, Received], "it knows, so it is not told"


# ── queries ──────────────────────────────────────────────────────────────────────────────────────


def test_a_failing_query_fails_for_the_one_who_asked(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.driver.query(lambda _: 1 / 0, timeout_s=5)
    assert loop.driver.query(lambda _: 42, timeout_s=5) == 42
    assert loop.driver.counters.failures == 0


class Files(FileEnd):
    """A file tier that takes note of a clear or not, and is told what to remember."""

    path = "/var/lib/kvstore"
    taken_bytes = 0
    breakers = ("closed", "closed")
    takes_note = True

    def __init__(self) -> None:
        self.tier, self.has_spent_much, self._remember_ns = cast("FileStore", self), False, 0
        self.remembered: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def tell_budget(self, over_budget_blocks: int, now_ns: int) -> None:
        assert now_ns > 0
        self.told.put(over_budget_blocks)

    def tell_table(self, *, left_out_blocks: int, crowded_blocks: int) -> None:
        assert (left_out_blocks, crowded_blocks) == (LEFT_OUT_BLOCKS, 0)

    def should_remember(self, learned: Any, spent_bytes: int) -> bool:
        assert (learned, spent_bytes) == ("learned", SPENT_BYTES)
        return self.has_spent_much

    def remember(self, learned: Any, spent_bytes: int) -> None:
        self.remembered.put((learned, spent_bytes))

    def wait_for_voids(self, timeout_s: float) -> bool:
        assert timeout_s == 5
        return self.takes_note


def test_clear_adds_up_what_was_forgotten_and_says_that_the_disk_takes_no_note(
    loop: Loop,
) -> None:
    assert loop.driver.clear(space=b"s", tenant=None, timeout_s=5) == 42
    assert loop.engine.seen.count(Clear(space=b"s", tenant=None)) == 1
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


def test_the_longest_gap_between_heartbeats_is_that_of_the_last_minute() -> None:
    counters, now_ns = DriverCounters(), 10**12
    assert counters.beat_gap_ns_max == 0
    for gap_ms in (20, 400, 30):
        counters.beat(gap_ms * NS_PER_MS, now_ns)
        now_ns += NS_PER_S
    assert counters.beat_gap_ns_max == 400 * NS_PER_MS
    for _ in range(54):
        counters.beat(20 * NS_PER_MS, now_ns)
        now_ns += NS_PER_S
    assert counters.beat_gap_ns_max == 400 * NS_PER_MS, "less than a minute ago"
    for _ in range(10):
        counters.beat(20 * NS_PER_MS, now_ns)
        now_ns += NS_PER_S
    assert counters.beat_gap_ns_max == 20 * NS_PER_MS
