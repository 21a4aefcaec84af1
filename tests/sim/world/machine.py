"""One machine of the world: a node that is up or not, its sockets, its part of a disk, its clock.

It is the node's supervisor, too: of a process that ends warm it keeps arena, journal and the pidfds
of the ranks that may still write; the next process goes on with them.

The clock is the machine's: while it is suspended that stands still, or jumps afterwards, as the
clocks of laptops and of virtual machines do. The world's own time is nobody's but the oracle's.

Does not cover: the node process itself (`node`), engines (`engine`), when what happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvstore.engine.engine import Engine
from kvstore.engine.events import Clear, Ended, Event, Exited, Received
from kvstore.errors import ConfigError
from kvstore.types import ConnectionId, SpaceId
from kvstore.wire.messages import (
    HelloRank,
    HelloScheduler,
    Message,
    decode_from_engine,
)
from tests.sim.world.cluster import SimCluster
from tests.sim.world.copies import Violation
from tests.sim.world.disk import SimDisk, empty
from tests.sim.world.ground import Engine as Guest, Ground
from tests.sim.world.node import Kept, SimNode
from tests.sim.world.parts import DISK_CALL_FAULTS, WARM_KILL, SimMemory
from tests.sim.world.peers import SimPeers
from tests.sim.world.sockets import SimSockets

_DIES_AT_START_SHARE: Final = 0.2
"""Of the processes that take over, where they die."""


class Machine:
    """See the module. `World` calls its public methods as events."""

    def __init__(
        self, world: Ground, number: int, folder: Path | None, cluster: SimCluster | None
    ) -> None:
        """Args:
        world: whose it is.
        number: counts from 1.
        folder: of the whole world; None: nobody has a disk.
        cluster: what joins it to the other machines, if anything does.
        """
        self.world, self._cluster = world, cluster
        self.knobs = world.knobs
        self.random = world.random
        self.name = f"m{number}"
        self.directory: Path | None = None
        """Where its node's files are."""
        self._aside: Path | None = None
        """What another node left; the node may be given it."""
        if folder is not None:
            self.directory = folder / "file" / self.name
            self._aside = folder / "aside" / self.name
        self.unsynced: dict[str, list[tuple[int, int]]] = {}
        """Path → (offset, length) of writes since its last sync."""
        self.address = f"10.0.0.{number}:9480"
        """Where other nodes reach its node."""
        self.sockets = SimSockets()
        self._late_exits: list[int] = []
        """Connections of processes that are gone and whose pidfd has not fired yet."""
        self._ranks: dict[int, HelloRank] = {}
        """Whose pidfds are held, until the engine lets them go; by connection."""
        self._gone: set[int] = set()
        """Connections of processes that are gone: their pidfds fire for each node process."""
        self._kept: Kept | None = None
        """Of the process that ended last, for the next one."""
        self._clock_shift_ns = self._clock_floor_ns = 0
        self.suspended_until_ns = 0
        self.stopped_until_ns = 0
        self.disturbed_ns = 0
        """When something last happened that may end a lease before its time."""
        self.was_damaged = False
        """Bytes in its dram changed, in this life of its node or an earlier one."""
        self.doubted: set[tuple[int, int]] = set()
        """Slots and generations of good copies that a rank distrusted."""
        self.promoted = 0
        """Blocks that nodes which are gone read from disk."""
        self.kept = 0
        """Blocks that its node processes took over."""
        self.heartbeat_ns = self.now_ns
        self._incarnation = 0
        self._process: SimNode | None = None
        self.memory = SimMemory(self.knobs.arena_bytes)
        """The arena of the node that was up last."""
        self.start_node()

    # ── what it is ───────────────────────────────────────────────────────────────────────────────

    @property
    def now_ns(self) -> int:
        """Its monotonic clock."""
        return max(self._clock_floor_ns, self.world.now_ns + self._clock_shift_ns)

    @property
    def runs(self) -> bool:
        return self.world.now_ns >= self.suspended_until_ns

    @property
    def node(self) -> Engine:
        """The engine of the node that is up."""
        assert self._process is not None
        return self._process.engine

    @property
    def peers(self) -> SimPeers | None:
        """Of the node, if it is up and has some."""
        return self._process.peers if self._process else None

    @property
    def disk(self) -> SimDisk | None:
        """Of the node, if it is up and has one."""
        return self._process.files.disk if self._process and self._process.files else None

    @property
    def node_up(self) -> bool:
        return self._process is not None

    @property
    def node_runs(self) -> bool:
        return self.node_up and self.runs and self.world.now_ns >= self.stopped_until_ns

    @property
    def moving(self) -> list[tuple[int, int]]:
        """Slots and generations of blocks that its node writes to others, and copies into hbm."""
        if self._process is None:
            return []
        peers, slab = self._process.peers, self.memory.slab
        found = [] if slab is None else slab.under_way()
        for write in peers.pushing.values() if peers is not None else ():
            found += zip(write.slots, write.generations, strict=True)
        return found

    @property
    def engines(self) -> list[Guest]:
        return [engine for engine in self.world.engines if engine.machine is self]

    # ── the node ─────────────────────────────────────────────────────────────────────────────────

    def start_node(self) -> None:
        """A new incarnation; its arena is empty, or what the one before left."""
        self._incarnation += 1
        kept = self._kept
        try:
            node = self._process = SimNode(
                self, self._cluster, self._incarnation, directory=self.directory, kept=kept
            )
        except ConfigError as error:
            self.world.note(f"the node of {self.name} does not start: {str(error)[-60:]}")
            return
        self.memory = node.memory
        if kept is None:
            self._gone.clear()
            self._ranks.clear()
            node.start()
        elif WARM_KILL in self.world.enabled and self.random.random() < _DIES_AT_START_SHARE:
            self.world.strike(WARM_KILL, self)
            node.die_at_start()
            self._end_warm(node)
        else:
            self._kept = None
            node.start()
            self._late_exits = [c for c in self._ranks if c in self._gone]
            self.kept += (blocks := node.engine.counters.blocks_kept)
            self.world.note(f"{self.name} goes on with {blocks} blocks, {len(self._ranks)} writers")

    def let_go(self, connection: int) -> None:
        """The pidfd of a rank that cannot write any more."""
        self._ranks.pop(connection, None)

    def feed(self, events: Sequence[Event]) -> None:
        if self._process is not None:
            self._process.feed(events)

    def node_step(self) -> None:
        """Beat, then read some of what waits: ranks before schedulers, as the driver does."""
        if self._cluster is not None:
            self._cluster.go_on()
        node = self._process
        if node is None or not self.node_runs:
            return
        node.feed(self._read_sockets(node))
        node.read_files()

    def peers_go_on(self) -> bool:
        """What its node has to do with other nodes. False: nothing now."""
        node = self._process
        if node is None or node.peers is None or not self.node_runs:
            return False
        moved = node.peers.loop.go_on()
        return node.read_peers() or moved

    def _read_sockets(self, node: SimNode) -> list[Event]:
        self.heartbeat_ns = self.now_ns
        events: list[Event] = [node.tick()]
        waiting = [(c, s) for c, s in self.sockets.items() if s.to_node or s.node_sees_end]
        waiting.sort(key=lambda item: item[1].rank is None)
        for connection, socket in waiting:
            budget = len(socket.to_node) if socket.rank is not None else self.random.randint(1, 4)
            while socket.to_node and budget:
                budget -= 1
                message = decode_from_engine(socket.to_node.popleft())
                if isinstance(message, HelloRank):
                    self._ranks[connection] = message
                events.append(Received(ConnectionId(connection), message))
            if socket.node_sees_end and not socket.to_node:
                socket.node_sees_end = False
                events.append(Ended(ConnectionId(connection)))
        return events

    def files_go_on(self, turns: int) -> None:
        """The threads of the file tier have some turns."""
        node = self._process
        if node is None or node.files is None or not self.node_runs:
            return
        node.files.run(turns)
        if node.files.disk.is_torn:
            self.kill_node()

    def kill_node(self) -> list[str]:
        """kill -9 of the node, its supervisor too: every socket ends; the old memory lives on in
        its mappings only. Returns the files that it had open."""
        self._kept = None
        if self._process is None:
            return []
        self.disturbed_ns = self.world.now_ns
        left = self.end_process()
        engines = self.engines
        self.sockets.node_died(
            {c for e in engines for c in (e.scheduler_socket, *(r.socket for r in e.ranks))}
        )
        self._late_exits.clear()
        return left

    def end_process(self) -> list[str]:
        """Only the process ends, at once. Returns the files that it had open."""
        node, self._process = self._process, None
        if node is None:
            return []
        self.promoted += node.engine.counters.file_blocks_read
        if node.peers is not None:
            node.peers.end()
        return node.files.kill() if node.files is not None else []

    def restart_node(self) -> None:
        """A new incarnation; old sockets mean nothing to it."""
        for engine in self.engines:
            if engine.scheduler_socket:
                engine.drop_scheduler("node died")
            for rank in engine.ranks:
                if rank.socket and rank is not engine.dead_rank:
                    rank.drop()
        self.sockets.clear()
        self.start_node()

    def kill_node_warm(self) -> bool:
        """kill -9 of the node process alone, in the middle of a step. False: it does nothing."""
        node = self._process
        if node is None or not self.node_runs:
            return False
        node.die(self._read_sockets(node))
        self._end_warm(node)
        return True

    def _end_warm(self, node: SimNode) -> list[str]:
        """The process has ended, its memory is kept. Returns the files that it had open."""
        left = self.kill_node()
        self._kept = Kept(node.memory, node.journal, self._ranks)
        return left

    def upgrade_node(self, *, warm: bool = False) -> bool:
        """An orderly end; the next incarnation finds what was written, and with `warm` what is in
        memory. False: nobody hears it."""
        node = self._process
        if node is None or not self.node_runs:
            return False
        if node.files is not None:
            node.files.close()
        left = self._end_warm(node) if warm else self.kill_node()
        if left and not self.world.enabled.intersection(DISK_CALL_FAULTS):
            raise Violation(f"an orderly end leaves files open: {left}")
        return True

    def clear(self, space: SpaceId | None, tenant: str | None) -> bool:
        """As `kvstore clear`; False: nobody hears it."""
        if self.node_runs:
            self.feed([Clear(space, tenant)])
        return self.node_runs

    def suspend(self, duration_ns: int, *, clock_stands_still: bool) -> None:
        """Nothing of this machine runs for a while."""
        self.suspended_until_ns = self.world.now_ns + duration_ns
        if clock_stands_still:
            self._clock_floor_ns = self.now_ns
            self._clock_shift_ns -= duration_ns

    # ── its part of the disk ─────────────────────────────────────────────────────────────────────

    def empty_directory(self) -> bool:
        """Somebody tidied up; False: there was nothing."""
        assert self.directory is not None
        self.unsynced.clear()
        return empty(self.directory, self.random)

    def swap_directory(self, other: Machine | None = None) -> None:
        """Its node comes back with what another one left. Nobody uses either now."""
        mine, its = self.directory, self._aside if other is None else other.directory
        assert mine is not None
        assert its is not None
        spare = mine.parent.parent / "spare"
        for source, target in ((mine, spare), (its, mine), (spare, its)):
            if source.exists():
                source.rename(target)
        for machine in (self, other or self):
            machine.unsynced.clear()

    # ── sockets, as engines see them ─────────────────────────────────────────────────────────────

    def connect(self, hello: HelloScheduler | HelloRank) -> int:
        """A new connection, or 0 when nobody listens."""
        return self.sockets.connect(hello, self._process.memory) if self._process else 0

    def take_inbox(self, connection: int) -> list[Message | None]:
        """What has arrived, or when the world is slow a part of it."""
        count = None
        if "slow" in self.world.enabled and connection in self.sockets:
            waiting = len(self.sockets[connection].to_engine)
            count = self.random.randint(0, waiting)
            self.world.faults["slow"] += count < waiting
        return self.sockets.take(connection, count)

    # ── processes that end ───────────────────────────────────────────────────────────────────────

    def connections_of(self, engine: str, rank: int | None = None) -> list[int]:
        """Of all processes of an engine, or of one rank: earlier ones too, as long as somebody
        may ask for their pidfds."""
        found = {c: (s.owner, s.rank) for c, s in self.sockets.items()}
        found |= {c: (hello.engine_id, hello.rank) for c, hello in self._ranks.items()}
        return [c for c, (owner, its) in found.items() if owner == engine and rank in (None, its)]

    def kill_processes(self, connections: Iterable[int]) -> None:
        """Sockets end and pidfds fire, in any order; nothing is said any more."""
        events: list[Event] = []
        for connection in connections:
            self._gone.add(connection)
            if connection in self._late_exits:
                continue
            socket = self.sockets.get(connection)
            if socket is not None:
                socket.cut(self.random.randint(0, len(socket.to_node)))
            if self.random.random() < 0.5:
                events.append(Exited(ConnectionId(connection)))
            else:
                self._late_exits.append(connection)
        self.feed(events)

    def end_late_exit(self) -> None:
        """A pidfd that has not fired yet fires, perhaps."""
        if self._late_exits and self.node_runs and self.random.random() < 0.5:
            self.feed([Exited(ConnectionId(self._late_exits.pop(0)))])

    def end_late_exits(self) -> None:
        """All of them."""
        self.feed([Exited(ConnectionId(c)) for c in self._late_exits])
        self._late_exits.clear()
