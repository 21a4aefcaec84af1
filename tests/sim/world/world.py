"""One seeded world: machines with a node each, their engines, and what happens to them.

`tests.sim.world.play` says what it is for, and runs it. Does not cover: the parts (`machine`,
`engine`, `cluster`), what faults do (`faults`), how it ends (`heal`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from kvstore.types import Shard
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.space import Space
from tests.sim.world import faults as sim_faults, heal as sim_heal
from tests.sim.world.cluster import SimCluster
from tests.sim.world.copies import Violation
from tests.sim.world.disk import SimDisk, open_below
from tests.sim.world.engine import SimEngine, new_random_request
from tests.sim.world.machine import Machine
from tests.sim.world.parts import (
    CLUSTER_FAULTS,
    DISK_FAULTS,
    HARMLESS,
    LAYOUTS,
    SELF_STRIKING,
    Knobs,
    Words,
    WorldResult,
    draw_faults,
    draw_knobs,
    key_chains,
    sim_space,
)
from tests.sim.world.rank import SimRank
from tests.sim.world.shrink import Case

STORY_LINES = 60
FAULT_SHARE = 0.25
_ACQUAINTED_NS = 3 * NS_PER_S // 2
"""In a cluster nodes know each other's addresses by then."""
_QUIET_SHARE = 0.005
_QUIET_MS = (100, 500, 3500)
"""In a cluster engines ask for nothing now and then: silence is noticed, connections are given up,
peers that failed are tried again."""
_IN_MEMORY = "/dev/shm"
"""Its files are of a few MiB and die with it; a disk would take a fifth of the time for that."""


