"""Records of nodes and slots in a shared store, as bytes (pure).

Tokens, prompts, tenants and spaces are not in them: a (tenant, space) is a digest, a block the
engine's key, which is a digest, too. Names of nodes and engines, and addresses of nodes, are plain.

Covers: forms. Ways for them to be broken, each a ProtocolError: not one of these types for
`msgspec`; a count or version that is no number; a record without its body; a name that is no text.
A writer to the store can claim any location (ADR 10); blocks are verified when they are fetched, as
with any index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.index import Holder, Statistics
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
    epoch, slots, void, ids, *rest = answer
    if not 0 <= _count("the key ids", ids) < SLOTS_GIVEN_MAX:
        raise ProtocolError(f"the key ids is {int(ids)}, which is no number of a slot")
    entries, rows, evicted = (
        _count(f"{name} in the hash counts", value)
        for name, value in zip(_COUNTS, rest, strict=False)
    )
    records = dict(_record(*each) for each in rest[len(_COUNTS) :])
    sizes = Statistics(entries, rows, slots, len(records), 0, evicted)
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
