"""What a shared store keeps of nodes and slots, as bytes (pure).

No token, prompt, tenant or space is in it: a (tenant, space) is a digest, a block the key that the
engine made of it, which is a digest, too. Names of nodes and engines, and addresses of nodes, are.

Covers: forms. Ways for them to be broken, each a ProtocolError: not what `msgspec` finds these
types in; a count or version that is no number; a record without its body; a name that is no text.
Whoever can write to the store can say what he likes about who holds what (ADR 26); what he says is
checked when blocks are fetched, as that of any index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.index import Holder
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.load import Load

SCOPE_BYTES = 16
SLOT_BYTES = 4
SLOTS_GIVEN_MAX: Final = 1 << 31
"""No store lives to give so many: more is not from us, and would not fit a name."""
_COUNT_MAX: Final = 1 << 63
_TEXT_MAX: Final = 64
"""Of what is no good, so much is shown."""
_VERSION: Final = re.compile(rb"[0-9a-f]{1,32}\.[0-9]{1,18}")
_COUNTS: Final = ("entries", "rows", "evicted")

_T = TypeVar("_T")


_Number = Annotated[int, msgspec.Meta(ge=0)]
_Place = tuple[str, int, bytes, Annotated[int, msgspec.Meta(ge=0, lt=1 << 8 * SLOT_BYTES)]]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """What other replicas have to know of a node."""

    incarnation: Annotated[Incarnation, msgspec.Meta(ge=0)]
    replaced: tuple[Incarnation, ...]
    address: str
    sequence: _Number
    is_open: bool
    is_exact: bool
    """All that it said is here; with `is_short`, something found no room."""
    is_short: bool
    load_numbers: tuple[_Number, ...] = ()
    """What it does, as the fields of `Load` follow each other; none: it told nothing yet."""

    @property
    def load(self) -> Load | None:
        """What its incarnation told last; None: nothing yet."""
        if not self.load_numbers:
            return None
        return Load(**dict(zip(Load.__struct_fields__, self.load_numbers, strict=False)))


class KeptSlots(msgspec.Struct, frozen=True, array_like=True):
    """Slots of a node by (engine, rank, scope), for the next replica that hears it."""

    slots: list[_Place]
    coming: list[_Place] | None


class Polled(NamedTuple):
    """What POLL answers."""

    epoch: bytes
    slot_count: int
    void_count: int
    entry_count: int
    row_count: int
    evicted_count: int
    records: dict[str, tuple[bytes, Body, bytes]]
    """By node: version, body, and the version with which it was found gone."""


def polled(answer: Sequence[Any]) -> Polled:
    """Raises ProtocolError."""
    epoch, slots, void, ids, *rest = answer
    if not 0 <= _count("the key ids", ids) < SLOTS_GIVEN_MAX:
        raise ProtocolError(f"the key ids is {int(ids)}, which is no number of a slot")
    entries, rows, evicted = (
        _count(f"{name} in the hash counts", value)
        for name, value in zip(_COUNTS, rest, strict=False)
    )
    records = dict(_record(*each) for each in rest[len(_COUNTS) :])
    return Polled(epoch, slots, void, entries, rows, evicted, records)


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
    """As it is kept."""
    return msgspec.msgpack.encode(value)


def decode(kind: type[_T], data: bytes) -> _T:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        raise ProtocolError(f"what the store has for a {kind.__name__} is none") from None


def scope_of(tenant: str, space: SpaceId) -> bytes:
    """The name of a (tenant, space) in the store."""
    return hashlib.blake2b(space + tenant.encode(), digest_size=SCOPE_BYTES).digest()


def slot_name(slot: int) -> bytes:
    """Of a slot number."""
    return slot.to_bytes(SLOT_BYTES, "big")
