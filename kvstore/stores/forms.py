"""What a shared store keeps of nodes and slots, as bytes (pure).

No token, prompt, tenant or space is in it: a (tenant, space) is a digest, a block the key that the
engine made of it, which is a digest, too. Names of nodes and engines, and addresses of nodes, are.

Covers: forms. Ways for bytes to be broken, each a ProtocolError: not what `msgspec` finds these
types in. Whoever can write to the store can say what he likes about who holds what (ADR 26); what
he says is checked when blocks are fetched, as that of any index.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.index import Holder
from kvstore.types import Incarnation, SpaceId

SCOPE_BYTES = 16
SLOT_BYTES = 4

_T = TypeVar("_T")


class Body(msgspec.Struct, frozen=True, array_like=True):
    """What other replicas have to know of a node."""

    incarnation: Incarnation
    replaced: tuple[Incarnation, ...]
    address: str
    sequence: int
    is_open: bool
    is_exact: bool
    """All that it said is here; with `is_short`, something found no room."""
    is_short: bool


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """Slots of a node by (engine, rank, scope), for the next replica that hears it."""

    slots: list[tuple[str, int, bytes, int]]
    coming: list[tuple[str, int, bytes, int]] | None


def encode(value: Body | Kept | Holder) -> bytes:
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
