"""What the pure core needs from the world, as Protocols. Mechanisms implement them.

Clock   monotonic time                serve/clock.py, testing/clock.py
Tier    memory that holds slots       tiers/dram.py, tiers/memory.py (reference)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from kvstore.types import Generation, SlotId


class Capabilities(msgspec.Struct, frozen=True):
    """What a tier can do, asked of the tier itself, never guessed from its name."""

    shareable: bool
    """Its memory can be handed to another process as file descriptors."""
    huge_pages: bool
    persistent: bool


class Clock(Protocol):
    """Monotonic time. Wall time is never used for leases or deadlines."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


@runtime_checkable
class Tier(Protocol):
    """Memory of one tier, divided into slots by the engine core, which decides everything.

    The tier moves no block by itself. `slot` is in pages of PAGE_BYTES. Callers guarantee that
    ranges lie within `capacity_bytes`; implementations assert it.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What was found when the tier was opened."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that exist; fixed for the life of the tier."""
        ...

    @property
    def ready_bytes(self) -> int:
        """Bytes from the start whose pages have arrived; grows up to the capacity."""
        ...

    def raise_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Publish new generations. On return every reader sees them; old copies are void."""
        ...

    def generation(self, slot: SlotId) -> Generation:
        """The published generation of a slot."""
        ...

    def beat(self, now_ns: int) -> None:
        """Publish that the driver was alive at `now_ns`."""
        ...

    def view(self, slot: SlotId, length_bytes: int) -> memoryview:
        """The bytes of a slot, without a copy; valid until `close`."""
        ...

    def close(self) -> None:
        """Give the memory back. Mappings of other processes stay."""
        ...
