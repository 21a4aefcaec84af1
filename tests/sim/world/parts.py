"""The simulated parts around the world's real cores: knobs, arena, spaces, prompts.

Does not cover: the engine without a model (`engine`), disk, node and sockets (`disk`,
`node`, `sockets`), what happens when (`world`).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import msgspec
import numpy as np

from kvstore.tier_events import Promote, Promoted, RaiseGenerations, Shown
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN, Shard, SlotId
from kvstore.units import KIB, MIB
from kvstore.wire.space import Slab, Space
from tests.kit.hello import space_of
from tests.kit.memory_tier import MemoryTier
from tests.sim.world.groups import Kind

DISK_CALL_FAULTS = (
    "read error",
    "write error",
    "sync error",
    "no descriptors",
    "disk full",
    "disk hangs",
    "disk slow",
    "misdirected read",
    "torn write",
)
"""Faults of a system call: the disk strikes by itself, with each call."""
DISK_FAULTS = (
    *DISK_CALL_FAULTS,
    "directory emptied",
    "directory swapped",
    "disk bit flipped",
    "node upgraded",
    "older layout",
    "power cut",
)
WARM_KILL, WARM_UPGRADE = "warm kill", "warm upgrade"
"""Only the node process ends; its supervisor keeps arena, journal and pidfds for the next."""
COPY_CALL_FAULTS = ("copy fails half way", "copy never ends", "one of several copies fails")
"""Faults of a copy between engine and arena: `copies` strikes by itself."""
CORRUPTIONS = ("arena scribbled", "byte flipped")
"""Bytes in dram change under everybody."""
CLUSTER_CALL_FAULTS = (
    "feed says it twice",
    "index slow",
    "read stops half way",
    "read never ends",
    "read brings wrong bytes",
)
"""Faults of a word, a question or a read between nodes: `net`, `index` and `transfer_worker`
strike by themselves."""
CLUSTER_FAULTS = (
    *CLUSTER_CALL_FAULTS,
    "partition",
    "partition one way",
    "connection lost",
    "index restarts",
    "index stopped",
    "index lags",
    "transfer worker dies",
    "node lies",
    "addresses swapped",
)
SELF_STRIKING = (
    *DISK_CALL_FAULTS,
    *COPY_CALL_FAULTS,
    *CLUSTER_CALL_FAULTS,
    "clock drifts",
    "node restarts in a step",
    "slow",
)
"""The others happen as events."""
FAULTS = (
    "engine killed",
    "engine stopped",
    "rank killed",
    "scheduler hangs up",
    "rank hangs up",
    "node killed",
    "node restarts in a step",
    WARM_KILL,
    WARM_UPGRADE,
    "node stopped",
    "machine suspended",
    "abort",
    "preempt",
    "clear",
    "reset",
    "copy stalls",
    "late write",
    *COPY_CALL_FAULTS,
    *CORRUPTIONS,
    "clock drifts",
    "slow",
    *DISK_FAULTS,
    *CLUSTER_FAULTS,
)
HARMLESS = (
    *("abort", "preempt", "copy stalls", "late write", *COPY_CALL_FAULTS, "clock drifts", "slow"),
    *("engine stopped", "disk bit flipped", *DISK_CALL_FAULTS[:-1]),
    *CLUSTER_FAULTS[:-1],
)
"""Faults that make no load of others fail: what is served is in dram and verified, whatever the
disk does; and who is hit itself is known."""
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
DAMAGED = b"damaged"
_WORD_BYTES = 16


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and limits of one world, by its seed."""

    arena_slots: int = 128
    """Of the smallest size."""
    ttl_ms: int = 10_000
    credit_share: float = 0.5
    has_disk: bool = False
    disk_bytes: int = 2 * MIB
    segment_bytes: int = 256 * KIB
    disk_rows: int = 1024
    """Blocks that the engine can know of beside those in dram."""
    io_deadline_ms: int = 2000
    io_cooldown_ms: int = 1000
    lookup_deadline_ms: int = 20
    prefill_ns_per_token: int = 20_000_000
    """What the engine thinks that computing costs; steps of the world take milliseconds."""
    cooldown_ms: int = 1000
    shadow_every: int = 0
    """Every n-th hit is computed, and compared."""
    group_kinds: tuple[Kind, ...] = ("full",)
    """Of the KV cache groups of engines."""
    quotas: tuple[tuple[str, int], ...] = ()
    """Guaranteed bytes of dram by tenant."""
    machines: int = 1
    has_landing: bool = False
    """The end of each arena is for pushes."""
    has_doubts: bool = False
    """Ranks distrust shards of what is being copied."""
    hbm_slabs: int = 0
    """In the GPU of a machine's engines."""
    index_replicas: int = 0
    """0: machines know nothing of each other's memory."""
    is_shared: bool = False
    """One directory for the file tiers of all machines."""
    poll_interval_ms: int = 3000
    grace_ms: int = 10_000

    @property
    def arena_bytes(self) -> int:
        return self.arena_slots * SLOT_BYTES_MIN

    @property
    def slab_bytes(self) -> int:
        return max(SLOT_BYTES_MIN * 2, self.arena_bytes // 4)


_SEVERAL_GROUPS: tuple[tuple[Kind, ...], ...] = (
    ("full", "window"),
    ("full", "state"),
    ("full", "window", "state", "full"),
)


def draw_knobs(source: random.Random, seed: int, *, machines: int = 0) -> Knobs:
    """All of a world's; 0 machines: 1 to 3."""
    knobs = _draw_machines(source, machines)
    shadow_every = 2 if seed % 5 == 3 else 0
    # Of four slots an engine's share is one less while a block is written to disk.
    slots = max(knobs.arena_slots, 8 if knobs.has_disk else 4)
    hbm_slabs = random.Random(f"hbm of {seed}").choice((1, 1, 2)) if seed % 8 == 5 else 0
    knobs = msgspec.structs.replace(
        knobs,
        shadow_every=shadow_every,
        arena_slots=slots,
        hbm_slabs=hbm_slabs,
        has_doubts=bool(hbm_slabs),
    )
    knobs = _with_groups_or_quotas(seed, knobs)
    return knobs if seed % 4 else _as_cluster(seed, knobs, machines=machines)


def has_quotas(seed: int) -> bool:
    """Whether tenants share the memory of its nodes."""
    return seed % 7 == 2


def _with_groups_or_quotas(seed: int, knobs: Knobs) -> Knobs:
    """Two worlds of seven have one of them."""
    if seed % 7 == 1:
        kinds = random.Random(f"groups of {seed}").choice(_SEVERAL_GROUPS)
        return msgspec.structs.replace(knobs, group_kinds=kinds)
    if has_quotas(seed):
        part = random.Random(f"quotas of {seed}").choice((0.4, 0.5, 0.6))
        # Enough for a prompt in the part that credits are of a share; no multiple of any slot, so
        # that what is left of a share is less than one.
        knobs = msgspec.structs.replace(knobs, arena_slots=32)
        quotas = (("t", int(knobs.arena_bytes * part) - PAGE_BYTES),)
        return msgspec.structs.replace(knobs, quotas=quotas)
    return knobs


def _draw_machines(source: random.Random, machines: int) -> Knobs:
    """Pools of 4 to 4,096 slots, time limits divided by 1 to 600."""

    def limit(ms: int) -> int:
        return max(1, ms // source.choice((1, 1, 10, 60, 600)))

    drawn = source.choice((1, 1, 1, 1, 2, 3))
    machines = machines or drawn
    return Knobs(
        machines=machines,
        is_shared=machines > 1 or source.random() < 0.1,
        poll_interval_ms=limit(3000),
        grace_ms=limit(10_000),
        arena_slots=source.choice((4, 8, 8, 12, 16, 24, 24, 48, 96, source.choice((512, 4096)))),
        ttl_ms=source.choice((20, 500, 10_000)),
        credit_share=source.choice((0.125, 0.5)),
        has_disk=source.random() < 0.75 or machines > 1,
        disk_bytes=source.choice((2, 2, 3, 8)) * MIB,
        segment_bytes=source.choice((192, 256, 512)) * KIB,
        disk_rows=source.choice((64, 1024, 4096)),
        io_deadline_ms=limit(2000),
        io_cooldown_ms=limit(1000),
        # The second one is of a deadline that is gone: worlds stay those of their seeds.
        lookup_deadline_ms=(max(20, limit(1000)), limit(2000))[0],
        prefill_ns_per_token=source.choice((100_000, 20_000_000)),
        cooldown_ms=limit(1000),
    )


def draw_faults(source: random.Random, seed: int, *, share: float) -> set[str]:
    """Each with this probability. Chance of their own for those of clusters: the other worlds stay
    as they are."""
    alone = [name for name in FAULTS if name not in CLUSTER_FAULTS]
    drawn = {name for name in alone if source.random() < share}
    source = random.Random(f"faults between nodes of {seed}")
    return drawn | {name for name in CLUSTER_FAULTS if source.random() < share}


def _as_cluster(seed: int, knobs: Knobs, *, machines: int) -> Knobs:
    """Every fourth world is one."""
    source = random.Random(f"cluster of {seed}")
    return msgspec.structs.replace(
        knobs,
        index_replicas=source.choice((1, 2)),
        has_landing=seed % 8 == 4,
        # Of every second one with pushes, several shards, and hbm.
        has_doubts=seed % 16 == 12,
        hbm_slabs=1 if seed % 16 == 12 else 0,
        machines=machines or max(knobs.machines, source.choice((2, 2, 3))),
        # What lies in a shared directory is found there, and not fetched.
        is_shared=knobs.is_shared and source.random() < 0.25,
        arena_slots=max(knobs.arena_slots, source.choice((24, 48, 96, 512))),
        lookup_deadline_ms=max(knobs.lookup_deadline_ms, source.choice((20, 500))),
        prefill_ns_per_token=20_000_000,
    )


class SharedSlab(Protocol):
    """`slab.SimSlab`, as those see it who have the memory of a process."""

    slab: Slab
    is_void: bool

    def place(self, slot: int) -> int: ...
    def read(self, place: int, length: int) -> bytes: ...
    def take(self, command: RaiseGenerations | Shown | Promote) -> None: ...
    def end_one(self) -> list[Promoted]: ...
    def under_way(self) -> list[tuple[int, int]]: ...
    def has_left(self, slots: Iterable[int]) -> None: ...
    def check(self) -> None: ...


class SimMemory:
    """An arena of real bytes, and the generation page of one process in the reference tier."""

    def __init__(self, capacity_bytes: int) -> None:
        self.tier = MemoryTier(capacity_bytes=capacity_bytes)
        self.bytes = self.tier.view(SlotId(0), capacity_bytes)
        self.is_damaged = False
        """Bytes changed that nobody wrote."""
        self.slab: SharedSlab | None = None
        """Of the process that has it mapped."""
        self._pages: dict[int, int] = {}
        self._writes: Counter[int] = Counter()
        self.is_void = False
        """Of a process whose memory is another's by now."""

    def taken_over(self, first_generation: int) -> SimMemory:
        """The same bytes with the generation page of the next process; in this one all is void."""
        self.is_void = True
        if self.slab is not None:
            self.slab.is_void = True
        heir = copy.copy(self)
        capacity_bytes = len(self.bytes)
        heir.tier = MemoryTier(capacity_bytes=capacity_bytes)
        slots = range(0, capacity_bytes // PAGE_BYTES, PAGES_PER_GENERATION)
        heir.tier.raise_generations(slots, [first_generation] * len(slots))
        heir.is_void = False
        return heir

    def generation(self, slot: SlotId) -> int:
        """As whoever has this page mapped reads it; no slot has generation 0."""
        return 0 if self.is_void else self.tier.generation(slot)

    def read(self, slot: int, length: int) -> bytes:
        """What lies there now."""
        return bytes(self.bytes[slot * PAGE_BYTES : slot * PAGE_BYTES + length])

    def copy(self, slot: SlotId, into: memoryview) -> None:
        """What lies there now, as a tier reads."""
        into[:] = self.read(slot, len(into))

    def begin_write(self, slot: int, pages: int, length: int) -> int:
        """Somebody begins to write there: what lies there is torn. Returns a ticket."""
        self._pages[slot] = pages
        for other, its_pages in self._pages.items():
            if other < slot + pages and slot < other + its_pages:
                self._writes[other] += 1
        self._put(slot, TORN * (length // len(TORN)))
        return self._writes[slot]

    def end_write(self, slot: int, data: bytes, ticket: int) -> bool:
        """The bytes lie there. False: somebody else began to write there meanwhile."""
        self._put(slot, data)
        return self._writes[slot] == ticket

    def put(self, slot: int, data: bytes) -> None:
        """A part of a write that goes on."""
        self._put(slot, data)

    def flip(self, source: random.Random) -> bool:
        """A bit of some block changes, if one was ever written."""
        if self._pages:
            slot = source.choice(sorted(self._pages))
            at = slot * PAGE_BYTES + source.randrange(_WORD_BYTES * 4)
            self.bytes[at] ^= 1 << source.randrange(8)
            self.is_damaged = True
        return bool(self._pages)

    def scribble(self, source: random.Random) -> None:
        """Somebody who has the arena mapped writes where nothing was granted to him."""
        self.is_damaged = True
        words = len(self.bytes) // SLOT_BYTES_MIN
        for _ in range(source.randint(1, 8)):
            slot = source.randrange(words) * PAGES_PER_GENERATION
            self._put(slot, source.randbytes(source.randint(1, PAGE_BYTES)))

    def _put(self, slot: int, data: bytes) -> None:
        self.bytes[slot * PAGE_BYTES : slot * PAGE_BYTES + len(data)] = data


@functools.lru_cache(maxsize=256)
def payload(word: bytes, length: int) -> bytes:
    """The bytes of a block that stands for `word`: no two pages of any blocks are alike."""
    digest = hashlib.blake2b(word, digest_size=_WORD_BYTES).digest()
    rest = np.arange(length // 8, dtype=np.uint64) + np.uint64(int.from_bytes(digest[:7], "little"))
    return digest + rest.tobytes()[_WORD_BYTES:]


class Words:
    """The oracle's memory: which word the bytes of a block stand for."""

    def __init__(self) -> None:
        self._words: dict[bytes, bytes] = {}

    def payload(self, word: bytes, length: int) -> bytes:
        data = payload(word, length)
        self._words[data[:_WORD_BYTES]] = word
        return data

    def word(self, data: bytes) -> bytes:
        """The word, if every byte is as it was."""
        word = self._words.get(data[:_WORD_BYTES])
        return word if word is not None and payload(word, len(data)) == data else DAMAGED


class WorldResult(msgspec.Struct, frozen=True):
    """What one seed did."""

    seed: int
    events: int
    finished: int
    loaded_blocks: int
    promoted_blocks: int
    """Read from disk into dram."""
    foreign_blocks: int
    """Asked of the disk, and another machine's."""
    slab_blocks: int
    """Loaded from the memory of a GPU."""
    kept_blocks: int
    """That a node process found in the memory of the one before."""
    fetched_blocks: int
    """That came from other nodes."""
    pushes: int
    """Requests that one engine prefilled for another."""
    pushed_blocks: int
    """That came with them."""
    trace: str
    hit_share: float
    """Of the blocks of a new workload after healing, on the machine that found least."""
    faults: dict[str, int]


def sim_space(model: str) -> Space:
    """A space of small blocks; the two models differ in the size of theirs."""
    return space_of(
        model,
        weights="w",
        attention_backend="sim",
        layer_count=2,
        kv_head_count=2,
        # Layers of one size, and of two.
        head_bytes=(1 << 10,) if model == "model-a" else (24 << 10, 40 << 10),
        hash_seed="",
        kv_format="sim",
    )


def key_chains(source: random.Random, count: int = 0) -> list[list[bytes]]:
    """Key chains that share prefixes; 0: a handful."""
    chains: list[list[bytes]] = []
    for number in range(count or source.choice((1, 2, 4, 8))):
        shared = source.choice(chains)[: source.randrange(1, 12)] if chains else []
        own = [hashlib.sha256(f"{number}/{i}".encode()).digest() for i in range(len(shared), 24)]
        chains.append(shared + own)
    return chains
