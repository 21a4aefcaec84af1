"""One node process of the world: the real engine, its arena, its file tier; what the driver does.

Checked all the time: `kit.engine_check`; what is known to be bad is not asked for again, neither a
copy in dram that failed its checksum nor a record that the file tier called gone; no shadow check
finds another block.

A process may die in the middle of a step: of its stores to the journal, and of the commands that
they lead to, a part is done. The next one begins with what that left (`Kept`), or with nothing.

Does not cover: sockets (`sockets`), the disk (`disk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import (
    Admit,
    Adopt,
    AdoptedWriter,
    Changed,
    Cleared,
    Command,
    Ended,
    Event,
    Exited,
    Follow,
    Hangup,
    OffersUntold,
    PeerCommand,
    Ready,
    Received,
    Release,
    Send,
    StoryTold,
    SwitchedOff,
    Tick,
    Unfollow,
)
from kvstore.engine.memory.journal import Journal
from kvstore.engine.moves.files import FOREIGN_LOCATION
from kvstore.tier_events import FileGone, Promote, RaiseGenerations, ReadFile, Shown
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Tier
from kvstore.wire.feed import BlocksChanged
from kvstore.wire.messages import Distrust, HelloRank, LeaseMore, LeaseReply
from kvstore.wire.space import Slab
from tests.kit import engine_check
from tests.sim.world.cluster import SimCluster
from tests.sim.world.copies import Violation
from tests.sim.world.disk import SimFiles
from tests.sim.world.ground import Machine
from tests.sim.world.guarantees import Accounts, Guarantees
from tests.sim.world.parts import WARM_KILL, Knobs, SimMemory
from tests.sim.world.peers import SimPeers
from tests.sim.world.slab import new_slab
from tests.sim.world.tape import Tape, image, tape

_GENERATIONS_PER_LIFE = 1 << 40


class Kept(NamedTuple):
    """What the supervisor has of a process that ended."""

    memory: SimMemory
    journal: NDArray[np.uint64]
    ranks: dict[int, HelloRank]
    """Whose pidfds it holds, by connection."""


class SimNode:
    """From its start to its death."""

    def __init__(
        self,
        machine: Machine,
        cluster: SimCluster | None,
        incarnation: int,
        *,
        directory: Path | None,
        kept: Kept | None,
    ) -> None:
        """Nothing is served before `start`.

        Raises:
            ConfigError: its directory cannot be used.
        """
        self._machine = machine
        knobs = machine.knobs
        first_generation = 1
        if kept is None:
            self.memory: SimMemory = SimMemory(knobs.arena_bytes)
        else:
            first_generation += incarnation * _GENERATIONS_PER_LIFE
            self.memory = kept.memory.taken_over(first_generation)
        slab = self.memory.slab = new_slab(knobs, self.memory, machine.random)
        self._ended: set[int] = set()
        """Connections whose last words do not count any more."""
        self._bad_copies: set[tuple[int, int]] = set()
        self._bad_places: set[int] = set()
        self._steps = 0
        # A check's cost grows with the arena, that of a step does not.
        self._check_interval = 8 + knobs.arena_slots // 8
        self.files = SimFiles(machine, directory, self.memory) if directory else None
        config = _config(
            knobs,
            machine.name,
            incarnation,
            first_generation,
            has_disk=directory is not None,
            is_clustered=cluster is not None,
            is_restart=kept is not None,
            slab=slab.slab if slab else None,
        )
        kept_bytes = config.arena_bytes - config.landing_bytes
        self._guarantees = Guarantees(knobs.quotas, arena_bytes=kept_bytes)
        self._accounts = Accounts()
        self._first_events: list[Event] = [Ready(knobs.arena_bytes)]
        self.journal = self._new_journal(config) if kept is None else kept.journal
        journal = Journal(
            self.journal, arena_bytes=config.arena_bytes, slab_bytes=config.slab_bytes
        )
        if kept is not None:
            found = journal.examine(quotas=knobs.quotas, writers=set(kept.ranks))
            writers = [AdoptedWriter(ConnectionId(c), rank) for c, rank in kept.ranks.items()]
            self._first_events.append(Adopt(found, tuple(writers)))
        self.engine = Engine(config, journal)
        self.peers: SimPeers | None = None
        if cluster is not None:
            offered = self.engine.offered
            self.peers = SimPeers(machine, cluster, incarnation, self.memory, offered)

    def _new_journal(self, config: EngineConfig) -> NDArray[np.uint64]:
        size_bytes = Journal.size_bytes(config.arena_bytes, config.slab_bytes)
        dies = WARM_KILL in self._machine.world.enabled
        memory = tape(size_bytes) if dies else np.zeros(size_bytes // 8, np.uint64)
        Journal.fresh(
            arena_bytes=config.arena_bytes,
            slab_bytes=config.slab_bytes,
            quotas=config.quotas,
            memory=memory,
        )
        return memory

    def start(self) -> None:
        """Take over what there is, and serve."""
        self.feed(self._first_events)
        engine_check.check_engine(self.engine)
        if self.peers is not None:
            self.peers.start()

    def die_at_start(self) -> None:
        """The same as `die`, before anything is served."""
        self.die(self._first_events)

    def die(self, events: Sequence[Event]) -> None:
        """In the step that takes these events, anywhere. `journal` is what is left."""
        recorded, world = self.journal, self._machine.world
        assert isinstance(recorded, Tape), "nobody remembers its stores"
        before = np.array(recorded)
        recorded.stores = []
        commands = self.engine.step(events, self._machine.now_ns)
        stores, recorded.stores = recorded.stores, None
        done = world.random.randint(0, len(stores) + len(commands))
        for command in commands[: max(0, done - len(stores))]:
            self._carry_out(command)
        self.journal = image(before, stores[:done])
        world.note(
            f"its process dies after {done} of {len(stores)} stores and {len(commands)} commands"
        )

    def tick(self) -> Tick:
        return Tick(self.files.used_bytes if self.files else 0)

    def read_files(self) -> None:
        """Hear what the file tier says, and hbm."""
        if self.memory.slab is not None:
            self.feed(self.memory.slab.end_one())
        if self.files is not None:
            self.feed(self.files.read())

    def read_peers(self) -> bool:
        """Hear what comes from other nodes. False: nothing."""
        events = self.peers.read() if self.peers is not None else []
        self.feed(events)
        return bool(events)

    def feed(self, events: Sequence[Event]) -> None:
        """As the driver: events in, commands carried out in order, until nothing follows."""
        while events:
            before = self._guarantees.look(self.engine)
            commands = self.engine.step(events, self._machine.now_ns)
            self._guarantees.check(self.engine, before, events, commands)
            self._accounts.check(self.engine)
            self._learn(events, commands)
            events = [e for command in commands for e in self._carry_out(command)]
            if self.memory.slab is not None:
                self.memory.slab.check()
            self._steps += 1
            if self._steps % self._check_interval == 0:
                engine_check.check_engine(self.engine)

    def _carry_out(self, command: Command) -> Sequence[Event]:
        sockets = self._machine.sockets
        match command:
            case Shown() | Promote() | RaiseGenerations(tier=Tier.HBM):
                assert self.memory.slab is not None, "a command for hbm, of which there is none"
                self.memory.slab.take(command)
            case RaiseGenerations(slots=slots, generations=generations):
                self.memory.tier.raise_generations(slots.tolist(), generations.tolist())
                if self.memory.slab is not None:
                    self.memory.slab.has_left(slots.tolist())
            case Send(connection=connection, message=message):
                if isinstance(message, LeaseReply | LeaseMore):
                    self._check_served(message)
                sockets.to_engine(connection, message)
            case Admit(connection=connection, welcome=welcome):
                sockets.to_engine(connection, welcome)
            case Hangup(connection=connection):
                if sockets.end(connection):
                    return [Ended(ConnectionId(connection))]
            case Release(connection=connection):
                self._machine.let_go(connection)
            case Cleared() | Changed():
                pass
            case SwitchedOff():
                raise Violation("a space was switched off where each key has one block")
            case _ if isinstance(command, BlocksChanged | OffersUntold | PeerCommand):
                assert self.peers is not None, "a peer command without peers"
                self.peers.take(command)
            case Follow() | Unfollow() | StoryTold():
                raise AssertionError("a command that nobody asked for")
            case _:
                assert self.files is not None, "a file command without a disk tier"
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
                        named = _copies(bad.slots, bad.generations)
                        self._bad_copies |= named - self._machine.doubted
                case FileGone(locations=locations):
                    self._bad_places.update(np.frombuffer(locations, "<u8").tolist())
                case _:
                    pass

    def _check_served(self, message: LeaseReply | LeaseMore) -> None:
        if self._bad_copies & _copies(message.slots, message.generations):
            raise Violation("a copy that failed its checksum is served again")

    def _check_asked(self, command: ReadFile) -> None:
        places = np.frombuffer(command.locations, "<u8")
        self._machine.world.foreign_blocks += int((places >= FOREIGN_LOCATION).sum())
        if self._bad_places.intersection(places.tolist()):
            raise Violation("a record that is gone is read again")


def _config(
    knobs: Knobs,
    name: str,
    incarnation: int,
    first_generation: int,
    *,
    has_disk: bool,
    is_clustered: bool,
    is_restart: bool,
    slab: Slab | None,
) -> EngineConfig:
    return EngineConfig(
        incarnation=incarnation,
        arena_bytes=knobs.arena_bytes,
        slab_bytes=knobs.slab_bytes,
        node=name,
        landing_bytes=6 * SLOT_BYTES_MIN if knobs.has_landing else 0,  # soon used again
        first_generation=first_generation,
        restarts=int(is_restart),
        generation_bytes=8192,
        block_count_max=knobs.arena_slots + (knobs.disk_rows if has_disk else 512),
        hbm=slab,
        file_bytes=knobs.disk_bytes if has_disk else 0,
        lease_ttl_ms=knobs.ttl_ms,
        credit_share=knobs.credit_share,
        tell_offers=is_clustered,
        fetches=is_clustered,
        quotas=knobs.quotas,
    )


def _copies(slots: bytes, generations: bytes) -> set[tuple[int, int]]:
    numbers = np.frombuffer(slots, "<u4").tolist()
    return set(zip(numbers, np.frombuffer(generations, "<u8").tolist(), strict=True))
