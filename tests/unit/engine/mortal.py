"""A node process that dies in the middle of a step, at any store to its journal, and comes again.

A tape is the journal's memory; it knows every word that was stored, in order. What the dead process
decided in its last step was never carried out, so nobody heard of it; what the journal holds of it
is the stores up to some point.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvstore.engine.engine import Engine
from kvstore.engine.events import (
    Adopt,
    AdoptedWriter,
    Command,
    Event,
    Exited,
    Ready,
    Received,
    Release,
)
from kvstore.engine.memory.journal import Journal
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.messages import HelloRank
from tests.kit import engine_check
from tests.sim.world.tape import Tape, image, tape
from tests.unit.engine.harness import Node

GENERATIONS_PER_LIFE = 1 << 40


class Died(Exception):
    """The process is no more."""


class MortalNode(Node):
    """See the module. `lives` counts processes; engines' processes keep their numbers."""

    def __init__(self, **config: Any) -> None:
        self.lives = 0
        self.is_dying = False
        self.registry: dict[int, tuple[HelloRank, int]] = {}
        """Ranks of which the supervisor has a pidfd, by connection, and their processes."""
        self.dead: set[int] = set()
        super().__init__(**config)

    def journal(self) -> Journal | None:
        c = self.config
        self.memory = tape(Journal.size_bytes(c.arena_bytes, c.slab_bytes))
        self.quotas = c.quotas
        return Journal.fresh(
            arena_bytes=c.arena_bytes,
            slab_bytes=c.slab_bytes,
            quotas=self.quotas,
            memory=self.memory,
        )

    def step(self, *events: Event) -> list[Command]:
        for event in events:
            match event:
                case Received(connection=connection, message=HelloRank() as hello, process=process):
                    self.registry[connection] = hello, process
                case Exited(connection=connection):
                    self.dead.add(connection)
        if not self.is_dying:
            commands = super().step(*events)
            for command in commands:
                if isinstance(command, Release):
                    self.registry.pop(command.connection, None)
            return commands
        self.before = np.array(self.memory)
        self.memory.stores = []
        self.engine.step(events, self.now_ns)
        self.stores, self.memory.stores = self.memory.stores, None
        raise Died

    def image(self, stores: int) -> Tape:
        """The journal's memory after so many stores of the last step."""
        return image(self.before, self.stores[:stores])

    def reborn(self, memory: Tape) -> Engine:
        """An engine that goes on with this memory, and has not been asked anything."""
        c = self.config
        journal = Journal(memory, arena_bytes=c.arena_bytes, slab_bytes=c.slab_bytes)
        engine = Engine(self.next_config, journal)
        engine.step([Ready(c.arena_bytes), self.adopt(journal)], self.now_ns)
        engine_check.check_engine(engine)
        return engine

    def adopt(self, journal: Journal) -> Adopt:
        writers = tuple(
            AdoptedWriter(ConnectionId(c), *its) for c, its in sorted(self.registry.items())
        )
        return Adopt(journal.examine(quotas=self.quotas, writers=set(self.registry)), writers)

    @property
    def next_config(self) -> Any:
        return msgspec.structs.replace(
            self.config,
            incarnation=self.config.incarnation + 1 + self.lives,
            first_generation=1 + (self.lives + 1) * GENERATIONS_PER_LIFE,
            restarts=self.lives + 1,
        )

    def restart(self, memory: Tape) -> None:
        """Another process goes on with this memory."""
        self.memory = memory
        c, config = self.config, self.next_config
        journal = Journal(memory, arena_bytes=c.arena_bytes, slab_bytes=c.slab_bytes)
        self.engine = Engine(config, journal)
        self.lives += 1
        self.told, self.offered = set(), set()
        words = range(c.arena_bytes // SLOT_BYTES_MIN)
        self.raised = {w * PAGES_PER_GENERATION: config.first_generation for w in words}
        self.step(Ready(c.arena_bytes), self.adopt(journal))
        self.exit(*sorted(self.dead & set(self.registry)))
