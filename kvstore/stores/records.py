"""Records of nodes and slots in a shared store: their bytes, and trust of this replica in the nodes
(pure).

Tokens, prompts, tenants and spaces are not in them: a (tenant, space) is a digest, a block the
engine's key, which is a digest, too. Names of nodes and engines, and addresses of nodes, are plain.

    polls, own writes ─▶ when each record last changed, by the clock of this replica ─▶ trust

No clock is shared: a node is as silent as its record, which every update gives another version. A
record of the first look may be that of a node long gone: it is stale until it changes.

Covers: forms and trust. Does not cover: content of the records (`kvstore.index.feed` decides it).
Ways for a record to be broken, each a ProtocolError: not one of these types for `msgspec`; a count
or version that is no number; a record without its body; a name that is no text. A writer to the
store can claim any location (ADR 10); blocks are verified when they are fetched, as with any index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.feed import FORGET_MS, OUT_MS, STALE_MS, Holder, Trust, trust_after, until_ms
from kvstore.index.index import Member, Statistics
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.load import Load

SCOPE_BYTES = 16
SLOT_BYTES = 4
SLOTS_GIVEN_MAX: Final = 1 << 31
"""More slot numbers than a store can give in its life: a greater number was forged."""
_COUNT_MAX: Final = 1 << 63
_TEXT_MAX: Final = 64
"""Characters of a broken value that an error message shows."""
_VERSION: Final = re.compile(rb"[0-9a-f]{1,32}\.[0-9]{1,18}")
_COUNTS: Final = ("entries", "rows", "evicted")

_T = TypeVar("_T")


_Number = Annotated[int, msgspec.Meta(ge=0)]
_Place = tuple[str, int, bytes, Annotated[int, msgspec.Meta(ge=0, lt=1 << 8 * SLOT_BYTES)]]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Record of a node, which other replicas read."""

    incarnation: Annotated[Incarnation, msgspec.Meta(ge=0)]
    replaced: tuple[Incarnation, ...]
    address: str
    sequence: _Number
    is_open: bool
    is_exact: bool
    """Whether all updates of the node are applied; with `is_short`, some blocks found no room."""
    is_short: bool
    load_numbers: tuple[_Number, ...] = ()
    """Fields of `Load`, in order; empty: none yet."""

    @property
    def load(self) -> Load | None:
        """Last load of its incarnation; None: none yet."""
        if not self.load_numbers:
            return None
        return Load(**dict(zip(Load.__struct_fields__, self.load_numbers, strict=False)))


class KeptSlots(msgspec.Struct, frozen=True, array_like=True):
    """Slots of a node by (engine, rank, scope), for the next replica that the node publishes to."""

    slots: list[_Place]
    coming: list[_Place] | None


class Polled(NamedTuple):
    """Decoded answer of the script POLL."""

    epoch: bytes
    void_count: int
    sizes: Statistics
    """Without the store's memory."""
    records: dict[str, tuple[bytes, Body, bytes]]
    """By node: version, body, and the version of the record at which a connection to the node's
    address was refused."""


def polled(answer: Sequence[Any]) -> Polled:
    """Decode the answer of the script POLL. Raises ProtocolError."""
    epoch, void, ids, *rest = answer
    if not 0 <= _count("the key ids", ids) < SLOTS_GIVEN_MAX:
        raise ProtocolError(f"the key ids is {int(ids)}, which is no number of a slot")
    entries, rows, evicted = (
        _count(f"{name} in the hash counts", value)
        for name, value in zip(_COUNTS, rest, strict=False)
    )
    records = dict(_record(*each) for each in rest[len(_COUNTS) :])
    sizes = Statistics(entries, rows, 0, evicted)
    return Polled(epoch, void, sizes, records)


def _count(name: str, value: bytes | int) -> int:
    try:
        count = int(value)
    except ValueError:
        count = _COUNT_MAX
    if abs(count) >= _COUNT_MAX:
        raise ProtocolError(f"{name} is {repr(value)[:_TEXT_MAX]}, which is no number")
    return count


def _record(
    name: bytes, version: bytes, body: bytes | None, gone: bytes
) -> tuple[str, tuple[bytes, Body, bytes]]:
    shown = repr(name[:_TEXT_MAX])[1:]
    try:
        node = name.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"the set nodes holds {shown}, which is no name") from None
    if body is None or not _VERSION.fullmatch(version):
        raise ProtocolError(f"the record of node {shown} is none")
    return node, (version, decode(Body, body), gone)


def encode(value: Body | KeptSlots | Holder) -> bytes:
    """Encode a record with msgpack."""
    return msgspec.msgpack.encode(value)


