"""One node process of the world: the real engine, its arena, its file tier; what the driver does.

Checked all the time: `Engine.check()`; what is known to be bad is not asked for again, neither a
copy in dram that failed its checksum nor a record that the file tier called gone; no shadow check
finds another block.

Does not cover: sockets (`sim_sockets`), the disk (`sim_disk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import (
    Admit,
    Changed,
    Cleared,
    Command,
    Ended,
    Event,
    Exited,
    FileGone,
    Hangup,
    RaiseGenerations,
    ReadFile,
    Ready,
    Received,
    Release,
    Send,
    SwitchedOff,
    Tick,
)
from kvstore.engine.files import FOREIGN_LOCATION
from kvstore.testing.sim_copies import Violation
from kvstore.testing.sim_disk import SimFiles
from kvstore.testing.sim_parts import SimMemory
from kvstore.types import SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.messages import Distrust, LeaseMore, LeaseReply

if TYPE_CHECKING:
    from kvstore.testing.sim_machine import Machine


class SimNode:
    """From its start to its death."""

    def __init__(self, machine: Machine, *, incarnation: int, directory: Path | None) -> None:
        """Raises ConfigError: its directory cannot be used."""
        self._machine = machine
        knobs = machine.knobs
        self.memory = SimMemory(knobs.arena_bytes)
        self._ended: set[int] = set()
        """Connections whose last words do not count any more."""
        self._bad_copies: set[tuple[int, int]] = set()
        self._bad_places: set[int] = set()
        self._steps = 0
        # A check's cost grows with the arena, that of a step does not.
        self._check_interval = 8 + knobs.arena_slots // 8
        self.files = SimFiles(machine, directory, self.memory) if directory else None
        self.engine = Engine(
            EngineConfig(
                incarnation=incarnation,
                arena_bytes=knobs.arena_bytes,
                slab_bytes=max(SLOT_BYTES_MIN * 2, knobs.arena_bytes // 4),
                generation_bytes=8192,
                block_count_max=knobs.arena_slots + (knobs.disk_rows if directory else 512),
                file_bytes=knobs.disk_bytes if directory else 0,
                lease_ttl_ms=knobs.ttl_ms,
                credit_share=knobs.credit_share,
            )
        )
        self.feed([Ready(knobs.arena_bytes)])

    def tick(self) -> Tick:
        return Tick(self.files.used_bytes if self.files else 0)

    def read_files(self) -> None:
        """Hear what the file tier says."""
        if self.files is not None:
            self.feed(self.files.read())

    def feed(self, events: Sequence[Event]) -> None:
        """As the driver: events in, commands carried out in order, until nothing follows."""
        while events:
            commands = self.engine.step(events, self._machine.now_ns)
            self._learn(events, commands)
            events = [e for command in commands for e in self._carry_out(command)]
            self._steps += 1
            if self._steps % self._check_interval == 0:
                self.engine.check()

    def _carry_out(self, command: Command) -> list[Event]:
        sockets = self._machine.sockets
        match command:
            case RaiseGenerations(slots=slots, generations=generations):
                self.memory.tier.raise_generations(slots.tolist(), generations.tolist())
            case Send(connection=connection, message=message):
                if isinstance(message, LeaseReply | LeaseMore):
                    self._check_lent(message)
                sockets.to_engine(connection, message)
            case Admit(connection=connection, welcome=welcome):
                sockets.to_engine(connection, welcome)
            case Hangup(connection=connection):
                if sockets.end(connection):
                    return [Ended(ConnectionId(connection))]
            case Release() | Cleared() | Changed():
                pass
            case SwitchedOff():
                raise Violation("a space was switched off where each key has one block")
            case _:
                assert self.files is not None, "a file command without a file tier"
                if isinstance(command, ReadFile):
                    self._check_asked(command)
                return self.files.carry_out(command)
        return []

    # ── what is bad dies once ────────────────────────────────────────────────────────────────────

    def _learn(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self._ended.update(c.connection for c in commands if isinstance(c, Hangup))
        for event in events:
            match event:
                case Ended(connection=connection) | Exited(connection=connection):
                    self._ended.add(connection)
                case Received(connection=connection, message=Distrust() as bad):
                    if connection not in self._ended:
                        self._bad_copies |= _copies(bad.slots, bad.generations)
                case FileGone(locations=locations):
                    self._bad_places.update(np.frombuffer(locations, "<u8").tolist())
                case _:
                    pass

    def _check_lent(self, message: LeaseReply | LeaseMore) -> None:
        if self._bad_copies & _copies(message.slots, message.generations):
            raise Violation("a copy that failed its checksum is lent again")

    def _check_asked(self, command: ReadFile) -> None:
        places = np.frombuffer(command.locations, "<u8")
        self._machine.world.foreign_blocks += int((places >= FOREIGN_LOCATION).sum())
        if self._bad_places.intersection(places.tolist()):
            raise Violation("a record that is gone is read again")


def _copies(slots: bytes, generations: bytes) -> set[tuple[int, int]]:
    numbers = np.frombuffer(slots, "<u4").tolist()
    return set(zip(numbers, np.frombuffer(generations, "<u8").tolist(), strict=True))