class World:
    """Deterministic in its arguments and `steps`."""

    def __init__(
        self,
        seed: int,
        *,
        knobs: Knobs | None = None,
        faults: Collection[str] | None = None,
        always: Collection[str] = (),
        engine_count: int = 0,
        machine_count: int = 0,
    ) -> None:
        """Args:
        seed: of everything that is not said here.
        knobs: sizes and limits.
        faults: those that may happen, of the seed's own.
        always: those that may happen, whatever the seed says.
        engine_count: so many engines at most, but one on each machine; 0: as the seed says.
        machine_count: so many machines; 0: as the seed, or `knobs`, says.
        """
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ns = 10**12
        self.story: deque[str] = deque(maxlen=STORY_LINES)
        self.faults: Counter[str] = Counter()
        self.words = Words()
        self.opened_by: dict[int, SimDisk] = {}
        """Who opened a descriptor last, of those that are files of a disk."""
        self.hit_share = 0.0
        self.foreign_blocks = 0
        """That nodes asked their disks for, and that another one wrote."""
        self.fetched_blocks = 0
        """That came from other nodes."""
        self._trace = hashlib.sha256()
        self._events = 0
        self._next_engine = 1
        self._next_request = 1
        self._finished = 0
        self._loaded = 0
        self.fault_rate = self.random.choice((0.004, 0.012, 0.04))
        drawn = draw_faults(self.random, seed, share=FAULT_SHARE)
        self.enabled = (drawn if faults is None else drawn & set(faults)) | set(always)
        drawn_knobs = draw_knobs(self.random, seed, machines=machine_count)
        self.knobs = knobs or drawn_knobs
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        folder = self._make_folder() if self.knobs.has_disk else None
        if folder is None:
            self.enabled -= set(DISK_FAULTS)
        if not self.knobs.index_replicas:
            self.enabled -= set(CLUSTER_FAULTS)
        self._faults_to_do = sorted(self.enabled.difference(SELF_STRIKING))
        self.steps_done = 0
        self.spaces = [sim_space("model-a"), sim_space("model-b")]
        # Where nodes fetch from each other, there must be enough that only one of them has.
        self.chains = key_chains(self.random, 24 if self.knobs.index_replicas else 0)
        self._deployment = self._draw_deployment()
        self.engines: list[SimEngine] = []
        self.machines: list[Machine] = []
        self.cluster = SimCluster(self) if self.knobs.index_replicas else None
        for number in range(1, self.knobs.machines + 1):
            self.machines.append(Machine(self, number, folder))
        self._start_engines(engine_count)

    def _start_engines(self, count_max: int) -> None:
        count = self.random.choice((1, 2, 2, 3))
        count = max(min(count, count_max or count), len(self.machines))
        for number in range(count):
            self.start_engine(self.machines[number % len(self.machines)])

    def _make_folder(self) -> Path:
        where = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-world-", dir=where)
        folder = Path(self._folder.name)
        # For those who look what is left in shared memory: it is in use.
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for name in ("file", "aside"):
            (folder / name).mkdir()
        return folder

    def close(self) -> list[str]:
        """Leave nothing behind in the real world. Returns the files that nodes which are gone left
        open."""
        for machine in self.machines:
            machine.end_process()
        if self.cluster is not None:
            self.cluster.end()
        if self._folder is None:
            return []
        folder, self._folder = self._folder, None
        os.close(self._folder_fd)
        left = open_below(folder.name)
        folder.cleanup()
        return left

    def pass_time(self) -> None:
        """While the world itself waits."""
        self.now_ns += 5 * NS_PER_MS

    # ── engines ──────────────────────────────────────────────────────────────────────────────────

    def start_engine(self, machine: Machine) -> None:
        name = self.next_engine_name()
        blocks = self.random.choice((10, 16, 40))
        # Most engines are replicas of one deployment, or nothing would be shared.
        space, shards, tenant = self._draw_deployment()
        if self.random.random() < (0.75 if self.cluster is None else 0.95):
            space, shards, tenant = self._deployment
        if self.cluster is not None:
            shards = self._deployment[1]  # bytes of the oracle cannot be cut in another way
        self.note(f"{name} starts on {machine.name} with {len(shards)} ranks")
        self.engines.append(
            SimEngine(machine, name, space=space, blocks=blocks, shards=shards, tenant=tenant)
        )

    def next_engine_name(self) -> str:
        name = f"e{self._next_engine}"
        self._next_engine += 1
        return name

    def _draw_deployment(self) -> tuple[Space, tuple[Shard, ...], str]:
        shards = LAYOUTS[0] if self.random.random() < 0.6 else self.random.choice(LAYOUTS)
        space = self.spaces[self.random.random() < 0.3]
        return space, shards, self.random.choice(("t", "t", "u"))

    def add_request(self) -> None:
        engine = self.random.choice(self.engines)
        if not engine.runs:
            return
        request = new_random_request(self.random, self.chains, self._next_request, engine.blocks)
        self._next_request += 1
        self.note(f"{engine.name} gets {request.name}: {request.tokens} tokens")
        engine.add(request)

    def kill_engine(self, engine: SimEngine) -> None:
        """kill -9 of all its processes."""
        # Earlier sockets of its processes count too: their pidfds fire like the present ones'.
        machine = engine.machine
        machine.kill_processes(machine.connections_of(engine.name))
        self._finished += engine.finished_count
        self._loaded += engine.loaded_blocks
        self.engines.remove(engine)

    def kill_rank(self, engine: SimEngine, rank: SimRank) -> None:
        """kill -9 of one process: the others copy on and talk until the engine notices and ends."""
        rank.copies.end_process()
        engine.dead_rank = rank
        number = engine.ranks.index(rank)
        machine = engine.machine
        machine.kill_processes(machine.connections_of(engine.name, number))

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def fault(self, name: str) -> None:
        """Do it to somebody."""
        machine = sim_faults.happen(self, name)
        if machine is not None:
            self._count(name, machine)

    def strike(self, name: str, machine: Machine) -> None:
        """Something went wrong by itself: it is counted and told."""
        self.note(f"fault {name} on {machine.name}")
        self._count(name, machine)

    def _count(self, name: str, machine: Machine) -> None:
        self.faults[name] += 1
        if name not in HARMLESS:
            machine.disturbed_ns = self.now_ns

    def is_calm(self, engine: SimEngine, *, since_ns: int) -> bool:
        """Nothing happened since then that could end a lease before its time."""
        machine = engine.machine
        return (
            since_ns > max(machine.disturbed_ns, engine.disturbed_ns)
            and self.now_ns - since_ns < self.knobs.ttl_ms * NS_PER_MS
            and not machine.memory.is_damaged  # what changed stays so
        )

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def note(self, line: str) -> None:
        """A line of the story; every one goes into the trace hash."""
        self._events += 1
        self._trace.update(line.encode())
        self.story.append(f"{self.now_ns / 1e6 - 1e6:9.1f} ms  {line}")

    def run(self, steps: int) -> WorldResult:
        """Faults for `steps` events, then healing, then the end of all engines.

        Raises:
            Violation: a promise was broken; its text is the story.
        """
        try:
            result = self._run(steps)
            left = self.close()
            if left:
                raise Violation(f"files are still open when all nodes are gone: {left[:3]}")
        except Exception as error:  # whatever it is, it is a bug, and has a story
            where = "" if isinstance(error, Violation) else f" ({_where(error)})"
            story = "\n  ".join([f"seed {self.seed}: {error!s:.500}{where}", *folded(self.story)])
            raise Violation(story, self.steps_done) from error
        finally:
            self.close()
        return result

    def _run(self, steps: int) -> WorldResult:
        if self.cluster is not None:
            self.cluster.be_quiet(_ACQUAINTED_NS)
        for step in range(steps):
            self.steps_done = step
            self.event(faulty=True)
        self.steps_done = steps
        sim_heal.heal(self)
        sim_heal.find_again(self)
        sim_heal.end(self)
        return self._result()

    def _result(self) -> WorldResult:
        return WorldResult(
            seed=self.seed,
            events=self._events,
            finished=self._finished,
            loaded_blocks=self._loaded,
            promoted_blocks=sum(
                machine.promoted + machine.node.counters.file_blocks_read
                for machine in self.machines
            ),
            foreign_blocks=self.foreign_blocks,
            kept_blocks=sum(machine.kept for machine in self.machines),
            fetched_blocks=self.fetched_blocks,
            trace=self._trace.hexdigest()[:16],
            hit_share=self.hit_share,
            faults=dict(self.faults),
        )

    def event(self, *, faulty: bool) -> None:
        """Time passes and one thing happens."""
        engine = self.random.choice(self.engines)
        machine = engine.machine
        machine.files_go_on(self.random.randrange(4))
        self.now_ns += self.random.choice((0, 1, 1, 2, 7)) * NS_PER_MS
        if self.cluster is not None and self.random.random() < _QUIET_SHARE:
            self.cluster.be_quiet(self.random.choice(_QUIET_MS) * NS_PER_MS)
        roll = self.random.random()
        if faulty and roll < self.fault_rate and self._faults_to_do:
            self.fault(self.random.choice(self._faults_to_do))
        elif faulty and roll < 0.1:
            self.add_request()
        elif roll < 0.68:
            if engine.runs:
                self._engine_goes_on(engine, roll)
        elif not machine.node_up and machine.runs and roll < 0.78:
            self.note(f"the node of {machine.name} restarts")
            machine.restart_node()
        else:
            self.note(f"the node of {machine.name} reads")
            machine.node_step()
            machine.end_late_exit()

    def _engine_goes_on(self, engine: SimEngine, roll: float) -> None:
        if self._ends_now(engine, roll):
            self.note(f"{engine.name} ends, a rank of it is dead or hangs")
            self.kill_engine(engine)
            self.start_engine(engine.machine)
        elif roll < 0.36 and engine.dead_rank is None:
            self.note(f"{engine.name} steps")
            engine.step()
        elif roll < 0.56:
            self.note(f"{engine.name} copies")
            for _ in range(self.random.choice((1, 1, 1, 8))):
                engine.copy_step()
        else:
            self.note(f"ranks of {engine.name} poll")
            engine.poll_ranks()

    def _ends_now(self, engine: SimEngine, roll: float) -> bool:
        """An engine without one of its ranks ends soon, one that hangs when somebody notices."""
        if engine.dead_rank is not None:
            return roll < 0.24
        return roll < 0.11 and engine.hangs


def _where(error: Exception) -> str:
    """Kind and place of an error that is no Violation: an assertion of the product, or worse."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def folded(story: Iterable[str]) -> Iterator[str]:
    """Lines of a story; those that differ in nothing but the time are one, with their count."""
    for _, same in itertools.groupby(story, key=lambda line: line.partition(" ms  ")[2]):
        first, *more = same
        yield f"{first}  (and {len(more)} more like it)" if more else first


def run_case(case: Case) -> WorldResult:
    """Run a world.

    Raises:
        Violation: a promise was broken.
    """
    world = World(
        case.seed, faults=case.faults, engine_count=case.engines, machine_count=case.nodes
    )
    return world.run(case.steps)
