"""Messages between the engine core and the tiers about blocks on a disk: orders one way, events the
other; the same about copies in the memory of a GPU; and results of scrubs of any tier.

One vocabulary: `kvstore.engine.events` counts them among its own, the tier makes them, and the
shell between the two translates nothing. Lists are packed bytes, one entry per block:

keys 32 bytes each · checksums 16 bytes each · locations u64 native · good one byte, 0 or 1

A location is never 0, names a record for as long as its segment lives, and is opaque but for one
thing: of two locations below 2^63 the greater was written later and supersedes the other. Locations
at or above 2^63 are records of other nodes, without an order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES, Tier
from kvstore.wire.record import Scope, payload_pages


class _Move(msgspec.Struct, frozen=True):
    """Move blocks of one scope. `slots` u32 [n]: the first 4 KiB page of each in the arena."""

    job: int
    """Unique among the jobs under way."""
    scope: Scope
    keys: bytes
    slots: Any
    checksums: bytes
    """Checksums as made by the rank that stored the block."""

    @property
    def slots_bytes(self) -> int:
        """Bytes that the slots take in the arena."""
        return len(self.slots) * payload_pages(self.scope.block_bytes) * PAGE_BYTES

    def key(self, index: int) -> bytes:
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def checksum(self, index: int) -> bytes:
        return self.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]


class WriteFile(_Move, frozen=True):
    """Append these blocks, whose slots are pinned until FileWritten."""


class ReadFile(_Move, frozen=True):
    """Read these blocks into slots that are the tier's until FileRead, and verify them, without
    `checksums` by those in the records."""

    locations: bytes


class VoidFile(msgspec.Struct, frozen=True):
    """Void for good all blocks written so far for this tenant, space or both; (None, None): all
    blocks."""

    tenant: str | None
    space: bytes | None


class ReclaimFile(msgspec.Struct, frozen=True):
    """Free this segment, after the records at the locations `keep` (u64 each) were moved."""

    segment: int
    keep: bytes


class RaiseGenerations(msgspec.Struct, frozen=True):
    """Publish new generations of slots, before any later command is carried out. `slots` u32 [n],
    `generations` u64 [n]."""

    slots: Any
    generations: Any
    tier: Tier = Tier.DRAM


class Shown(msgspec.Struct, frozen=True):
    """Publish, in one order with RaiseGenerations, that slots of hbm (`targets`, u32 [n]) hold
    copies of slots of dram (`slots`, u32 [n]), until their generations are raised."""

    slots: Any
    targets: Any


class Promote(_Move, frozen=True):
    """Copy these blocks of dram into slots of hbm (`targets`, u32 [n]), which are the tier's until
    Promoted, and verify them there."""

    targets: Any


class MoveEnded(msgspec.Struct, frozen=True):
    """A job has truly ended: nothing writes to its slots any more. `good`: one byte per block, 1
    where the slot it was moved to holds the verified block."""

    job: int
    good: bytes


class Promoted(MoveEnded, frozen=True):
    """A Promote has ended."""

    trouble: str = ""
    """Why the device is no longer used, which voids all copies in hbm; empty: it is used."""


FileCommand = WriteFile | ReadFile | VoidFile | ReclaimFile
MemoryCommand = RaiseGenerations | Shown | Promote
"""Commands about slots of dram and of hbm."""


class FileBlocks(msgspec.Struct, frozen=True):
    """Blocks of one scope on disk."""

    scope: Scope
    keys: bytes
    locations: bytes


class FileKnown(FileBlocks, frozen=True):
    """The disk tier holds these blocks: found at start, newest segment first, or stored by another
    node."""

    checksums: bytes


class FileMoved(FileBlocks, frozen=True):
    """Blocks kept from a reclaimed segment have new locations; `locations` are void."""

    new_locations: bytes


class FileGone(FileBlocks, frozen=True):
    """The disk tier holds these blocks no more, at these locations or, without any, anywhere:
    damaged, a segment lost, a foreign one deleted by its owner."""

    damaged: bool = False
    """The blocks were read, and differ from those stored there."""


class FileWritten(msgspec.Struct, frozen=True):
    """A WriteFile ended: a location per block, 0 = not written. Its slots are free to be reused."""

    job: int
    locations: bytes


class FileRead(MoveEnded, frozen=True):
    """A ReadFile has ended. A block that is not good may still be good on disk (the tier was busy,
    slow or suspended): FileGone reports damage."""


class FileLate(msgspec.Struct, frozen=True):
    """A job is not worth waiting for any more. Its slots are in use until its FileRead or
    FileWritten comes, which may be never."""

    job: int


class FileReclaim(msgspec.Struct, frozen=True):
    """The tier needs the room of this segment: ReclaimFile answers. `parts` lists the records that
    no void covers; the engine knows whether a location is still in use for its key."""

    segment: int
    parts: tuple[FileKnown, ...]


class Scrubbed(msgspec.Struct, frozen=True):
    """Blocks and bytes of a tier that a background scrub verified since its last report.

    FileGone beside it reports damage on disk. Damage in dram is here: `slots` u32 each, with their
    `generations` u64, whose bytes did not match their checksums.
    """

    tier: Tier
    blocks: int
    size_bytes: int
    bad_key: bytes = b""
    """Key of the one damaged block on disk; empty: all are good."""
    slots: bytes = b""
    generations: bytes = b""
    pass_ended: bool = False
    """The scrub has completed a pass over all that the tier holds."""


class RecoveryDone(msgspec.Struct, frozen=True):
    """Every segment that was there at start has been looked at."""


class Suspended(msgspec.Struct, frozen=True):
    """The disk tier refuses all orders but one at a time, its probe: the driver must go on
    submitting."""

    reason: str
    writes_only: bool


class Resumed(msgspec.Struct, frozen=True):
    """A probe succeeded: ends the state of a `Suspended` with the same `writes_only`."""

    writes_only: bool


FileEvent = (
    FileKnown | FileMoved | FileGone | FileWritten | FileRead | FileLate | FileReclaim | Scrubbed
)
"""Events of a disk tier for the engine."""
FileTierEvent = FileEvent | RecoveryDone | Suspended | Resumed
"""All events of a disk tier; those beyond FileEvent are for its driver."""
