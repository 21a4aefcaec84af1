"""A node's engine over real memory, without sockets and without a check after every step.

node = Quick(slots=8)
peer = Peer(node)
node.writable(peer)      what its rank may write now
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from kvstore.arena import Arena, GenerationView
from kvstore.engine.events import Admit, Command, Event, Hangup, Send
from kvstore.tier_events import RaiseGenerations
from kvstore.tiers.dram import DramTier
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Incarnation
from kvstore.wire.messages import LeaseAsk, LeaseReply, Seal
from tests.kit.memory_tier import until_populated
from tests.unit.engine.harness import Node, Peer, arrays


class Quick(Node):
    """`generations` is what engines see. Closed at the end of `with`."""

    def __init__(self, *, slots: int, **config: Any) -> None:
        self.arena = Arena(arena_bytes=slots * SLOT_BYTES_MIN, incarnation=Incarnation(7))
        self.tier = DramTier(self.arena)
        self.tier.start()
        until_populated(self.tier)
        self.generations = GenerationView(
            self.arena.generation_fd,
            size_bytes=self.arena.generation_bytes,
            arena_bytes=self.arena.arena_bytes,
            incarnation=7,
        )
        super().__init__(slots=slots, tell_changes=False, **config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.generations.close()
        self.tier.close()

    def step(self, *events: Event) -> list[Command]:
        """As the loop and the executor do it: generations are raised before anybody hears."""
        commands = self.engine.step(events, self.now_ns)
        for command in commands:
            if isinstance(command, RaiseGenerations):
                self.tier.raise_generations(command.slots, command.generations)
        for command in commands:
            match command:
                case Send(connection=connection, message=message):
                    self.sent[connection].append(message)
                case Admit(connection=connection):
                    self.admitted.append(connection)
                case Hangup(connection=connection, reason=reason):
                    self.hangups[connection] = reason
                case _:
                    pass
        return commands

    def writable(self, peer: Peer) -> list[tuple[int, int]]:
        """(slot, generation) of every slot that the peer's first rank may write now."""
        slots = self.engine._state.slots
        words = slots.of_writer(ConnectionId(peer.ranks[0]))
        values = slots.generation[words].tolist()
        return list(zip(slots.slots_of(words).tolist(), values, strict=True))

    def seal(self, peer: Peer, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Seal a block per key in as many slots as there are; where. Nothing is written there."""
        places = self.writable(peer)[: len(keys)]
        slots, generations = arrays(places)
        packed = b"".join(keys[: len(places)])
        seal = Seal(peer.session, packed, slots, generations, bytes(16 * len(places)))
        self.hear(peer.ranks[0], seal)
        return places

    def ask(self, peer: Peer, lease: int, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Lease these keys; (slot, generation) of the run that is there."""
        self.sent.clear()
        self.hear(peer.scheduler, LeaseAsk(lease, b"".join(keys)))
        reply = self.last(peer.scheduler, LeaseReply)
        slots = np.frombuffer(reply.slots, "<u4").tolist()
        return list(zip(slots, np.frombuffer(reply.generations, "<u8").tolist(), strict=True))
