"""Values that moves and lookups report to the trail, for `why` to explain afterwards: codes, times.

Does not cover: the records that are kept (`why.trail`), counters.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.units import NS_PER_US
from kvstore.wire.messages import Story

if TYPE_CHECKING:
    from kvstore.engine.why.explain import RequestReport
    from kvstore.engine.why.findings import RangeReport


class Origin(enum.IntEnum):
    """Place of a leased block when it was asked for."""

    DRAM = 0
    FILE = 1
    PEER = 2


Origins = NDArray[np.int64]
"""An `Origin` per block, and from bit SEARCH_SHIFT on the number of the index query that led to
it."""
SEARCH_SHIFT: Final = 8


def tiers_of(origins: Origins) -> NDArray[np.int64]:
    """The `Origin` of each block alone."""
    return origins & ((1 << SEARCH_SHIFT) - 1)


class Wanted(NamedTuple):
    """Result of asking other nodes for blocks of a lookup: how many may come, and by which
    query."""

    coming: int = 0
    """Number of leading blocks that are on their way from other nodes, or may be."""
    number: int = 0
    """Number of the index query or fetch that brings these blocks, or that brought none; 0: other
    nodes were not asked."""
    at: int = 0
    """Place of the lookup's first key among the keys of that query or fetch."""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One push of a request's blocks, to this node (`side` decode) or from it for a grant (`side`
    prefill). Times are in µs since the blocks were asked for; 0: never."""

    side: str
    node: str
    """The node at the other end."""
    group: int = 0
    first_block: int = 0
    """Number of the first block, in the prompt (decode) or in the grant (prefill)."""
    blocks: int
    held: int = 0
    """Blocks of these that were here before."""
    pushed: int
    reason: str
    """Why the rest of the blocks did not come; empty: all came."""
    granted_us: int = 0
    first_us: int = 0
    last_us: int = 0
    sealed_us: int = 0
    ended_us: int = 0


class PushTimes(msgspec.Struct):
    """When a push reached its stages, on the node's clock; 0: not yet."""

    since_ns: int
    granted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    sealed_ns: int = 0

    def moved(self, now_ns: int) -> None:
        """Note that bytes came, or were written, at this time."""
        self.first_ns, self.last_ns = self.first_ns or now_ns, now_ns

    def as_us(self, now_ns: int) -> dict[str, int]:
        """Fields of a PushReport made now: name of each time, in µs since `since_ns`. A stage
        reached in the step that asked counts as 1 µs, because 0 means never."""
        reached = {f.removesuffix("_ns"): getattr(self, f) for f in self.__struct_fields__[1:]}
        reached["ended"] = now_ns
        return {
            f"{name}_us": max(1, (at_ns - self.since_ns) // NS_PER_US) if at_ns else 0
            for name, at_ns in reached.items()
        }


class StoryTold(msgspec.Struct, frozen=True):
    """A request ended, for traces. Only if EngineConfig.tell_stories."""

    row: RequestReport
    ranges: tuple[RangeReport, ...]
    story: Story
    ended_ns: int
    """When the request ended, on the node's clock."""
    block_bytes: int
    """Size of a block of the first KV cache group, all shards together; 0: not known."""


class Staged(msgspec.Struct, frozen=True):
    """Duration of a stage of pushes from a peer, for metrics and warnings; the stage has ended."""

    stage: Literal["push_seal", "push_token"]
    """push_seal: from the message that blocks are there until they are sealed. push_token: from the
    end of the push until the first token of its request."""
    node: str
    took_ns: int
    size_bytes: int
    cause: int
