"""Ranks that distrust one shard of what is being copied: bytes of their own have changed meanwhile.

The others of its shards stay, its slot is somebody else's soon, and the copy goes on: a write to
another node, or one into hbm. Where it cannot read the block the node leaves that where it is.

Does not cover: copies that are bad (`faults`).
"""

from __future__ import annotations

import random
from typing import Final

from kvstore.wire.messages import Distrust
from tests.sim.world.stage import Stage

DOUBTS: Final = "shard distrusted"
"""Of itself, where knobs say so, while anything may go wrong."""
_SHARE: Final = 0.2
"""Of the events in which something is being copied."""


class SimDoubts:
    """All of a world."""

    def __init__(self, world: Stage) -> None:
        self._world = world
        # Chance of its own: other events of a world stay as they are.
        self._random = random.Random(f"doubts of {world.seed}")

    def go_on(self) -> None:
        """Perhaps somebody doubts."""
        source, world = self._random, self._world
        machine = source.choice(world.machines)
        engines = [engine for engine in world.engines if engine.machine is machine]
        moving = machine.moving
        if not (world.enabled and moving and engines) or source.random() >= _SHARE:
            return
        rank = source.choice(source.choice(engines).ranks)
        if rank.socket:
            slot, generation = source.choice(moving)
            slots, generations = slot.to_bytes(4, "little"), generation.to_bytes(8, "little")
            machine.doubted.add((slot, generation))
            world.strike(DOUBTS, machine)
            machine.sockets.send(rank.socket, Distrust(slots=slots, generations=generations))
