"""Rows of a node's answers, by topic: those of `kvstore.engine.why`, and of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from kvstore.engine.sessions import owners
from kvstore.engine.why import curve, explain, findings, ledger, report
from kvstore.errors import ProtocolError
from kvstore.index.feed import Trust
from kvstore.index.index import Member

UNKNOWN: Final = "unknown"
"""Shown as the trust in a node, if the index itself is stale."""
INDEX_IS_STALE: Final = "the index is stale"
_LOADS: Final = (
    *("dram_bytes", "dram_used_bytes", "file_bytes", "file_used_bytes"),
    *("blocks_hit", "blocks_missed", "saved_ms", "waited_ms"),
)
"""Fields of a node's load on the page."""


class MemberReport(msgspec.Struct, frozen=True):
    """A node of the cluster, as the index knows it."""

    node: str
    trust: str
    """exact, catching-up, stale or out; unknown, if the index is stale; or why it has no answer."""
    address: str
    """Address for peers."""
    incarnation: str
    sequence: int | None
    """Sequence number of the last update; None: not known."""
    engines: int | None = None
    """Number of engines that the node serves; None: not known."""
    models: str = ""
    """Models of these engines."""


class TransferReport(msgspec.Struct, frozen=True):
    """Duration of one part of fetches, or of one stage of pushes, since the start."""

    kind: str
    """ask: until the peer's answer; move: the transfer; verify; fetch: all of it; stages of pushes
    (`kvstore.peers.pushes`)."""
    backend: str
    count: int
    size_bytes: int
    bytes_per_s: int
    """Rate while the part was running."""
    p50_us: int
    p95_us: int
    p99_us: int


class MemoryReport(msgspec.Struct, frozen=True):
    """Blocks in an engine's own memory, by its KV events."""

    engine: str
    rank: int
    """Data-parallel rank of the engine."""
    space: str
    tenant: str
    state: str
    """live; joining or filling: a replay is under way; unreachable: the engine is."""
    blocks: int
    """For a prefix: its leading blocks."""
    left_out: int
    """Blocks with unknown keys, since the node reads the engine's events."""
    note: str = ""
    """Why its hits may be shorter than `blocks` says, and what to do."""


Row = msgspec.Struct
"""Any of the types of TOPICS."""
TOPICS: Final[dict[str, type[Row]]] = {
    "nodes": report.NodeReport,
    "unserved": owners.UnservedReport,
    "members": MemberReport,
    "engines": MemoryReport,
    "transfers": TransferReport,
    "tiers": report.TierReport,
    "quotas": report.QuotaReport,
    "savings": ledger.SavingsReport,
    "spaces": report.SpaceReport,
    "curve": curve.CurveReport,
    "blocks": report.BlockReport,
    "leases": report.LeaseReport,
    "jobs": report.JobReport,
    "requests": explain.RequestReport,
    "ranges": findings.RangeReport,
    "hashings": explain.HashingReport,
    "prefix": findings.RangeReport,
}
"""Topic → type of its rows."""

_R = TypeVar("_R", bound=Row)


def encode_rows(rows: Sequence[Row]) -> str:
    """Rows as JSON: a list of objects."""
    return msgspec.json.encode(rows).decode()


def decode_rows(kind: type[_R], text: str) -> list[_R]:
    """Rows of that kind. Raises ProtocolError: they are not; fields that are new here are left
    out."""
    try:
        return msgspec.json.decode(text, type=list[kind])  # type: ignore[valid-type]
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ProtocolError(f"rows of another version of kvstore: {error}") from None


def member_rows(
    members: Iterable[Member], index: Trust, count_max: int | None = None
) -> list[dict[str, Any]]:
    """Rows of the page of an index, those in doubt first, each with the load of its node."""
    ranked = sorted(members, key=lambda member: (member.trust is Trust.EXACT, member.node))
    return [
        msgspec.structs.asdict(member_report(each, index))
        | {name: getattr(each.load, name, None) for name in _LOADS}
        for each in ranked[:count_max]
    ]


def member_report(member: Member, index: Trust) -> MemberReport:
    """The row of a node in an index replica. `index`: trust in the replica itself."""
    trust = "out" if member.trust is None else member.trust.word
    is_known = index is not Trust.STALE and member.trust is not None
    return MemberReport(
        member.node,
        UNKNOWN if index is Trust.STALE else trust,
        member.address,
        f"{member.incarnation:016x}",
        member.sequence if is_known else None,
        len(member.engines) if is_known else None,
        ", ".join(sorted({each.model for each in member.engines if each.model})),
    )
