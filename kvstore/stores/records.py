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
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.feed import Body, Holder, KnownNode, Trust
from kvstore.index.holdings import Statistics
from kvstore.index.index import Nodes
from kvstore.types import SpaceId

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


_Place = tuple[str, int, bytes, Annotated[int, msgspec.Meta(ge=0, lt=1 << 8 * SLOT_BYTES)]]


class KeptSlots(msgspec.Struct, frozen=True, array_like=True):
    """Slots of a node by (engine, rank, scope), for the next replica that the node publishes to."""

    slots: list[_Place]
    coming: list[_Place] | None


Record = tuple[bytes, Body, bytes]
"""Version, body, and the version of the record at which a connection to the node's address was
refused."""


def polled(answer: Sequence[Any]) -> tuple[bytes, int, Statistics, dict[str, Record]]:
    """(epoch, number of void slots, sizes without the store's memory, records by node) in the
    answer of the script POLL. Raises ProtocolError."""
    epoch, void_count, ids, *rest = answer
    if not 0 <= _count("the key ids", ids) < SLOTS_GIVEN_MAX:
        raise ProtocolError(f"the key ids is {int(ids)}, which is no number of a slot")
    entries, rows, evicted = (
        _count(f"{name} in the hash counts", value)
        for name, value in zip(_COUNTS, rest, strict=False)
    )
    records = dict(_record(*each) for each in rest[len(_COUNTS) :])
    return epoch, void_count, Statistics(entries, rows, 0, evicted), records


def _count(name: str, value: bytes | int) -> int:
    try:
        count = int(value)
    except ValueError:
        count = _COUNT_MAX
    if abs(count) >= _COUNT_MAX:
        raise ProtocolError(f"{name} is {repr(value)[:_TEXT_MAX]}, which is no number")
    return count


def _record(name: bytes, version: bytes, body: bytes | None, gone: bytes) -> tuple[str, Record]:
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


class Row(KnownNode):
    """Record of one node, and when it last changed by this replica's clock."""

    def __init__(self, version: bytes, body: Body, changed_ms: int, *, is_first: bool) -> None:
        """`is_first`: of the first look, and so maybe that of a node long gone."""
        super().__init__(body, changed_ms)
        self.version = version
        self._is_first = is_first

    def trust(self, now_ms: int) -> Trust | None:
        trust = super().trust(now_ms)
        return Trust.STALE if self._is_first and trust is not None else trust


class View(Nodes[Row]):
    """Records of all nodes, as polled or written by this replica, since the store has its present
    epoch."""

    _is_first = True
    """Whether no poll was taken in yet."""

    def polled(self, records: dict[str, Record], now_ms: int) -> None:
        """Take in all records of a poll, by node."""
        for name in self.nodes.keys() - records.keys():
            del self.nodes[name]
        for name, (version, body, gone) in records.items():
            self._put(name, version, body, now_ms)
            self.nodes[name].is_refused = gone == version
        self._review_ms = now_ms
        self._is_first = False

    def changed(self, name: str, version: bytes, body: Body, now_ms: int) -> None:
        """Take in a record that this replica has just written."""
        self._put(name, version, body, now_ms)
        self._judge(name, now_ms)

    def gone(self, name: str, version: bytes, now_ms: int) -> None:
        """Mark a node whose address refuses connections, if `version` is still that of its
        record."""
        row = self.nodes.get(name)
        if row is not None and row.version == version:
            row.is_refused = True
            self._judge(name, now_ms)

    def _put(self, name: str, version: bytes, body: Body, now_ms: int) -> None:
        row = self.nodes.get(name)
        if row is None or row.version != version:
            self.nodes[name] = Row(version, body, now_ms, is_first=self._is_first)
