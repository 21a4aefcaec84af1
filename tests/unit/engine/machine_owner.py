"""One engine instance as its own processes see it: what the state machine's model keeps of it."""

from __future__ import annotations

from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.messages import Quiesce
from kvstore.wire.space import ShardColumn, Space, slot_bytes
from tests.unit.engine.harness import (
    HALVES,
    LATENT,
    REPLICAS,
    SMALL,
    UNEVEN,
    WHOLE,
    Hellos,
    Node,
    space,
)

Place = tuple[int, int]
Content = tuple[str, Shard, int]
"""Model, shard and number of a block: what the bytes of a slot are."""

LARGE = space("large")
STAGES = (UNEVEN[0], UNEVEN[0], UNEVEN[1], UNEVEN[1])
"""Two stages of two replicas each."""
Kind = tuple[Space, tuple[Shard, ...]]
KINDS: tuple[Kind, ...] = (
    (SMALL, (WHOLE,)),
    (SMALL, HALVES),
    (SMALL, LATENT),
    (SMALL, REPLICAS),
    (LARGE, (WHOLE,)),
    (LARGE, UNEVEN),
    (LARGE, STAGES),
)


class Lease:
    """What a scheduler was promised."""

    def __init__(self, places: list[Place], until_ns: int, last_ns: int) -> None:
        self.places = places
        self.until_ns = until_ns
        self.last_ns = last_ns
        """However often it is renewed."""


class Owner:
    """One engine instance, as its own processes see it. Connection 0 is none."""

    def __init__(self, name: str, kind: Kind) -> None:
        space, self.shards = kind
        self.name = name
        self.process = -1 - len(self.shards) // 2
        """As the kernel has it, of all its ranks: engines of different kinds are in one."""
        self.hellos = Hellos(name, shards=self.shards, space=space)
        self.writers = self.hellos.writers
        self.scheduler = 0
        self.ranks = [0] * len(self.shards)
        self.connections: list[set[int]] = [set() for _ in self.shards]
        """Of the processes that live now, by rank."""
        self.starts = [0] * len(self.shards)
        self.session = 0
        self.heard = 0
        self.unused: list[list[Place]] = [[] for _ in self.shards]
        """Credits by rank; those that do not write have none."""
        self.old: list[tuple[int, int, Place]] = []
        """(rank, session, place) of credits that are used or void."""
        self.leases: dict[int, Lease] = {}

    @property
    def model(self) -> str:
        return self.hellos.space.model

    def content(self, rank: int, number: int) -> Content:
        return self.model, self.shards[rank], number

    def pages(self, rank: int, place: Place) -> set[int]:
        """Pages of the arena that the rank writes there."""
        size = slot_bytes(self.hellos.rank_hello(rank).groups[0].block_bytes)
        return set(range(place[0], place[0] + size // PAGE_BYTES))

    def check_columns(self, node: Node) -> None:
        """Every rank of the session that opened knows its column, and one of each writes."""
        for rank, connection in enumerate(self.ranks):
            told = node.last(connection, Quiesce)
            assert told.session == self.session
            number = self.hellos.columns.index(self.shards[rank])
            expected = (ShardColumn(number, writes=rank in self.writers),)
            assert told.columns == expected, f"rank {rank} is granted what is not its"
