"""Messages between routers of the same engines: one msgpack-encoded struct each, inside gRPC.

    router that counts ── an empty message ─▶ router
    router that counts ◀──── RouterLoads … ── router     at first, on changes, and each second

Only kvstore says these, and only one version of it: another one's service has another name.

Ways to be broken, each a ProtocolError: not msgpack; field of another type or out of bounds.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvstore.wire.bounds import U32, U64, Name
from kvstore.wire.messages import decoded

LOADS: Final = "kvstore.router.v2.Loads"
"""Service of routers for routers: `Loads`, a stream of answers."""
Url = Annotated[str, Meta(max_length=1024)]


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Requests at one engine, which goes by its address: routers may give it names of their own."""

    address: Url
    rank: U32
    """Data-parallel rank of the engine."""
    prefill_tokens: U64
    """Uncached prompt tokens of requests before their first token."""
    streams: U32
    """Requests after their first token."""


class RouterLoads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one router at all engines; replaces its earlier messages."""

    router: Name
    """Name that the router drew at its start."""
    loads: Annotated[tuple[EngineLoad, ...], Meta(max_length=1 << 16)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RouterLoads)


def encode(loads: RouterLoads) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(loads)


def decode(data: bytes) -> RouterLoads:
    """The message in these bytes. Raises ProtocolError."""
    return decoded(_decoder, data, "loads")
