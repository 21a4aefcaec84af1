"""Configuration of one node's engine. Its parts get it whole.

Does not cover: flags and files of an operator (`kvstore.config`).
"""

from __future__ import annotations

import msgspec

from kvstore.types import AdmissionMode
from kvstore.wire.load import Learned
from kvstore.wire.space import Slab


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and limits of one node."""

    incarnation: int
    arena_bytes: int
    slab_bytes: int
    """Size of a slab, a multiple of 64 KiB; no slot is larger than a slab."""
    generation_bytes: int
    """Size of the generation page's memfd, for Welcome."""
    block_count_max: int
    seed: int = 0
    """A random number, which no engine knows: none can choose keys that collide in a table."""
    first_generation: int = 1
    """Generation of every slot at the start: higher than any from an earlier process."""
    restarts: int = 0
    """Earlier processes of this node."""
    hbm: Slab | None = None
    """The slab in a GPU's memory, if there is one."""
    file_bytes: int = 0
    """Size of the disk tier; 0: there is none."""
    learned: Learned = Learned()
    """Paces measured by an earlier process."""
    connection_count_max: int = 256
    lease_ttl_ms: int = 10_000
    lease_count_max: int = 4096
    """Most leases of one session."""
    credit_share: float = 0.125
    credit_blocks_max: int = 512
    low_watermark: float = 0.02
    high_watermark: float = 0.05
    policy: str = "lru"
    """Eviction policy: a name of `policies.POLICIES`."""
    file_admission: AdmissionMode = AdmissionMode.ALL
    """Rule for the blocks that are written to the disk tier."""
    file_day_bytes: int = 0
    """Budget of disk writes in a day; 0: any amount."""
    file_spent_bytes: int = 0
    """Part of the budget that is used up at the start."""
    quotas: tuple[tuple[str, int], ...] = ()
    """Guaranteed bytes of dram by model label or tenant; the sum is at most all of dram."""
    tell_changes: bool = False
    """Whether `Changed` commands are wanted."""
    tell_offers: bool = False
    """Whether `BlocksChanged` commands are wanted."""
    tell_stories: bool = False
    """Whether `StoryTold` commands are wanted."""
    follows: bool = False
    """Whether `Follow` commands are wanted."""
    fetches: bool = False
    """Whether other nodes are asked for blocks that are not here."""
    node: str = ""
    """Name in the cluster."""
    landing_bytes: int = 0
    """Size of the landing slab, at the end of the arena, in whole slabs. 0: nothing is pushed to
    this node."""
    fetches_always: bool = False
    """Whether blocks are also fetched where computing them is as quick."""

    def of_hbm(self, slab: Slab) -> EngineConfig:
        """The same for the slots of hbm alone: one slab of copies, which no quota divides and no
        journal names."""
        its = {"arena_bytes": slab.size_bytes, "landing_bytes": 0, "first_generation": 1}
        return msgspec.structs.replace(self, policy="lru", quotas=(), **its)
