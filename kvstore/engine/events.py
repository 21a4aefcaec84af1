"""What happens to the engine, and what it wants done. The only way in and out of `Engine.step`."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.engine.memory.journal import JournalContents
from kvstore.tier_events import (
    FileCommand as FileCommand,
    FileEvent as FileEvent,
    FileGone as FileGone,
    FileKnown as FileKnown,
    FileLate as FileLate,
    FileMoved as FileMoved,
    FilePart as FilePart,
    FileRead as FileRead,
    FileReclaim as FileReclaim,
    FileWritten as FileWritten,
    ReadFile as ReadFile,
    ReclaimFile as ReclaimFile,
    Scrubbed as Scrubbed,
    VoidFile as VoidFile,
    WriteFile as WriteFile,
)
from kvstore.types import ConnectionId, Shard, SpaceId, Tier
from kvstore.wire.messages import EngineMessage, HelloRank, Message, Welcome


class Received(msgspec.Struct, frozen=True):
    """A datagram came; the first one of a connection is its Hello."""

    connection: ConnectionId
    message: EngineMessage
    process: int = 0
    """Who sent a Hello, as the kernel knows it: a number below 0 that no other process has; 0 where
    it cannot tell."""


class Ended(msgspec.Struct, frozen=True):
    """The socket ended. Its process may live on."""

    connection: ConnectionId


class Exited(msgspec.Struct, frozen=True):
    """The process behind the connection is gone: its pidfd fired. Before or after `Ended`."""

    connection: ConnectionId


class AdoptedWriter(msgspec.Struct, frozen=True):
    """A rank that attached to an earlier process of this node; numbers are never used again."""

    connection: ConnectionId
    hello: HelloRank
    process: int = 0
    """As in `Received`."""


class Adopt(msgspec.Struct, frozen=True):
    """Go on with what an earlier process of this node left. The first event, if at all."""

    found: JournalContents
    writers: tuple[AdoptedWriter, ...]
    """All whose end the node would hear of; whoever the journal names is among them."""


class Ready(msgspec.Struct, frozen=True):
    """So many bytes from the arena's start have their pages."""

    ready_bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed: leases may have run out."""

    file_used_bytes: int = 0
    """What the file tier takes of its capacity."""
    file_breakers: tuple[str, str] = ("closed", "closed")
    """State of those of its reads and of its writes."""


class Clear(msgspec.Struct, frozen=True):
    """Forget blocks: of one space, one tenant, both, or (None, None) all."""

    space: bytes | None
    tenant: str | None


class Candidate(msgspec.Struct, frozen=True):
    """Another node that holds a run of what was asked for, from the first key on."""

    node: str
    blocks: int
    """The leading ones that it has, in its dram or on its disk."""


class Located(msgspec.Struct, frozen=True):
    """Answer to Locate, always, and soon: who holds what."""

    locate: int
    candidates: tuple[Candidate, ...] = ()
    is_known: bool = True
    """False: the index did not answer."""


class Fetched(msgspec.Struct, frozen=True):
    """A Fetch has truly ended: nothing writes to its slots any more. `good`: one bool per block,
    true where the bytes of all its shards are there and verified, and were lent until the end."""

    job: int
    good: bytes
    checksums: bytes = b""
    """[n][S], 16 bytes each, of the good ones; or nothing if none is good."""
    peer_failed: bool = False
    """The peer, or the way to it, is at fault: something else may be asked elsewhere."""
    not_lent: int = 0
    """Of the blocks that are not good, here and below: the peer did not lend them."""
    not_kept: int = 0
    """They left there before they were read."""
    damaged: int = 0
    """They were lent all the while, and are not what was stored."""
    trouble: str = ""
    """Why none came, in words for people."""


class Lend(msgspec.Struct, frozen=True):
    """Another node asks to read blocks: the longest run of these keys that is here."""

    peer: int
    """The shell's number for one incarnation of a node; never used again."""
    loan: int
    tenant: str
    space: bytes
    keys: bytes


