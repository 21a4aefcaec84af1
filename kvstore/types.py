"""The identifiers and small values that every layer shares.

Distinct ids are distinct types; every struct is frozen. Sizes and offsets are bytes unless the
name ends in another unit.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from typing import Annotated, NewType, TypeVar

import msgspec

KEY_BYTES = 32
CHECKSUM_BYTES = 16
PAGE_BYTES = 4096
"""Alignment of slots, and the unit in which a `SlotId` counts."""
SLOT_BYTES_MIN = 64 << 10
"""Smallest slot: one generation word per this many bytes of arena."""
MOVING_SHARE = 4
"""Each kind of job may have at most 1 / MOVING_SHARE of the arena in motion."""
QUOTA_COUNT_MAX = 64
PAGES_PER_GENERATION = SLOT_BYTES_MIN // PAGE_BYTES

BlockKey = NewType("BlockKey", bytes)
"""The engine's own 32-byte chained block hash (`sha256_cbor`)."""

SpaceId = NewType("SpaceId", bytes)
"""32-byte fingerprint of all that changes the bytes of a block except its tokens."""

SlotId = NewType("SlotId", int)
"""First 4 KiB page of a slot in the arena: byte offset = slot * PAGE_BYTES, generation word =
slot // PAGES_PER_GENERATION. No slot is smaller than SLOT_BYTES_MIN, so no two share a word."""

Generation = NewType("Generation", int)
"""How often a slot was reused; u64, starts at 1, raised before every reuse."""

ConnectionId = NewType("ConnectionId", int)
"""One attached socket, numbered by the node; never reused in one incarnation."""

Incarnation = NewType("Incarnation", int)
"""Random non-zero u64 of one start of the node process."""


class AdmissionMode(enum.Enum):
    """Blocks admitted to the disk while its budget is not tight."""

    ALL = "all"
    SECOND_SIGHT = "second-sight"


class Tier(enum.IntEnum):
    """Memory that holds a block, in the order of speed: the fastest first."""

    HBM = 0
    DRAM = 1
    FILE = 2

    @property
    def title(self) -> str:
        """Name of the tier in texts for people, such as `the dram tier`."""
        return "the disk tier" if self is Tier.FILE else f"the {self.name.lower()} tier"


_Edge = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Shard(msgspec.Struct, frozen=True, order=True):
    """A canonical piece of a block: layers [begin, end) of KV heads [begin, end)."""

    layer_begin: _Edge
    layer_end: _Edge
    head_begin: _Edge
    head_end: _Edge


class EngineSource(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the KV events of one data-parallel rank of one engine."""

    engine: str
    rank: int
    tenant: str
    space: SpaceId
    endpoint: str = ""
    replay_endpoint: str = ""
    """Endpoint of replays; empty: none."""
    hash_seed: str = ""
    block_tokens: int = 0
    """Tokens of a block; 0: any number."""
    names_are_keys: bool = False
    """The engine's event hashes are whole, and are keys of this space."""


_K = TypeVar("_K")
_V = TypeVar("_V")


class Counts(Counter[_K]):
    """Counts of what there is: what comes down to 0 is not kept."""

    def drop(self, key: _K, count: int = 1) -> bool:
        """Count so many less. Returns whether none is left."""
        self[key] -= count
        if self[key]:
            return False
        del self[key]
        return True


class Latest(OrderedDict[_K, _V]):
    """The last `most` keys that were set, the oldest first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Bucket:
    """Amount that may be taken, `size` at first. As much again comes in each `period_ns`, at a
    steady rate, as far as there is room. Values are integers, so rounding errors do not add up."""

    def __init__(self, size: int, period_ns: int, *, taken: int = 0) -> None:
        """`taken`: how much less is left at first."""
        self.size, self._period_ns = size, period_ns
        # Times the period, so that one nanosecond's part is a whole number.
        self._level = (size - taken) * period_ns
        self._at_ns: int | None = None
        """Time up to which it is filled; None: before the first use."""

    def left(self, now_ns: int) -> int:
        """Amount that may be taken now; below 0 after more was taken than was left."""
        at_ns = now_ns if self._at_ns is None else self._at_ns
        self._at_ns = max(now_ns, at_ns)
        level = self._level + (self._at_ns - at_ns) * self.size
        self._level = min(self.size * self._period_ns, level)
        return self._level // self._period_ns

    def take(self, amount: int) -> None:
        """Take an amount; a negative one is given back."""
        self._level -= amount * self._period_ns
