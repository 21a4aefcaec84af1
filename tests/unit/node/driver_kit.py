"""A driver in a thread of its own, with an engine that does as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, cast

from kvstore.engine.engine import Engine
from kvstore.engine.events import Clear, Cleared, Command, Event, Ready, Received, Tick
from kvstore.engine.state import Counters
from kvstore.node.driver import Driver, Executor, Poisoned
from kvstore.node.node import MonotonicClock
from kvstore.types import ConnectionId
from kvstore.wire.messages import Quiet
from tests.kit.memory_tier import MemoryTier
from tests.unit.node.conftest import MakeAttach, Peer, hello_rank

NO_ARENA: Final[Any] = SimpleNamespace(arena_fd=0, generation_fd=1)
"""Descriptors that a connection is given in place of an arena's."""

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

    is_behind = False
    files = SimpleNamespace(left_out_count=LEFT_OUT_BLOCKS)

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
            engine or cast("Engine", self.engine),
            Executor(arena=NO_ARENA, tier=tier, attach=self.attach),
            MonotonicClock(),
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


def attached(loop: Loop, connect: Connect) -> Peer:
    peer = connect()
    peer.introduce(hello_rank())
    loop.settle()
    return peer
