"""Who lives in a world: machines with a node each, what joins them, and their engines.

Does not cover: what happens to them (`world`, `faults`, `heal`).
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Collection
from pathlib import Path

from kvstore.types import Shard
from kvstore.wire.space import Space
from tests.sim.world.cluster import SimCluster
from tests.sim.world.disk import open_below
from tests.sim.world.engine import SimEngine
from tests.sim.world.ground import Ground
from tests.sim.world.machine import Machine
from tests.sim.world.parts import LAYOUTS, Knobs
from tests.sim.world.rank import SimRank

_IN_MEMORY = "/dev/shm"
"""Its files are of a few MiB and die with it; a disk would take a fifth of the time for that."""
_SPLIT = [layout for layout in LAYOUTS if len(set(layout)) > 1]
"""Layouts of several shards."""


class Stage(Ground):
    """The inhabitants of a world, who come and go."""

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
        super().__init__(
            seed, knobs=knobs, faults=faults, always=always, machine_count=machine_count
        )
        self.hit_share = 0.0
        self.finished = 0
        self.loaded = 0
        self._next_engine = 1
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        folder = self._make_folder() if self.knobs.has_disk else None
        self._deployment = self._draw_deployment()
        if self.knobs.has_doubts and self.knobs.has_landing:
            space, _, tenant = self._deployment
            shards = random.Random(f"shards of {seed}").choice(_SPLIT)
            self._deployment = space, shards, tenant
        self.engines: list[SimEngine] = []
        self.machines: list[Machine] = []
        self.cluster = SimCluster(self) if self.knobs.index_replicas else None
        for number in range(1, self.knobs.machines + 1):
            self.machines.append(Machine(self, number, folder, self.cluster))
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
        if self.knobs.quotas:
            # Each group has somebody to take from. One size of slots: no slab is taken from groups
            # whose blocks lie mixed in it, where shares are as small as here.
            space, shards, tenant = self.spaces[0], LAYOUTS[0], "tu"[self._next_engine % 2]
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

    def kill_engine(self, engine: SimEngine) -> None:
        """kill -9 of all its processes."""
        # Earlier sockets of its processes count too: their pidfds fire like the present ones'.
        machine = engine.machine
        machine.kill_processes(machine.connections_of(engine.name))
        self.finished += engine.finished_count
        self.loaded += engine.loaded_blocks
        self.engines.remove(engine)

    def kill_rank(self, engine: SimEngine, rank: SimRank) -> None:
        """kill -9 of one process: the others copy on and talk until the engine notices and ends."""
        rank.copies.end_process()
        engine.dead_rank = rank
        number = engine.ranks.index(rank)
        machine = engine.machine
        machine.kill_processes(machine.connections_of(engine.name, number))
