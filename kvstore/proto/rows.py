"""Rows that a node answers with, by topic: those of `kvstore.engine.why`, and of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from kvstore.engine import (
    BlockReport,
    HashingReport,
    JobReport,
    LeaseReport,
    NodeReport,
    QuotaReport,
    RangeReport,
    RequestReport,
    SpaceReport,
    TierReport,
    UnservedReport,
)
from kvstore.errors import ProtocolError
from kvstore.index.feed import Trust
from kvstore.index.index import Member

UNKNOWN: Final = "unknown"
"""Of a node, by an index that is stale itself."""
INDEX_IS_STALE: Final = "the index is stale: it does not know who is there"


class MemberReport(msgspec.Struct, frozen=True):
    """A node of the cluster, as the index knows it."""

    node: str
    trust: str
    """exact, catching-up, stale or out; unknown, if the index is stale; or why nobody can say."""
    address: str
    """Where peers find it."""
    incarnation: str
    sequence: int
    """Of the last thing that it told the index."""
    engines: int = 0
    """That it serves."""
    models: str = ""
    """Of these engines."""


class TransferReport(msgspec.Struct, frozen=True):
    """How long one part of reading from other nodes took, since the start."""

    kind: str
    """ask: until the peer lent; move: the mover's reading; verify; fetch: all of it."""
    backend: str
    count: int
    size_bytes: int
    bytes_per_s: int
    """While it was going on."""
    p50_us: int
    p95_us: int
    p99_us: int


class MemoryReport(msgspec.Struct, frozen=True):
    """What an engine holds in its own memory, by its KV events."""

    engine: str
    rank: int
    """Data-parallel."""
    space: str
    tenant: str
    state: str
    """live; joining or filling: a replay is under way; away: it is not reached."""
    blocks: int
    """Of a prefix: its leading ones."""
    left_out: int
    """Blocks whose keys could not be told, since it is followed."""


Row = (
    NodeReport
    | UnservedReport
    | MemoryReport
    | TransferReport
    | MemberReport
    | TierReport
    | QuotaReport
    | SpaceReport
    | BlockReport
    | LeaseReport
    | JobReport
    | RequestReport
    | RangeReport
    | HashingReport
)

TOPICS: Final[dict[str, type[Row]]] = {
    "nodes": NodeReport,
    "unserved": UnservedReport,
    "members": MemberReport,
    "engines": MemoryReport,
    "transfers": TransferReport,
    "tiers": TierReport,
    "quotas": QuotaReport,
    "spaces": SpaceReport,
    "blocks": BlockReport,
    "leases": LeaseReport,
    "jobs": JobReport,
    "requests": RequestReport,
    "ranges": RangeReport,
    "hashings": HashingReport,
    "prefix": RangeReport,
}
"""What a node can be asked for, and what rows of it are."""

_R = TypeVar("_R", bound=Row)


def encode_rows(rows: Sequence[Row]) -> str:
    """JSON: a list of objects."""
    return msgspec.json.encode(rows).decode()


def decode_rows(kind: type[_R], text: str) -> list[_R]:
    """Rows of that kind. Raises ProtocolError: they are not; fields that are new here are left
    out."""
    try:
        return msgspec.json.decode(text, type=list[kind])  # type: ignore[valid-type]
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ProtocolError(f"rows of another version of kvstore: {error}") from None


def member_report(member: Member, index: Trust) -> MemberReport:
    """A node as a replica of the index knows it, which is believed so far itself."""
    trust = "out" if member.trust is None else member.trust.word
    return MemberReport(
        member.node,
        UNKNOWN if index is Trust.STALE else trust,
        member.address,
        f"{member.incarnation:016x}",
        member.sequence,
        len(member.engines),
        ", ".join(sorted({each.model for each in member.engines if each.model})),
    )
