"""Turns of the loop: steps cut by time, a heart that beats, shares by user and process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.events import Command, Ended, Event, Received, Tick
from kvstore.engine.state import Counters
from kvstore.net.process import process_of
from kvstore.node import attach as attach_module
from kvstore.node.attach import Attach
from kvstore.node.driver import BEAT_NS, KIND_NS, STEP_NS, Driver, Executor
from kvstore.node.turns import Party, TurnKind, Turns, TurnSource
from kvstore.types import ConnectionId
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.messages import LeaseAsk, Quiet
from tests.kit.hello import scheduler_hello
from tests.kit.memory_tier import MemoryTier
from tests.kit.set_clock import SetClock
from tests.unit.node.conftest import MakeAttach, Peer, all_events, hello_rank, rounds
from tests.unit.node.driver_kit import NO_ARENA

Connect = Callable[[], Peer]
LATE_NS = 50 * NS_PER_MS


class Beats:
    """A tier of which only the heart is looked at."""

    ready_bytes = capacity_bytes = 0

    def __init__(self) -> None:
        self.at_ns: list[int] = []

    def beat(self, now_ns: int) -> None:
        self.at_ns.append(now_ns)

    def gaps_ns(self) -> list[int]:
        return [b - a for a, b in zip(self.at_ns, self.at_ns[1:], strict=False)]


class Costs:
    """An engine whose events take as long as their `lease` says, in µs."""

    behind = 0
    """Steps that it asks for though nothing happens."""

    @property
    def is_behind(self) -> bool:
        return self.behind > 0

    def __init__(self, clock: SetClock) -> None:
        self.counters, self._clock = Counters(), clock
        self.done: list[tuple[int, int]] = []
        """(connection, when it was done) of every lookup."""
        self.longest_step_ns = 0

    def step(self, events: Iterator[Event], now_ns: int) -> list[Command]:
        begin_ns = self._clock.ns
        self.behind -= 1
        for event in events:
            if isinstance(event, Received):
                message = event.message
                assert isinstance(message, LeaseAsk)
                self._clock.ns += message.lease * 1000
                self.done.append((event.connection, self._clock.ns))
        self.longest_step_ns = max(self.longest_step_ns, self._clock.ns - begin_ns)
        return []

    def salvage(self) -> list[Command]:
        return []


class Sockets:
    """In place of `Attach`: queues that are read like sockets, and fill as a test says."""

    def __init__(self, clock: SetClock) -> None:
        self.turns, self._clock = Turns(), clock
        self.sources: dict[int, TurnSource] = {}
        self.queues: dict[int, deque[int]] = {}
        self.refill: Callable[[], None] = lambda: None

    def add(self, party: Party, turn: TurnKind = TurnKind.SCHEDULER) -> int:
        fd = 1000 + len(self.queues)
        self.queues[fd] = deque()
        count = 1 if turn == TurnKind.SCHEDULER else 1024
        number = ConnectionId(fd)
        self.sources[fd] = TurnSource(turn, number, lambda _: self._read(fd, count), party)
        self.turns.join(party)
        return fd

    def _read(self, fd: int, count: int) -> Iterator[Event]:
        while self.queues[fd] and count:
            count -= 1
            yield Received(ConnectionId(fd), LeaseAsk(self.queues[fd].popleft(), b""))

    def watch(self, fd: int, source: TurnSource) -> None:
        self.sources[fd] = source

    def ready(self, timeout_s: float) -> list[tuple[int, int]]:
        self.refill()
        found = [(fd, 1) for fd, queue in self.queues.items() if queue]
        if not found:
            self._clock.ns += max(1000, int(timeout_s * 1e9))
        self.turns.order(found, self.sources)
        return found

    def source(self, fd: int) -> TurnSource | None:
        return self.sources.get(fd)

    def owner(self, fd: int) -> ConnectionId | None:
        return self.sources[fd].connection

    def read(self, fd: int, mask: int) -> Any:
        return self.sources[fd].read(mask)

    def charge(self, fd: int, party: Party, duration_ns: int) -> None:
        self.turns.charge(fd, party, duration_ns)

    def expire(self, _now_ns: int) -> None:
        self.turns.tick()


class World:
    """A driver over queues, on a clock of its own."""

    def __init__(self) -> None:
        self.clock, self.tier = SetClock(), Beats()
        self.engine, self.sockets = Costs(self.clock), Sockets(self.clock)
        attach, tier = cast("Attach", self.sockets), cast("MemoryTier", self.tier)
        self.driver = Driver(
            cast("Engine", self.engine),
            Executor(arena=NO_ARENA, tier=tier, attach=attach),
            self.clock,
        )

    def run(self, duration_ns: int, refill: Callable[[], None]) -> None:
        end_ns = self.clock.ns + duration_ns

        def fill() -> None:
            refill()
            if self.clock.ns >= end_ns:
                self.driver.stop()

        self.sockets.refill = fill
        self.driver.run()
        self.driver._queries.close()


@pytest.mark.parametrize("seed", range(20))
def test_the_heart_beats_in_time_whatever_arrives(seed: int) -> None:
    """Of events that take up to 25 ms each, from any number of ranks and schedulers."""
    random_, world = random.Random(seed), World()
    kinds = (TurnKind.RANK, TurnKind.SCHEDULER)
    for _ in range(random_.randrange(1, 40)):
        world.sockets.add(Party(0, random_.randrange(3)), random_.choice(kinds))
    most_us = random_.choice([100, 1000, 25_000])

    def flood() -> None:
        for queue in world.sockets.queues.values():
            while len(queue) < 300:
                queue.append(random_.randrange(most_us // 2, most_us))

    world.run(NS_PER_S // 2, flood)
    assert max(world.tier.gaps_ns()) <= BEAT_NS + most_us * 1000 <= LATE_NS
    assert world.engine.longest_step_ns <= STEP_NS + most_us * 1000


def test_an_engine_that_is_behind_is_stepped_without_a_wait() -> None:
    world = World()
    world.engine.behind = 1000
    begin_ns = world.clock.ns
    took_ns: list[int] = []

    def look() -> None:
        if world.engine.behind <= 0 and not took_ns:
            took_ns.append(world.clock.ns - begin_ns)

    world.run(NS_PER_S, look)
    assert took_ns[0] < 2 * BEAT_NS, "a tick each 100 ms would take 100 s"


@pytest.mark.parametrize("others", [Party(0, 2), Party(7, 2)], ids=["its-user", "another-user"])
def test_a_process_that_plays_a_hundred_engines_makes_no_lookup_late(others: Party) -> None:
    world = World()
    honest = world.sockets.add(Party(0, 1))
    crowd = [world.sockets.add(others) for _ in range(100)]
    asked: list[int] = []

    def ask() -> None:
        for fd in crowd:
            if not world.sockets.queues[fd]:
                world.sockets.queues[fd].append(1000)
        if not world.sockets.queues[honest] and world.clock.ns >= 10**9 + len(asked) * 10**8:
            asked.append(world.clock.ns)
            world.sockets.queues[honest].append(500)

    world.run(3 * 10**9, ask)
    done = [at for number, at in world.engine.done if number == honest]
    waited = [at - since for since, at in zip(asked, done, strict=False)]
    assert len(waited) >= 29
    assert max(waited) <= KIND_NS + 2 * NS_PER_MS, "before: all hundred first, 100 ms"
    served = {number for number, _ in world.engine.done}
    assert served == {honest, *crowd}, "its sockets take turns, too"


def test_a_process_that_comes_anew_is_no_way_to_the_front() -> None:
    turns, sources = Turns(), {}
    for fd, party in {3: Party(0, 1), 4: Party(0, 2), 5: Party(0, 3)}.items():
        sources[fd] = TurnSource(TurnKind.SCHEDULER, ConnectionId(fd), lambda _: [], party)
    turns.join(Party(0, 1))
    turns.join(Party(0, 2))
    turns.charge(4, Party(0, 2), 10**7)
    turns.join(Party(0, 3))
    found = [(5, 1), (4, 1), (3, 1)]
    turns.order(found, sources)
    assert found[0] == (3, 1)
    for _ in range(40):
        turns.tick()
    assert not turns._of_party, "nothing is kept of who asks nothing"


def test_processes_of_other_namespaces_are_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fds = [os.pidfd_open(pid) for pid in (os.getpid(), child.pid, child.pid)]
    try:
        mine, its, again = (process_of(fd, number) for number, fd in enumerate(fds))
        is_told = os.fstat(fds[0]).st_ino != os.fstat(fds[1]).st_ino
        assert (its == again) == is_told, "before Linux 6.9 a descriptor says no more"
        assert mine != its
        assert (process_of(fds[0], 7) == mine) == is_told, "of this process, too"
        assert max(mine, its) < 0, "no pid"
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("pid", [0, 4711])
def test_time_of_a_process_whose_pid_is_not_seen_is_its_own(
    make_attach: MakeAttach, connect: Connect, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    monkeypatch.setattr(attach_module, "peer_of", lambda _: (pid, os.geteuid()))
    monkeypatch.setattr(attach_module, "vouches_for", lambda *_: True)
    attach = make_attach()
    connect().introduce(hello_rank())
    all_events(attach)
    parties = {
        source.party.process
        for source in attach._sources.values()
        if source.turn in (TurnKind.RANK, TurnKind.PROCESS)
    }
    (number,) = attach._connections
    pidfd = attach._connections[number].pidfd
    assert pidfd is not None
    assert parties == {pid or process_of(pidfd, number)}


def test_a_scheduler_waits_while_its_ranks_words_are_not_read_to_the_end(
    make_attach: MakeAttach, connect: Connect
) -> None:
    """A step that was cut between two seals: the lookup sent behind them must see both."""
    attach = make_attach()
    scheduler, rank, other = connect(), connect(), connect()
    scheduler.introduce(scheduler_hello())
    rank.introduce(hello_rank())
    other.introduce(scheduler_hello("other"))
    rounds(attach, 2)
    for session in (1, 2):
        rank.say(Quiet(session))
    scheduler.say(LeaseAsk(lease=1, keys=b""))
    other.say(LeaseAsk(lease=2, keys=b""))
    found: list[Event] = []
    for fd, mask in attach.ready(0):
        source = attach.source(fd)
        assert source is not None
        events = iter(source.read(mask))
        found += [next(events)] if source.turn == TurnKind.RANK else list(events)
    later = rounds(attach)[0]
    said = [[e.message for e in part if isinstance(e, Received)] for part in (found, later)]
    assert said == [[Quiet(1), LeaseAsk(2, b"")], [Quiet(2), LeaseAsk(1, b"")]]
    assert not [event for event in found + later if isinstance(event, Ended | Tick)]
