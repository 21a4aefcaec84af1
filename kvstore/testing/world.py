"""One seeded world: a node's real core, engines with real connector cores, simulated rest.

    python -m kvstore.testing.world --seed 1 --seeds 200 --steps 600

Real: `engine.Engine`, `client.core`. Simulated: clock, sockets, shared memory, the engine's own
scheduler (`sim_engine`). Engines have one rank or several: shards of heads, of layers, replicas.
Faults, each by the seed: engines, schedulers and ranks that vanish or hang up, a node that stops,
dies and restarts, slow delivery, stalled copies, aborts, preemptions, flipped bytes. After the
faults everything heals and must converge. Exit status 1 and a story when a promise breaks.

Checked all the time: every block that an engine reads holds the bytes of its key (P1); every load
ends exactly once, and well when nothing was disturbed (a lease holds); nothing is stored that still
loads; `Engine.check()`. At the end: all requests finished (P2), no lease, grant or
quarantined slot is left (P3). The same seed gives the same trace hash.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import (
    Admit,
    Clear,
    Ended,
    Exited,
    Hangup,
    RaiseGenerations,
    Ready,
    Received,
    Release,
    Send,
    Tick,
)
from kvstore.testing.sim_engine import SimEngine, new_random_request
from kvstore.testing.sim_parts import (
    FAULTS,
    HARMLESS,
    LAYOUTS,
    SimMemory,
    SimSocket,
    WorldResult,
    key_chains,
    sim_space,
)
from kvstore.testing.sim_rank import SimRank, Violation
from kvstore.types import SLOT_BYTES_MIN, ConnectionId
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    HelloRank,
    HelloScheduler,
    Message,
    decode_from_engine,
    decode_from_node,
    encode,
)

STORY_LINES = 60


class World:
    """A node and its engines. Deterministic in `seed` and `steps`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ns = 10**12
        self.heartbeat_ns = self.now_ns
        self.disturbed_ns = 0
        self.story: deque[str] = deque(maxlen=STORY_LINES)
        self.faults: Counter[str] = Counter()
        self._trace = hashlib.sha256()
        self._events = 0
        self._next_connection = 1
        self._next_engine = 1
        self._next_request = 1
        self._finished = 0
        self._loaded = 0
        self.sockets: dict[int, SimSocket] = {}
        self._late_exits: list[int] = []
        """Connections of processes that are gone and whose pidfd has not fired yet."""
        # Calm seeds load more, wild ones see more faults meet.
        share, self.fault_rate = self.random.choice(((0.2, 0.02), (0.5, 0.02), (0.5, 0.06)))
        self.enabled = {name for name in FAULTS if self.random.random() < share}
        self.arena_bytes = SLOT_BYTES_MIN * self.random.choice((4, 6, 8, 24, 96))
        self.ttl_ms = self.random.choice((20, 500, 10_000))
        self.node_up = True
        self.stopped_until_ns = 0
        self.incarnation = 0
        self._start_node()
        self.spaces = [sim_space("model-a"), sim_space("model-b")]
        self.chains = key_chains(self.random)
        self.engines: list[SimEngine] = []
        for _ in range(self.random.choice((1, 2, 2, 3))):
            self.start_engine()

    # ── the node ─────────────────────────────────────────────────────────────────────────────────

    def _start_node(self) -> None:
        self.incarnation += 1
        self.memory = SimMemory(self.arena_bytes)
        self.node = Engine(
            EngineConfig(
                incarnation=self.incarnation,
                arena_bytes=self.arena_bytes,
                slab_bytes=max(SLOT_BYTES_MIN * 2, self.arena_bytes // 4),
                generation_bytes=8192,
                block_count_max=1024,
                lease_ttl_ms=self.ttl_ms,
                credit_share=self.random.choice((0.125, 0.5)),
            )
        )
        self.node_up = True
        self._feed([Ready(self.arena_bytes)])

    def _feed(self, events: Sequence[object]) -> None:
        """What the driver does: events in, commands carried out in order."""
        for command in self.node.step(events, self.now_ns):  # type: ignore[arg-type]
            match command:
                case RaiseGenerations(slots=slots, generations=generations):
                    self.memory.tier.raise_generations(slots.tolist(), generations.tolist())
                case Send(connection=connection, message=message):
                    self._to_engine(connection, message)
                case Admit(connection=connection, welcome=welcome):
                    self._to_engine(connection, welcome)
                case Hangup(connection=connection):
                    socket = self.sockets.get(connection)
                    if socket is not None:
                        socket.to_engine.append(None)
                        self._feed([Ended(ConnectionId(connection))])
                case Release():
                    pass
                case _:
                    pass
        self.node.check()

    def _to_engine(self, connection: int, message: Message) -> None:
        socket = self.sockets.get(connection)
        if socket is not None:
            socket.to_engine.append(encode(message))

    @property
    def node_runs(self) -> bool:
        return self.node_up and self.now_ns >= self.stopped_until_ns

    def node_step(self) -> None:
        """Beat, then read some of what waits: ranks before schedulers, as the driver does."""
        if not self.node_runs:
            return
        self.heartbeat_ns = self.now_ns
        events: list[object] = [Tick()]
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
        self._feed(events)

    # ── sockets, as engines see them ─────────────────────────────────────────────────────────────

    def connect(self, hello: HelloScheduler | HelloRank) -> int:
        """A new connection, or 0 when nobody listens."""
        if not self.node_up:
            return 0
        connection = self._next_connection
        self._next_connection += 1
        rank = hello.rank if isinstance(hello, HelloRank) else None
        socket = SimSocket(hello.engine_id, rank, self.memory)
        socket.to_node.append(encode(hello))
        self.sockets[connection] = socket
        return connection

    def send(self, connection: int, message: Message) -> None:
        socket = self.sockets.get(connection)
        if socket is not None:
            socket.to_node.append(encode(message))

    def take_inbox(self, connection: int) -> list[Message | None]:
        """What has arrived, oldest first; None last when the connection has ended."""
        socket = self.sockets.get(connection)
        if socket is None:
            return [None]
        count = self.random.randint(0, len(socket.to_engine)) if "slow" in self.enabled else None
        taken: list[Message | None] = []
        while socket.to_engine and (count is None or len(taken) < count):
            datagram = socket.to_engine.popleft()
            taken.append(None if datagram is None else decode_from_node(datagram))
        return taken

    def hang_up(self, connection: int) -> None:
        """The engine closes; the node learns of it after what is still queued."""
        socket = self.sockets.get(connection)
        if socket is not None:
            socket.node_sees_end = True
            socket.to_engine.clear()

    def memory_of(self, connection: int) -> SimMemory:
        return self.sockets[connection].memory

    # ── engines ──────────────────────────────────────────────────────────────────────────────────

    def start_engine(self) -> None:
        name = f"e{self._next_engine}"
        self._next_engine += 1
        space = self.random.choice(self.spaces)
        blocks = self.random.choice((10, 16, 40))
        shards = LAYOUTS[0] if self.random.random() < 0.4 else self.random.choice(LAYOUTS)
        self.note(f"{name} starts with {len(shards)} ranks")
        self.engines.append(SimEngine(self, name, space=space, blocks=blocks, shards=shards))

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
        events: list[object] = []
        for connection in list(connections):
            if connection in self._late_exits:
                continue
            socket = self.sockets[connection]
            socket.cut(self.random.randint(0, len(socket.to_node)))
            if self.random.random() < 0.5:
                events.append(Exited(ConnectionId(connection)))
            else:
                self._late_exits.append(connection)
        if self.node_up:
            self._feed(events)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def fault(self, name: str) -> None:
        """Do it to somebody."""
        # It hurts most in the middle of a copy.
        copying = [r for e in self.engines for r in e.ranks if r.copying]
        if copying and self.random.random() < 0.5:
            rank = self.random.choice(copying)
            engine = next(e for e in self.engines if rank in e.ranks)
        else:
            engine = self.random.choice(self.engines)
            rank = self.random.choice(engine.ranks)
        self.faults[name] += 1
        if name not in HARMLESS:
            self.disturbed_ns = self.now_ns
        self.note(f"fault {name} at {engine.name}")
        match name:
            case "engine killed":
                self.kill_engine(engine)
                self.start_engine()
            case "rank killed":
                if engine.dead_rank is None:
                    self.kill_rank(engine, rank)
            case "scheduler hangs up":
                if engine.scheduler_socket:
                    engine.drop_scheduler("fault")
            case "rank hangs up":
                if rank.socket and rank is not engine.dead_rank:
                    rank.drop()
                    self._stall(rank)
            case "node killed":
                self.kill_node()
            case "node stopped":
                self.stopped_until_ns = self.now_ns + self.random.randint(10, 2000) * NS_PER_MS
            case "abort":
                candidates = [r for r in (*engine.waiting, *engine.running) if not r.aborted]
                loading = [r for r in candidates if r.loading]
                if loading and self.random.random() < 0.5:
                    engine.abort(loading[0])
                elif candidates:
                    engine.abort(self.random.choice(candidates))
            case "preempt":
                if engine.running:
                    engine.preempt(self.random.choice(engine.running))
            case "copy stalls":
                self._stall(rank)
            case "byte flipped":
                self._flip()
            case "clear":
                if self.node_runs:
                    self._feed([Clear(None, None)])
            case "reset":
                engine.core.new_weights(f"w{self.random.randrange(10**9)}", self.now_ns)
                engine.drop_scheduler("reset")
            case _:
                pass

    def _stall(self, rank: SimRank) -> None:
        """A copy under way takes its time."""
        rank.stalled_until_ns = self.now_ns + self.random.randint(10, 1500) * NS_PER_MS

    def is_calm(self, engine: SimEngine, *, since_ns: int) -> bool:
        """Nothing happened since then that could end a lease before its time."""
        return (
            since_ns > max(self.disturbed_ns, engine.disturbed_ns)
            and self.now_ns - since_ns < self.ttl_ms * NS_PER_MS
            and not self.faults["byte flipped"]  # what was flipped stays so
        )

    def _flip(self) -> None:
        """A byte of a slot changes."""
        slots = sorted(self.memory.contents)
        if slots:
            slot = self.random.choice(slots)
            self.memory.contents[slot] = b"flipped" + self.memory.contents[slot]

    def kill_node(self) -> None:
        """kill -9 of the node: every socket ends; the old memory lives on in its mappings."""
        self.node_up = False
        for socket in self.sockets.values():
            socket.to_engine.append(None)
        self.sockets = {
            c: s
            for c, s in self.sockets.items()
            if any(c in (e.scheduler_socket, *(r.socket for r in e.ranks)) for e in self.engines)
        }
        for socket in self.sockets.values():
            socket.to_node.clear()
            socket.node_sees_end = False
        self._late_exits.clear()

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

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def note(self, line: str) -> None:
        """A line of the story; every one goes into the trace hash."""
        self._events += 1
        self._trace.update(line.encode())
        self.story.append(f"{self.now_ns / 1e6 - 1e6:9.1f} ms  {line}")

    def run(self, steps: int) -> WorldResult:
        """Faults for `steps` events, then healing, then the end of all engines."""
        try:
            for _ in range(steps):
                self.event(faulty=True)
            self._heal()
            self._end()
        except AssertionError as error:
            raise Violation(f"seed {self.seed}: {error}\n  " + "\n  ".join(self.story)) from error
        return WorldResult(
            seed=self.seed,
            events=self._events,
            finished=self._finished,
            loaded_blocks=self._loaded,
            trace=self._trace.hexdigest()[:16],
            faults=dict(self.faults),
        )

    def event(self, *, faulty: bool) -> None:
        """Time passes and one thing happens."""
        self.now_ns += self.random.choice((0, 1, 1, 2, 7)) * NS_PER_MS
        roll = self.random.random()
        engine = self.random.choice(self.engines)
        if faulty and roll < self.fault_rate and self.enabled:
            self.fault(self.random.choice(sorted(self.enabled)))
        elif faulty and roll < 0.16:
            self.add_request()
        elif engine.dead_rank is not None and roll < 0.30:
            self.note(f"{engine.name} ends, a rank of it is dead")
            self.kill_engine(engine)
            self.start_engine()
        elif roll < 0.45 and engine.dead_rank is None:
            self.note(f"{engine.name} steps")
            engine.step()
        elif roll < 0.65:
            self.note(f"{engine.name} copies")
            engine.copy_step()
        elif roll < 0.75:
            self.note(f"a rank of {engine.name} polls")
            engine.poll_rank()
        elif not self.node_up and roll < 0.80:
            self.note("node restarts")
            self.restart_node()
        else:
            self.note("node reads")
            self.node_step()
            if self._late_exits and self.node_runs and self.random.random() < 0.5:
                self._feed([Exited(ConnectionId(self._late_exits.pop(0)))])

    def _heal(self) -> None:
        self.enabled = set()
        self.stopped_until_ns = 0
        self.disturbed_ns = self.now_ns
        if not self.node_up:
            self.restart_node()
        for _ in range(20_000):
            self.event(faulty=False)
            if all(engine.idle for engine in self.engines):
                break
        for engine in self.engines:
            if not engine.idle:
                raise Violation(f"{engine.name} did not finish its requests after the faults")
            if engine.core.leases_open:
                raise Violation(f"{engine.name} holds {engine.core.leases_open} leases, idle")
        self._one_hit_each()

    def _one_hit_each(self) -> None:
        """After healing the cache works again: what was stored twice running is found."""
        for engine in self.engines:
            for _ in range(400):
                engine.poll_scheduler()
                for rank in engine.ranks:
                    rank.poll()
                self.now_ns += 5 * NS_PER_MS
                self.node_step()
                if engine.core.attachment.is_open:
                    break
            else:
                raise Violation(f"{engine.name} is not attached after the faults")

    def _end(self) -> None:
        """All engines die; the node must be at baseline."""
        for engine in list(self.engines):
            self.kill_engine(engine)
        self._feed([Exited(ConnectionId(c)) for c in self._late_exits])
        self._late_exits.clear()
        for _ in range(5):
            self.now_ns += self.ttl_ms * NS_PER_MS
            self.node_step()
        leases = list(self.node.leases())
        if leases:
            raise Violation(f"leases left on the node: {leases[:3]}")
        for tier in self.node.tiers():
            left = tier.slots_granted + tier.slots_quarantined
            if left:
                raise Violation(f"slots left granted or quarantined: {tier}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; 0 when all held."""
    parser = argparse.ArgumentParser(description="Run the seeded world.")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds from the first on")
    parser.add_argument("--steps", type=int, default=600, help="events with faults per seed")
    arguments = parser.parse_args(argv)
    totals: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            result = World(seed).run(arguments.steps)
        except Violation as violation:
            sys.stderr.write(f"{violation}\n{Path(__file__).name}: seed {seed} broke a promise\n")
            return 1
        totals.update(result.faults)
        totals.update(
            events=result.events, finished=result.finished, loaded_blocks=result.loaded_blocks
        )
    sys.stdout.write(f"{arguments.seeds} seeds held: {dict(totals)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
