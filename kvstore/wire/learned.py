"""Measurements of a node and of its engines, and their form on disk.

    page-padded JSON   {"magic": "kvstore learned", "version": 1, "checksum": hex, "learned": {…}}

The checksum is xxh3-128 of the bytes of `learned`. Only guesses to start from: a wrong one costs
time and never a byte, and the first measurements replace it.

The used part of a day's budget of disk writes is kept with the wall clock's time, because only that
goes on while no node runs. The clock may be wrong by any amount: set back, it refills nothing; set
forward, a day's budget is full, as if nothing had been kept. Leases and deadlines never see it.

Ways to be broken: longer than LEARNED_BYTES_MAX; not JSON; another magic or version; a checksum
that differs; a field of another type. Each means: nothing was learned. A number out of bounds is
moved to the nearest bound, here and on its way in from an engine.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import xxhash

from kvstore.types import PAGE_BYTES
from kvstore.wire.bounds import I64, Name, Small

LEARNED_BYTES_MAX: Final = 16 * PAGE_BYTES
SPACES_MAX: Final = 32
_MAGIC: Final = "kvstore learned"
_VERSION: Final = 1
_DAY_S: Final = 86_400

COMPUTE_NS_MIN, COMPUTE_NS_MAX = 1_000, 100_000_000
"""Bounds per computed token: a million tokens a second, and ten."""
LOAD_NS_MIN, LOAD_NS_MAX = 1, 100_000_000
"""Bounds per token copied from dram."""
DISK_NS_PER_MIB_MIN, DISK_NS_PER_MIB_MAX = 10_000, 10**12
"""Bounds per MiB read from disk: 100 GB/s, and 1 kB/s."""

Hex = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class SpacePace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements that engines of one tenant and space reported; 0: none."""

    tenant: Name
    space: Hex
    compute_ns_per_token: I64 = 0
    load_ns_per_token: I64 = 0


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Used part of the budget of disk writes, and the time of this reading."""

    size_bytes: I64 = 0
    at_s: I64 = 0
    """Time of the wall clock."""


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measurements of a node; 0 and empty: none yet."""

    disk_ns_per_mib: I64 = 0
    spaces: Annotated[tuple[SpacePace, ...], msgspec.Meta(max_length=LEARNED_BYTES_MAX)] = ()
    spent: Spent = Spent()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    magic: Name
    version: Small
    checksum: Name
    learned: msgspec.Raw


class NotLearned(ValueError):
    """The bytes are damaged or of another version."""


def clamp(value: int, low: int, high: int) -> int:
    """The nearest value within the bounds; 0, nothing was measured, stays 0."""
    return min(max(value, low), high) if value else 0


def within_bounds(learned: Learned) -> Learned:
    """The measurements with every number moved into its bounds, and of the first SPACES_MAX spaces
    only."""
    return Learned(
        clamp(learned.disk_ns_per_mib, DISK_NS_PER_MIB_MIN, DISK_NS_PER_MIB_MAX),
        tuple(
            msgspec.structs.replace(
                pace,
                compute_ns_per_token=clamp(
                    pace.compute_ns_per_token, COMPUTE_NS_MIN, COMPUTE_NS_MAX
                ),
                load_ns_per_token=clamp(pace.load_ns_per_token, LOAD_NS_MIN, LOAD_NS_MAX),
            )
            for pace in learned.spaces[:SPACES_MAX]
        ),
        learned.spent,
    )


def still_spent(spent: Spent, *, day_bytes: int, now_s: int) -> int:
    """How much of a day's budget is used up now: what was then, less what came in since."""
    passed_s = min(max(0, now_s - spent.at_s), _DAY_S)
    return max(0, min(spent.size_bytes, day_bytes) - day_bytes * passed_s // _DAY_S)


def encode_learned(learned: Learned) -> bytes:
    """The bytes to keep, in whole pages."""
    body = msgspec.json.encode(learned)
    kept = _Kept(_MAGIC, _VERSION, xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))
    text = msgspec.json.encode(kept) + b"\n"
    padded = text + b" " * (-len(text) % PAGE_BYTES)
    assert len(padded) <= LEARNED_BYTES_MAX, len(padded)
    return padded


def decode_learned(text: bytes) -> Learned:
    """Decode stored measurements.

    Raises:
        NotLearned: the text was damaged, or made by another version.
    """
    try:
        kept = msgspec.json.decode(text, type=_Kept)
        body = bytes(kept.learned)
        if kept.magic != _MAGIC or xxhash.xxh3_128_hexdigest(body) != kept.checksum:
            raise NotLearned("it is damaged")
        if kept.version != _VERSION:
            raise NotLearned(f"it is of version {kept.version}, where {_VERSION} is read")
        return within_bounds(msgspec.json.decode(body, type=Learned))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise NotLearned("it is damaged") from None
