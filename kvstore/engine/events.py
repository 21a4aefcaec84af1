"""What happens to the engine, and what it wants done. The only way in and out of `Engine.step`."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.types import ConnectionId, Shard
from kvstore.wire.messages import EngineMessage, Message, Welcome


class Received(msgspec.Struct, frozen=True):
    """A datagram came; the first one of a connection is its Hello."""

    connection: ConnectionId
    message: EngineMessage


class Ended(msgspec.Struct, frozen=True):
    """The socket ended. Its process may live on."""

    connection: ConnectionId


class Exited(msgspec.Struct, frozen=True):
    """The process behind the connection is gone: its pidfd fired. Before or after `Ended`."""

    connection: ConnectionId


class Ready(msgspec.Struct, frozen=True):
    """So many bytes from the arena's start have their pages."""

    ready_bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed: leases may have run out."""


class Clear(msgspec.Struct, frozen=True):
    """Forget blocks: of one space, one tenant, both, or (None, None) all."""

    space: bytes | None
    tenant: str | None


class FileKnown(msgspec.Struct, frozen=True):
    """The file tier holds these keys at these places (u64 each, not 0)."""

    tenant: str
    space: bytes
    shard: Shard
    keys: bytes
    locations: bytes


class FileGone(msgspec.Struct, frozen=True):
    """The file tier holds these keys no more."""

    tenant: str
    space: bytes
    shard: Shard
    keys: bytes


Event = Received | Ended | Exited | Ready | Tick | Clear | FileKnown | FileGone


class Send(msgspec.Struct, frozen=True):
    """Send one datagram. `cause` is the number of the event that led to it, here and below."""

    connection: ConnectionId
    message: Message
    cause: int


class Admit(msgspec.Struct, frozen=True):
    """Send Welcome with descriptors: the generation page, for a rank the arena before it."""

    connection: ConnectionId
    welcome: Welcome
    with_arena: bool
    cause: int


class Hangup(msgspec.Struct, frozen=True):
    """Send what is queued, then close. The engine counts the socket as ended already."""

    connection: ConnectionId
    reason: str
    cause: int


class RaiseGenerations(msgspec.Struct, frozen=True):
    """Publish before any later command. `slots` u32 [n], `generations` u64 [n]."""

    slots: Any
    generations: Any
    cause: int


class Release(msgspec.Struct, frozen=True):
    """Nothing depends on this connection or its process any more: drop pidfd and records."""

    connection: ConnectionId


class Cleared(msgspec.Struct, frozen=True):
    """Answer to Clear."""

    blocks: int


Command = Send | Admit | Hangup | RaiseGenerations | Release | Cleared
