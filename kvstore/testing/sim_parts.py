"""The simulated parts around the world's real cores: arena, sockets, spaces, prompts.

Does not cover: the engine without a model (`sim_engine`), what happens when (`world`).
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque

import msgspec

from kvstore.tiers.memory import MemoryTier
from kvstore.types import Shard
from kvstore.wire.space import Space

FAULTS = (
    "engine killed",
    "rank killed",
    "scheduler hangs up",
    "rank hangs up",
    "node killed",
    "node stopped",
    "abort",
    "preempt",
    "byte flipped",
    "clear",
    "reset",
    "copy stalls",
    "slow",
)
HARMLESS = ("abort", "preempt", "copy stalls", "slow")
"""Faults that make no load fail."""
LAYOUTS: tuple[tuple[Shard, ...], ...] = (
    (Shard(0, 2, 0, 2),),
    (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)),
    (Shard(0, 1, 0, 2), Shard(1, 2, 0, 2)),
    (Shard(0, 2, 0, 2), Shard(0, 2, 0, 2)),
    (Shard(0, 2, 0, 1), Shard(0, 2, 0, 1), Shard(0, 2, 1, 2), Shard(0, 2, 1, 2)),
    (Shard(0, 1, 0, 2), Shard(0, 1, 0, 2), Shard(1, 2, 0, 2), Shard(1, 2, 0, 2)),
)
"""Shards by rank, of `sim_space`'s 2 layers and 2 heads: one rank; heads; stages; replicas of all
(MLA); replicas of each head; stages of replicas."""
TORN = b"torn"


class SimMemory:
    """An arena: generations in the reference tier, one word of bytes per slot beside it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.tier = MemoryTier(capacity_bytes=capacity_bytes)
        self.contents: dict[int, bytes] = {}
        self._pages: dict[int, int] = {}
        self._writes: Counter[int] = Counter()

    def begin_write(self, slot: int, pages: int) -> int:
        """Somebody begins to write there; all that his bytes touch is torn. Returns a ticket."""
        self._pages[slot] = pages
        for other, its_pages in self._pages.items():
            if other < slot + pages and slot < other + its_pages:
                self.contents[other] = TORN
                self._writes[other] += 1
        return self._writes[slot]

    def end_write(self, slot: int, data: bytes, ticket: int) -> bool:
        """The bytes lie there. False: somebody else began to write there meanwhile."""
        self.contents[slot] = data
        return self._writes[slot] == ticket


class SimSocket:
    """One connection; both directions keep their order."""

    def __init__(self, owner: str, rank: int | None, memory: SimMemory) -> None:
        self.owner = owner
        self.rank = rank
        """None: the scheduler's."""
        self.memory = memory
        self.to_node: deque[bytes] = deque()
        self.to_engine: deque[bytes | None] = deque()
        self.node_sees_end = False

    def cut(self, kept: int) -> None:
        """The process is gone; so many datagrams of its last ones were sent."""
        while len(self.to_node) > kept:
            self.to_node.pop()
        self.node_sees_end = True


class WorldResult(msgspec.Struct, frozen=True):
    """What one seed did."""

    seed: int
    events: int
    finished: int
    loaded_blocks: int
    trace: str
    faults: dict[str, int]


def sim_space(model: str) -> Space:
    """A space of small blocks; the two models differ in the size of theirs."""
    return Space(
        model=model,
        weights="w",
        dtype="float32",
        kv_dtype="float32",
        quantization="",
        attention_backend="sim",
        kv_layout="LBHNC",
        isa="",
        block_tokens=16,
        hash_block_tokens=16,
        layer_count=2,
        kv_head_count=2,
        token_bytes=64 if model == "model-a" else 2048,
        hash_algorithm="sha256_cbor",
        hash_seed="",
        engine_version="sim",
    )


def key_chains(source: random.Random) -> list[list[bytes]]:
    """A handful of key chains that share prefixes."""
    chains: list[list[bytes]] = []
    for number in range(source.choice((2, 4, 8))):
        shared = source.choice(chains)[: source.randrange(1, 12)] if chains else []
        own = [hashlib.sha256(f"{number}/{i}".encode()).digest() for i in range(len(shared), 24)]
        chains.append(shared + own)
    return chains
