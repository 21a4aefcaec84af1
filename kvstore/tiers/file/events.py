"""What the file tier tells its driver. Lists are packed bytes, one entry per block:

keys 32 bytes each · checksums 16 bytes each · locations u64 native · good one byte, 0 or 1

A location is never 0, names a record for as long as its segment lives, and is opaque but for one
thing: of two locations below 2^63 the greater was written later, so it supersedes the other. One at
or above 2^63 is a record of another node; any of them is as good as another.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.record import Scope


class RecordSet(msgspec.Struct, frozen=True):
    """Records of one scope. `locations` u64 native, `keys` 32 bytes each."""

    scope: Scope
    keys: bytes
    locations: bytes


class Known(msgspec.Struct, frozen=True):
    """These blocks are on disk: found at start, newest segment first, or stored by another node."""

    scope: Scope
    keys: bytes
    locations: bytes
    checksums: bytes


class RecoveryDone(msgspec.Struct, frozen=True):
    """Every segment that was there at start has been looked at."""


class Written(msgspec.Struct, frozen=True):
    """A write ended: a location per block, 0 = not written. Its slots are free to be reused."""

    job: int
    locations: bytes


class Read(msgspec.Struct, frozen=True):
    """A read truly ended: a byte per block, 1 = the slot holds the verified block."""

    job: int
    good: bytes


class Late(msgspec.Struct, frozen=True):
    """The deadline passed with I/O still in the kernel: its slots are in use until the job's
    `Read` or `Written` comes, which may be never."""

    job: int


class Reclaim(msgspec.Struct, frozen=True):
    """Room is needed: answer with `FileTier.reclaim(segment, keep)`. Lists what no void covers;
    whether a location is still the one in use for its key, the engine knows."""

    segment: int
    records: tuple[RecordSet, ...]


class Moved(msgspec.Struct, frozen=True):
    """Blocks that a reclaimed segment kept have new locations; the old ones are gone."""

    scope: Scope
    keys: bytes
    old_locations: bytes
    locations: bytes


class Gone(msgspec.Struct, frozen=True):
    """Records vanished: damaged, a segment lost, a foreign one deleted by its owner."""

    scope: Scope
    keys: bytes
    locations: bytes
    damaged: bool = False
    """They were read, and are not what was stored there."""


class FileScrubbed(msgspec.Struct, frozen=True):
    """The background scrub verified so much since it last spoke; what is bad is told as `Gone`."""

    blocks: int
    size_bytes: int
    bad_key: bytes
    """Of the one block that is not what was stored there; empty: all are good."""
    pass_ended: bool
    """Everything was looked at once more."""


class Suspended(msgspec.Struct, frozen=True):
    """Calls are refused at once from now on, but for one probe at a time: keep asking."""

    reason: str
    writes_only: bool


class Resumed(msgspec.Struct, frozen=True):
    """A probe succeeded: what a `Suspended` with the same `writes_only` said is over."""

    writes_only: bool


FileEvent = (
    Known
    | RecoveryDone
    | Written
    | Read
    | Late
    | Reclaim
    | Moved
    | Gone
    | FileScrubbed
    | Suspended
    | Resumed
)