class LoanReturned(msgspec.Struct, frozen=True):
    """It has read them: LoanEnded says whether they were there until now."""

    peer: int
    loan: int


class PeerGone(msgspec.Struct, frozen=True):
    """All of a peer's loans end."""

    peer: int


PeerEvent = Located | Fetched | Lend | LoanReturned | PeerGone
Event = Received | Ended | Exited | Adopt | Ready | Tick | Clear | PeerEvent | FileEvent


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


class SwitchedOff(msgspec.Struct, frozen=True):
    """To be told to people: a shadow check found other values than this space holds."""

    tenant: str
    space: SpaceId
    tier: Tier | None
    """Which one is off for it; None: all."""
    engine: str
    blocks: int
    diverged: int
    error_ppm: int


class Changed(msgspec.Struct, frozen=True, gc=False):
    """A tier holds these blocks since now, or no more. Only if EngineConfig.tell_changes."""

    tier: Tier
    stored: bool
    tenant: str
    space: SpaceId
    shard: Shard
    label: str
    """Of the model, as the first engine of this space named it; empty before there was one."""
    block_tokens: int
    """0 before there was an engine of this space."""
    keys: bytes


class Offered(msgspec.Struct, frozen=True, gc=False):
    """Peers can have these blocks from a tier since now, or no more: every shard is in it. Only if
    EngineConfig.tell_offers. What was never offered may be taken back, and what is offered may be
    offered again."""

    tier: Tier
    stored: bool
    tenant: str
    space: SpaceId
    keys: bytes
    engine: str = ""
    """Whose own memory; empty: the node's."""
    rank: int = 0


class OffersUntold(msgspec.Struct, frozen=True):
    """What is held of a space can be judged only since now: `Engine.offered` tells it."""


class Follow(msgspec.Struct, frozen=True):
    """This engine publishes what its own memory holds. Only if EngineConfig.follows; may be said
    again."""

    connection: ConnectionId
    """Of its scheduler, until Unfollow."""
    engine: str
    rank: int
    """Data-parallel."""
    endpoint: str
    replay_endpoint: str
    """Empty: it does not replay."""
    tenant: str
    space: SpaceId
    hash_seed: str
    block_tokens: int


class Unfollow(msgspec.Struct, frozen=True):
    """Its scheduler is gone."""

    connection: ConnectionId


class Locate(msgspec.Struct, frozen=True):
    """Ask the index who holds these keys, in chain order. Located answers."""

    locate: int
    tenant: str
    space: SpaceId
    keys: bytes
    cause: int


class Fetch(msgspec.Struct, frozen=True):
    """Bring these blocks from another node, and verify them. `slots` u32 [n][S], the peer's until
    Fetched: one column per shard, whose blocks have so many bytes."""

    job: int
    node: str
    tenant: str
    space: SpaceId
    shards: tuple[Shard, ...]
    block_bytes: tuple[int, ...]
    keys: bytes
    slots: Any
    cause: int


class Lent(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to Lend, at once or when what is on disk has come: the leading run that is in dram,
    pinned until LoanReturned or the end of its time; possibly nothing. Arrays are [n][S] of these
    shards, which cover all layers and heads."""

    peer: int
    loan: int
    shards: tuple[Shard, ...] = ()
    block_bytes: tuple[int, ...] = ()
    slots: bytes = b""
    generations: bytes = b""
    checksums: bytes = b""
    cause: int


class LoanEnded(msgspec.Struct, frozen=True):
    """Answer to LoanReturned: one bool per block, true where it did not change since Lent."""

    peer: int
    loan: int
    intact: bytes
    cause: int


PeerCommand = Locate | Fetch | Lent | LoanEnded
Command = (
    Send
    | Admit
    | Hangup
    | RaiseGenerations
    | Release
    | Cleared
    | SwitchedOff
    | Changed
    | Offered
    | OffersUntold
    | Follow
    | Unfollow
    | PeerCommand
    | FileCommand
)
