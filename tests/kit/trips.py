"""Blocks to a real node and back, many of them, every byte compared with the truth.

Engines of three block sizes, each a scheduler and a rank in processes of their own. A step stores a
batch, reads it back while dram has it, and reads an old batch that dram has lost and the disk not.
Now and then all is cleared, and stays away.

Does not cover: anybody's death (`tests.kit.kills`).
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from kvstore.cli.ask import node_client
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import make_keys
from kvstore.units import KIB
from tests.kit.troupe import SplitEngine, Troupe

SIZES: Final = (4 * KIB, 16 * KIB, 64 * KIB)
TURNS: Final = (0, 0, 1, 0, 1, 0, 0, 1, 2)
"""Which of them stores next; small blocks, of which there are most, are where the counting is."""
BATCH: Final = 128
DRAM: Final = "128MiB"
"""2,048 slots: 16 batches."""
FILE: Final = "8GiB"
"""Rows for 32,768 blocks: 256 batches."""
AGE: Final = 20
"""Batches after which dram has lost one."""
CLEAR_EVERY: Final = 220
"""Steps after which the node is told to forget everything, before it has rows for no more."""


class Trips(msgspec.Struct):
    """What was done so far."""

    steps: int = 0
    stored_blocks: int = 0
    asked_blocks: int = 0
    verified_blocks: int = 0
    verified_bytes: int = 0


class RoundTrips:
    """Steps against one node, which needs `--dram DRAM --file …:FILE`."""

    def __init__(self, node: NodeProcess, troupe: Troupe, *, seed: int) -> None:
        self.trips = Trips()
        self._seed = seed
        self._engines = [
            SplitEngine(troupe, f"size{size}", block_bytes=size, rank_count=1) for size in SIZES
        ]
        for engine in self._engines:
            engine.attach(node.socket)
        self._node = node
        self._batches: list[tuple[SplitEngine, list[bytes]]] = []

    def step(self) -> None:
        """Store one batch, read it and an old one.

        Raises:
            Wrong: other bytes than were stored.
        """
        number = self.trips.steps
        self.trips.steps += 1
        engine = self._engines[TURNS[number % len(TURNS)]]
        keys = make_keys(BATCH, seed=f"{self._seed} {number}")
        stored = engine.store(keys)
        assert stored == BATCH, f"{stored} of {BATCH} blocks stored, seed {self._seed}"
        self.trips.stored_blocks += stored
        self._verify(engine, keys)
        self._batches.append((engine, keys))
        if len(self._batches) == CLEAR_EVERY:
            self._clear()
        elif len(self._batches) > AGE:
            old = random.Random(f"{self._seed} {number}").randrange(len(self._batches) - AGE)
            self._verify(*self._batches[old])

    def _clear(self) -> None:
        with node_client(self._node.socket) as client:
            client.clear(space="")
        left = [keys for engine, keys in self._batches[::AGE] if engine.verify(keys)]
        assert not left, f"{len(left)} batches came back after a clear, seed {self._seed}"
        self._batches.clear()

    def _verify(self, engine: SplitEngine, keys: list[bytes]) -> None:
        found = engine.verify(keys)
        self.trips.asked_blocks += len(keys)
        self.trips.verified_blocks += found
        self.trips.verified_bytes += found * engine.shard_bytes
