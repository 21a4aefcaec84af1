"""The ground that the parts of a world stand on: time, chance, what may go wrong, the story.

A part is given its owner, whose module imports the part's. What parts may ask of those above them
is a role here, so that imports have no circle (`tests/style/test_imports.py`).

Does not cover: who lives in the world (`stage`), what happens (`world`).
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Protocol

from kvstore.client.core.rank import RankCore
from kvstore.engine.engine import Engine as NodeEngine
from kvstore.types import Shard, SpaceId
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import HelloRank, HelloScheduler, Message
from tests.sim.world.groups import Kind
from tests.sim.world.loop import SimLoop
from tests.sim.world.parts import (
    CLUSTER_FAULTS,
    DISK_FAULTS,
    HARMLESS,
    SELF_STRIKING,
    Knobs,
    SimMemory,
    Words,
    draw_faults,
    draw_knobs,
    key_chains,
    sim_space,
)
from tests.sim.world.sockets import SimSockets

STORY_LINES = 60
FAULT_SHARE = 0.25


class Ground:
    """What a world is without its inhabitants. Deterministic in the arguments of `World`."""

    machines: Sequence[Machine]
    engines: Sequence[Engine]

    def __init__(
        self,
        seed: int,
        *,
        knobs: Knobs | None,
        faults: Collection[str] | None,
        always: Collection[str],
        machine_count: int,
    ) -> None:
        """As `World`."""
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ns = 10**12
        self.story: deque[str] = deque(maxlen=STORY_LINES)
        self.faults: Counter[str] = Counter()
        self.words = Words()
        self.opened_by: dict[int, object] = {}
        """Who opened a descriptor last, of those that are files of a disk."""
        self.foreign_blocks = 0
        """That nodes asked their disks for, and that another one wrote."""
        self.slab_blocks = 0
        """Loaded from the memory of a GPU."""
        self.fetched_blocks = 0
        self.pushed_blocks = 0
        """That came from other nodes."""
        self._trace = hashlib.sha256()
        self._events = 0
        self.fault_rate = self.random.choice((0.004, 0.012, 0.04))
        drawn = draw_faults(self.random, seed, share=FAULT_SHARE)
        self.enabled = (drawn if faults is None else drawn & set(faults)) | set(always)
        drawn_knobs = draw_knobs(self.random, seed, machines=machine_count)
        self.knobs = knobs or drawn_knobs
        if not self.knobs.has_disk:
            self.enabled -= set(DISK_FAULTS)
        if not self.knobs.index_replicas:
            self.enabled -= set(CLUSTER_FAULTS)
        self._faults_to_do = sorted(self.enabled.difference(SELF_STRIKING))
        self.spaces = [sim_space("model-a"), sim_space("model-b")]
        # Where nodes fetch from each other, there must be enough that only one of them has.
        self.chains = key_chains(self.random, 24 if self.knobs.index_replicas else 0)

    def pass_time(self) -> None:
        """While the world itself waits."""
        self.now_ns += 5 * NS_PER_MS

    def strike(self, name: str, machine: Machine) -> None:
        """Something went wrong by itself: it is counted and told."""
        self.note(f"fault {name} on {machine.name}")
        self._count(name, machine)

    def _count(self, name: str, machine: Machine) -> None:
        self.faults[name] += 1
        if name not in HARMLESS:
            machine.disturbed_ns = self.now_ns

    def is_calm(self, engine: Engine, *, since_ns: int) -> bool:
        """Nothing happened since then that could end a lease before its time."""
        machine = engine.machine
        return (
            since_ns > max(machine.disturbed_ns, engine.disturbed_ns)
            and self.now_ns - since_ns < self.knobs.ttl_ms * NS_PER_MS
            and not machine.memory.is_damaged  # what changed stays so
        )

    def note(self, line: str) -> None:
        """A line of the story; every one goes into the trace hash."""
        self._events += 1
        self._trace.update(line.encode())
        self.story.append(f"{self.now_ns / 1e6 - 1e6:9.1f} ms  {line}")


# ── roles ────────────────────────────────────────────────────────────────────────────────────────


class Rank(Protocol):
    """`rank.SimRank`, as its copies and its machine see it."""

    world: Ground
    name: str
    core: RankCore
    memory: SimMemory | None
    block_bytes: int
    pool: list[bytes | None]
    socket: int
    disturbed_ns: int
    stored_blocks: int

    @property
    def machine(self) -> Machine: ...
    @property
    def failure(self) -> str: ...
    def drop(self) -> None: ...


class Engine(Protocol):
    """`engine.SimEngine`, as its ranks and its machine see it."""

    world: Ground
    name: str
    tenant: str
    shards: Sequence[Shard]
    kinds: Sequence[Kind]
    verifies_all: bool
    scheduler_socket: int

    @property
    def machine(self) -> Machine: ...
    @property
    def ranks(self) -> Sequence[Rank]: ...
    @property
    def dead_rank(self) -> Rank | None: ...
    @property
    def weights(self) -> str: ...
    @property
    def disturbed_ns(self) -> int: ...
    def drop_scheduler(self, why: str) -> None: ...


class Peers(Protocol):
    """`peers.SimPeers`, as its transfer worker, its way to the index and its cluster see it."""

    world: Ground
    name: str
    incarnation: int
    memory: SimMemory
    random: random.Random
    loop: SimLoop
    served: dict[int, int]
    has_lied: bool

    @property
    def machine(self) -> Machine: ...
    @property
    def now_ns(self) -> int: ...
    def lose(self) -> None: ...
    def check_write(self, writer: str, page: int) -> None: ...


class Machine(Protocol):
    """`machine.Machine`, as its node, its disk, its ranks and its cluster see it."""

    world: Ground
    knobs: Knobs
    random: random.Random
    name: str
    address: str
    sockets: SimSockets
    memory: SimMemory
    unsynced: dict[str, list[tuple[int, int]]]
    disturbed_ns: int
    suspended_until_ns: int
    was_damaged: bool
    doubted: set[tuple[int, int]]

    @property
    def now_ns(self) -> int: ...
    @property
    def node(self) -> NodeEngine: ...
    @property
    def peers(self) -> Peers | None: ...
    def node_step(self) -> None: ...
    def peers_go_on(self) -> bool: ...
    def let_go(self, connection: int) -> None: ...
    def clear(self, space: SpaceId | None, tenant: str | None) -> bool: ...
    def connect(self, hello: HelloScheduler | HelloRank) -> int: ...
    def take_inbox(self, connection: int) -> list[Message | None]: ...
