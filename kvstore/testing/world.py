"""One seeded world: a node's real core and file tier, engines with real connector cores.

    python -m kvstore.testing.world --seed 1 --seeds 200 --steps 600
    python -m kvstore.testing.world --seed 17 --shrink

Real: `engine.Engine`, `client.core`, `tiers.file`. Simulated: clock, sockets, shared memory, disk
(`sim_disk`), the engine's own scheduler (`sim_engine`). Engines have one rank or several: shards
of heads, of layers, replicas. Faults, each with p = 25 % by the seed: engines, schedulers and ranks
that vanish or hang up, a node that stops, dies, is upgraded and restarts, slow delivery, stalled
copies, aborts, preemptions, flipped bits, a disk that fails, is full, slow, hangs, tears, loses,
mixes up. Sizes and time limits are the seed's, too. After the faults everything heals and must
converge. Exit status 1 and a story when a promise breaks.

Checked all the time: every block that an engine reads holds the bytes of its tenant, model,
weights, shard and key (P1); every load ends exactly once, and well when nothing was disturbed (a
lease holds); nothing is stored that still loads; nobody writes to a slot that was given back; what
is known to be bad is not asked for again; `Engine.check()`. At the end: all requests finished (P2),
no lease, grant, pin, quarantined slot or descriptor is left (P3), what is stored is found again, in
dram and after a restart (P6). The same seed gives the same trace hash.

Does not cover: several nodes, since they have nothing to share yet.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from kvstore.engine.engine import Engine
from kvstore.engine.events import Ended, Event, Exited, Received
from kvstore.errors import ConfigError
from kvstore.testing import sim_faults, sim_heal
from kvstore.testing.shrink import Case, shrink
from kvstore.testing.sim_disk import SimDisk
from kvstore.testing.sim_engine import SimEngine, new_random_request
from kvstore.testing.sim_node import SimNode
from kvstore.testing.sim_parts import (
    DISK_CALL_FAULTS,
    DISK_FAULTS,
    FAULTS,
    HARMLESS,
    LAYOUTS,
    Knobs,
    SimMemory,
    Words,
    WorldResult,
    draw_knobs,
    key_chains,
    sim_space,
)
from kvstore.testing.sim_rank import SimRank, Violation
from kvstore.testing.sim_sockets import SimSockets
from kvstore.types import ConnectionId, Shard
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    HelloRank,
    HelloScheduler,
    Message,
    decode_from_engine,
)
from kvstore.wire.space import Space

STORY_LINES = 60
FAULT_SHARE = 0.25


class World:
    """A node and its engines. Deterministic in its arguments and `steps`."""

    def __init__(
        self,
        seed: int,
        *,
        knobs: Knobs | None = None,
        faults: Collection[str] | None = None,
        engine_count: int = 0,
    ) -> None:
        """Args:
        seed: of everything that is not said here.
        knobs: sizes and limits.
        faults: those that may happen, of the seed's own.
        engine_count: so many engines at most; 0: as the seed says.
        """
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ns = self.heartbeat_ns = 10**12
        self.disturbed_ns = 0
        self.story: deque[str] = deque(maxlen=STORY_LINES)
        self.faults: Counter[str] = Counter()
        self.words = Words()
        self._trace = hashlib.sha256()
        self._events = 0
        self._next_engine = 1
        self._next_request = 1
        self._finished = 0
        self._loaded = 0
        self._promoted = 0
        self.sockets = SimSockets()
        self._late_exits: list[int] = []
        """Connections of processes that are gone and whose pidfd has not fired yet."""
        self.fault_rate = self.random.choice((0.02, 0.02, 0.06))
        drawn = {name for name in FAULTS if self.random.random() < FAULT_SHARE}
        self.enabled = drawn if faults is None else drawn & set(faults)
        seeds_own = msgspec.structs.replace(
            draw_knobs(self.random), shadow_every=2 if seed % 5 == 3 else 0
        )
        self.knobs = knobs or seeds_own
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._directories: list[Path] = []
        if self.knobs.has_disk:
            self._folder = tempfile.TemporaryDirectory(prefix="kvstore-world-")
            self._directories = [Path(self._folder.name) / name for name in ("mine", "other")]
        else:
            self.enabled -= set(DISK_FAULTS)
        self._faults_to_do = sorted(self.enabled.difference(DISK_CALL_FAULTS))
        self.steps_done = 0
        self.stopped_until_ns = 0
        self.incarnation = 0
        self._node: SimNode | None = None
        self.memory = SimMemory(self.knobs.arena_bytes)
        """The arena of the node that was up last."""
        self._start_node()
        self.spaces = [sim_space("model-a"), sim_space("model-b")]
        self.chains = key_chains(self.random)
        self._deployment = self._draw_deployment()
        self.engines: list[SimEngine] = []
        count = self.random.choice((1, 2, 2, 3))
        for _ in range(min(count, engine_count or count)):
            self.start_engine()

    def close(self) -> None:
        """Leave nothing behind in the real world."""
        if self._node is not None:
            self._kill_node_process()
        if self._folder is not None:
            self._folder.cleanup()

    # ── the node ─────────────────────────────────────────────────────────────────────────────────

    def _start_node(self) -> None:
        self.incarnation += 1
        directory = self._directories[0] if self._directories else None
        try:
            self._node = SimNode(self, incarnation=self.incarnation, directory=directory)
            self.memory = self._node.memory
        except ConfigError as error:
            self.note(f"the node does not start: {str(error)[-60:]}")

    @property
    def node(self) -> Engine:
        """The engine of the node that is up."""
        assert self._node is not None
        return self._node.engine

    @property
    def disk(self) -> SimDisk | None:
        """The disk of the node, if it is up and has one."""
        return self._node.files.disk if self._node and self._node.files else None

    @property
    def directory(self) -> Path:
        """Where the node's files are."""
        return self._directories[0]

    def swap_directories(self) -> None:
        self._directories.reverse()

    @property
    def node_up(self) -> bool:
        return self._node is not None

    @property
    def node_runs(self) -> bool:
        return self.node_up and self.now_ns >= self.stopped_until_ns

    def feed(self, events: Sequence[Event]) -> None:
        if self._node is not None:
            self._node.feed(events)

    def node_step(self) -> None:
        """Beat, then read some of what waits: ranks before schedulers, as the driver does."""
        node = self._node
        if node is None or not self.node_runs:
            return
        self.heartbeat_ns = self.now_ns
        events: list[Event] = [node.tick()]
        waiting = [(c, s) for c, s in self.sockets.items() if s.to_node or s.node_sees_end]
        waiting.sort(key=lambda item: item[1].rank is None)
        for connection, socket in waiting:
            budget = len(socket.to_node) if socket.rank is not None else self.random.randint(1, 4)
            while socket.to_node and budget:
                budget -= 1
                message = decode_from_engine(socket.to_node.popleft())
                events.append(Received(ConnectionId(connection), message))
            if socket.node_sees_end and not socket.to_node:
                socket.node_sees_end = False
                events.append(Ended(ConnectionId(connection)))
        node.feed(events)
        node.read_files()

    def files_go_on(self, turns: int) -> None:
        """The threads of the file tier have some turns."""
        node = self._node
        if node is None or node.files is None or not self.node_runs:
            return
        node.files.run(turns)
        if node.files.disk.is_torn:
            self.kill_node()

    def kill_node(self) -> list[str]:
        """kill -9 of the node: every socket ends; the old memory lives on in its mappings. Returns
        the files that it had open."""
        if self._node is None:
            return []
        self.disturbed_ns = self.now_ns
        left = self._kill_node_process()
        self.sockets.node_died(
            {c for e in self.engines for c in (e.scheduler_socket, *(r.socket for r in e.ranks))}
        )
        self._late_exits.clear()
        return left

    def _kill_node_process(self) -> list[str]:
        node, self._node = self._node, None
        assert node is not None
        self._promoted += node.engine.counters.file_blocks_read
        return node.files.kill() if node.files is not None else []

    def restart_node(self) -> None:
        """A new incarnation with an empty arena; old sockets mean nothing to it."""
        for engine in self.engines:
            if engine.scheduler_socket:
                engine.drop_scheduler("node died")
            for rank in engine.ranks:
                if rank.socket and rank is not engine.dead_rank:
                    rank.drop()
        self.sockets.clear()
        self._start_node()

    def upgrade_node(self) -> None:
        """An orderly end; the next incarnation finds what was written."""
        node = self._node
        if node is None or not self.node_runs:
            return
        if node.files is not None:
            node.files.close()
        left = self.kill_node()
        if left and not self.enabled.intersection(DISK_CALL_FAULTS):
            raise Violation(f"an orderly end leaves files open: {left}")

    def pass_time(self) -> None:
        """While the world itself waits."""
        self.now_ns += 5 * NS_PER_MS

    # ── sockets, as engines see them ─────────────────────────────────────────────────────────────

    def connect(self, hello: HelloScheduler | HelloRank) -> int:
        """A new connection, or 0 when nobody listens."""
        return self.sockets.connect(hello, self._node.memory) if self._node is not None else 0

    def take_inbox(self, connection: int) -> list[Message | None]:
        """What has arrived, or when the world is slow a part of it."""
        count = None
        if "slow" in self.enabled and connection in self.sockets:
            count = self.random.randint(0, len(self.sockets[connection].to_engine))
        return self.sockets.take(connection, count)

    def end_late_exits(self) -> None:
        """Every pidfd that has not fired yet fires."""
        self.feed([Exited(ConnectionId(c)) for c in self._late_exits])
        self._late_exits.clear()

    # ── engines ──────────────────────────────────────────────────────────────────────────────────

    def start_engine(self) -> None:
        name = f"e{self._next_engine}"
        self._next_engine += 1
        blocks = self.random.choice((10, 16, 40))
        # Most engines are replicas of one deployment, or nothing would be shared.
        space, shards, tenant = self._draw_deployment()
        if self.random.random() < 0.75:
            space, shards, tenant = self._deployment
        self.note(f"{name} starts with {len(shards)} ranks")
        self.engines.append(
            SimEngine(self, name, space=space, blocks=blocks, shards=shards, tenant=tenant)
        )

    def _draw_deployment(self) -> tuple[Space, tuple[Shard, ...], str]:
        shards = LAYOUTS[0] if self.random.random() < 0.6 else self.random.choice(LAYOUTS)
        space = self.spaces[self.random.random() < 0.3]
        return space, shards, self.random.choice(("t", "t", "u"))

    def add_request(self) -> None:
        engine = self.random.choice(self.engines)
        request = new_random_request(self.random, self.chains, self._next_request, engine.blocks)
        self._next_request += 1
        self.note(f"{engine.name} gets {request.name}: {request.tokens} tokens")
        engine.add(request)

    def kill_engine(self, engine: SimEngine) -> None:
        """kill -9: sockets end and pidfds fire, in any order; nothing is said any more."""
        # Earlier sockets of its processes count too: their pidfds fire like the present ones'.
        self._kill(c for c, socket in self.sockets.items() if socket.owner == engine.name)
        self._finished += engine.finished_count
        self._loaded += engine.loaded_blocks
        self.engines.remove(engine)

    def kill_rank(self, engine: SimEngine, rank: SimRank) -> None:
        """kill -9 of one process: the others copy on and talk until the engine notices and ends."""
        rank.copying = None
        engine.dead_rank = rank
        self._kill(
            c
            for c, socket in self.sockets.items()
            if (socket.owner, socket.rank) == (engine.name, engine.ranks.index(rank))
        )

    def _kill(self, connections: Iterable[int]) -> None:
        events: list[Event] = []
        for connection in list(connections):
            if connection in self._late_exits:
                continue
            socket = self.sockets[connection]
            socket.cut(self.random.randint(0, len(socket.to_node)))
            if self.random.random() < 0.5:
                events.append(Exited(ConnectionId(connection)))
            else:
                self._late_exits.append(connection)
        self.feed(events)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def fault(self, name: str) -> None:
        """Do it to somebody."""
        self.strike(name)
        sim_faults.happen(self, name)

    def strike(self, name: str) -> None:
        """Something goes wrong: it is counted and told."""
        self.faults[name] += 1
        if name not in HARMLESS:
            self.disturbed_ns = self.now_ns
        self.note(f"fault {name}")

    def is_calm(self, engine: SimEngine, *, since_ns: int) -> bool:
        """Nothing happened since then that could end a lease before its time."""
        return (
            since_ns > max(self.disturbed_ns, engine.disturbed_ns)
            and self.now_ns - since_ns < self.knobs.ttl_ms * NS_PER_MS
            and not self.faults["byte flipped"]  # what was flipped stays so
        )

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def note(self, line: str) -> None:
        """A line of the story; every one goes into the trace hash."""
        self._events += 1
        self._trace.update(line.encode())
        self.story.append(f"{self.now_ns / 1e6 - 1e6:9.1f} ms  {line}")

    def run(self, steps: int) -> WorldResult:
        """Faults for `steps` events, then healing, then the end of all engines."""
        try:
            for step in range(steps):
                self.steps_done = step
                self.event(faulty=True)
            self.steps_done = steps
            sim_heal.heal(self)
            sim_heal.find_again(self)
            sim_heal.end(self)
            return self._result()
        except AssertionError as error:
            story = "\n  ".join(self.story)
            raise Violation(f"seed {self.seed}: {error}\n  {story}", self.steps_done) from error
        finally:
            self.close()

    def _result(self) -> WorldResult:
        return WorldResult(
            seed=self.seed,
            events=self._events,
            finished=self._finished,
            loaded_blocks=self._loaded,
            promoted_blocks=self._promoted + self.node.counters.file_blocks_read,
            trace=self._trace.hexdigest()[:16],
            faults=dict(self.faults),
        )

    def event(self, *, faulty: bool) -> None:
        """Time passes and one thing happens."""
        self.files_go_on(self.random.randrange(4))
        self.now_ns += self.random.choice((0, 1, 1, 2, 7)) * NS_PER_MS
        roll = self.random.random()
        engine = self.random.choice(self.engines)
        if faulty and roll < self.fault_rate and self._faults_to_do:
            self.fault(self.random.choice(self._faults_to_do))
        elif faulty and roll < 0.13:
            self.add_request()
        elif engine.dead_rank is not None and roll < 0.27:
            self.note(f"{engine.name} ends, a rank of it is dead")
            self.kill_engine(engine)
            self.start_engine()
        elif roll < 0.33 and engine.dead_rank is None:
            self.note(f"{engine.name} steps")
            engine.step()
        elif roll < 0.51:
            self.note(f"{engine.name} copies")
            for _ in range(self.random.choice((1, 1, 1, 8))):
                engine.copy_step()
        elif roll < 0.65:
            self.note(f"ranks of {engine.name} poll")
            engine.poll_ranks()
        elif not self.node_up and roll < 0.75:
            self.note("node restarts")
            self.restart_node()
        else:
            self.note("node reads")
            self.node_step()
            if self._late_exits and self.node_runs and self.random.random() < 0.5:
                self.feed([Exited(ConnectionId(self._late_exits.pop(0)))])