def decode(kind: type[_T], data: bytes) -> _T:
    """Decode a record of this type. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        raise ProtocolError(f"the store's record for a {kind.__name__} is none") from None


def scope_of(tenant: str, space: SpaceId) -> bytes:
    """The name of a (tenant, space) in the store."""
    return hashlib.blake2b(space + tenant.encode(), digest_size=SCOPE_BYTES).digest()


def slot_name(slot: int) -> bytes:
    """Name of a slot in the store: its number in 4 bytes, big-endian."""
    return slot.to_bytes(SLOT_BYTES, "big")


# ── trust ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Row:
    """Record of one node, and when it last changed by this replica's clock."""

    version: bytes
    body: Body
    changed_ms: int
    was_seen_to_change: bool
    is_gone: bool = False
    """Its address refused connections, and no update came since."""

    def trust(self, now_ms: int) -> Trust | None:
        """Trust in the node at this time; None: it is left out of answers."""
        if self.is_gone:
            return None
        body, silent_ms = self.body, now_ms - self.changed_ms
        is_exact = body.is_exact and not body.is_short
        trust = trust_after(silent_ms, is_open=body.is_open, is_exact=is_exact)
        if trust is not None and not self.was_seen_to_change:
            return Trust.STALE
        return trust

    def is_heard(self, now_ms: int) -> bool:
        """Whether some replica has a live stream of it."""
        return self.body.is_open and now_ms - self.changed_ms < STALE_MS


class View:
    """Records of all nodes, as polled or written by this replica."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._doubted: set[str] = set()
        """Nodes that are in answers, and not in sync."""
        self._review_ms = 0
        """Until then neither silence nor a poll changes the trust of a node."""
        self._is_first = True
        self._young_until_ms = 0

    def restart(self, now_ms: int) -> None:
        """Forget all records, because the store has another epoch."""
        self.rows.clear()
        self._review_ms = now_ms
        self._is_first = True
        self._young_until_ms = now_ms + OUT_MS

    def polled(self, records: dict[str, tuple[bytes, Body, bytes]], now_ms: int) -> None:
        """Take in all records of a poll, by node: version, body, and the version at which the
        node's address refused a connection."""
        for name in self.rows.keys() - records.keys():
            del self.rows[name]
        for name, (version, body, gone) in records.items():
            self._put(name, version, body, now_ms, was_seen_to_change=not self._is_first)
            self.rows[name].is_gone = gone == version
        self._review_ms = now_ms
        self._is_first = False

    def changed(self, name: str, version: bytes, body: Body, now_ms: int) -> None:
        """Take in a record that this replica has just written."""
        self._put(name, version, body, now_ms, was_seen_to_change=True)
        self._judge(name, now_ms)

    def gone(self, name: str, version: bytes) -> None:
        """Mark a node whose address refuses connections, if `version` is still that of its
        record."""
        row = self.rows.get(name)
        if row is not None and row.version == version:
            row.is_gone = True
            self._doubted.discard(name)

    def trust(self, now_ms: int) -> Trust:
        """Trust in the whole: EXACT if by all updates there are no other locations than those in an
        answer."""
        if now_ms >= self._review_ms:
            self._doubted.clear()
            self._review_ms = now_ms + OUT_MS
            for name in self.rows:
                self._judge(name, now_ms)
        is_whole = not self._doubted and now_ms >= self._young_until_ms
        return Trust.EXACT if is_whole else Trust.CATCHING_UP

    def _put(
        self, name: str, version: bytes, body: Body, now_ms: int, *, was_seen_to_change: bool
    ) -> None:
        row = self.rows.get(name)
        if row is None or row.version != version:
            self.rows[name] = Row(version, body, now_ms, was_seen_to_change or row is not None)

    def _judge(self, name: str, now_ms: int) -> None:
        row = self.rows[name]
        if row.trust(now_ms) in (None, Trust.EXACT):
            self._doubted.discard(name)
        else:
            self._doubted.add(name)
        self._review_ms = min(self._review_ms, until_ms(row.changed_ms, now_ms))

    def members(self, now_ms: int) -> list[Member]:
        """All nodes that are not forgotten, by name."""
        return [
            Member(name, its.incarnation, its.address, row.trust(now_ms), its.sequence, its.load)
            for name, row in sorted(self.rows.items())
            for its in (row.body,)
        ]

    def lost(self, now_ms: int) -> list[str]:
        """Nodes silent for so long that their blocks are to be forgotten."""
        return [n for n, row in self.rows.items() if now_ms - row.changed_ms >= FORGET_MS]