def run_case(case: Case) -> WorldResult:
    """Run a world.

    Raises:
        Violation: a promise was broken.
    """
    world = World(case.seed, faults=case.faults, engine_count=case.engines)
    return world.run(case.steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; 0 when all held."""
    parser = argparse.ArgumentParser(description="Run the seeded world.")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds from the first on")
    parser.add_argument("--steps", type=int, default=600, help="events with faults per seed")
    parser.add_argument(
        "--engines", type=int, default=0, help="engines at most; 0: as the seed says"
    )
    parser.add_argument("--faults", default=None, help="only these, with commas between them")
    parser.add_argument(
        "--shrink", action="store_true", help="make a failure small before telling it"
    )
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # the story says what happens
    faults = None if arguments.faults is None else tuple(filter(None, arguments.faults.split(",")))
    totals: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        case = Case(seed, arguments.steps, arguments.engines, faults)
        try:
            result = run_case(case)
        except Violation as violation:
            if arguments.shrink:
                case, violation = shrink(case, violation, run_case)
            sys.stderr.write(f"{violation}\nseed {seed} broke a promise; again: {case.command()}\n")
            return 1
        totals.update(result.faults)
        totals.update(
            events=result.events,
            finished=result.finished,
            loaded_blocks=result.loaded_blocks,
            promoted_blocks=result.promoted_blocks,
        )
    sys.stdout.write(f"{arguments.seeds} seeds held: {dict(totals)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
