"""Events for the engine, and its commands: the only way in and out of `Engine.step`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvstore.engine.memory.journal import JournalContents
from kvstore.engine.memory.residency import Change
from kvstore.engine.why.reasons import Staged as Staged, StoryTold as StoryTold
from kvstore.tier_events import FileCommand, FileEvent, MemoryCommand, MoveEnded, Promoted
from kvstore.types import ConnectionId, EngineSource, SpaceId, Tier
from kvstore.wire import peers as wire
from kvstore.wire.feed import BlocksChanged
from kvstore.wire.messages import EngineMessage, HelloRank, Message, Welcome
from kvstore.wire.record import Scope

_Ask_co = TypeVar("_Ask_co", bound=wire.OpenAsk, covariant=True)

# ── ahead ─────────────────────────────────────────────────────────────────────────────────────────
# Values about blocks that a router wants in dram before an engine asks for them.


class PrepareBlocks(msgspec.Struct, frozen=True):
    """Bring these blocks to dram, as far as there is room. BlocksPrepared answers at once, with
    what was begun."""

    ask: int
    """Number of the request, chosen by the shell and never used again."""
    its: wire.PrepareRequest


class BlocksPrepared(msgspec.Struct, frozen=True):
    """Answer to PrepareBlocks."""

    ask: int
    its: wire.PrepareReply


# ── events ────────────────────────────────────────────────────────────────────────────────────────


class Received(msgspec.Struct, frozen=True):
    """A datagram came from an engine's process; the first one of a connection is its Hello."""

    connection: ConnectionId
    message: EngineMessage
    process: int = 0
    """Process that sent a Hello, by a negative number derived from the kernel's identification and
    unique to the process; 0 if the kernel gives none."""


class Ended(msgspec.Struct, frozen=True):
    """The socket ended. The process behind it may live on."""

    connection: ConnectionId


class Exited(msgspec.Struct, frozen=True):
    """The process behind the connection is gone: its pidfd became readable. Comes before or after
    `Ended`."""

    connection: ConnectionId


class AdoptedWriter(msgspec.Struct, frozen=True):
    """A rank that attached to an earlier process of this node; numbers are never used again."""

    connection: ConnectionId
    hello: HelloRank
    process: int = 0
    """Process number, as in `Received`."""


class Adopt(msgspec.Struct, frozen=True):
    """Take over the state of an earlier process of this node. If it occurs, it is the first
    event."""

    found: JournalContents
    writers: tuple[AdoptedWriter, ...]
    """All ranks whose exit the node would notice. Every writer that the journal names is one of
    them."""


class Ready(msgspec.Struct, frozen=True):
    """The first `ready_bytes` of the arena are backed by pages and can be used."""

    ready_bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed: leases, deadlines and back-offs may have ended."""

    file_used_bytes: int = 0
    """Used part of the disk tier's capacity."""
    file_breakers: tuple[str, str] = ("closed", "closed")
    """State of the circuit breakers of disk reads and writes."""


class Clear(msgspec.Struct, frozen=True):
    """Forget blocks: of one space, one tenant, both, or (None, None) all."""

    space: bytes | None
    tenant: str | None


class Candidate(msgspec.Struct, frozen=True):
    """Another node that holds a run of the keys in question, from the first one on."""

    node: str
    blocks: int
    """Prefix length: leading blocks in its dram or on its disk."""


class Located(msgspec.Struct, frozen=True):
    """Answer to Locate: other nodes with these keys. An answer always comes, and soon."""

    locate: int
    candidates: tuple[Candidate, ...] = ()
    is_known: bool = True
    """False: the index did not answer."""


class Fetched(MoveEnded, frozen=True):
    """A Fetch has ended. A block is good if all its shards are there and verified, and stayed on
    the peer until the end."""

    checksums: bytes = b""
    """[n][S], 16 bytes each, valid for the good blocks; empty if no block is good."""
    peer_failed: bool = False
    """The peer, or the path to it, is at fault: other nodes may be asked."""
    not_served: int = 0
    """Number of blocks that are not good because the peer did not serve them."""
    not_kept: int = 0
    """Number of blocks that the peer evicted before they were read."""
    damaged: int = 0
    """Number of blocks that stayed on the peer, but arrived with another checksum."""
    trouble: str = ""
    """Error text if no block came, for messages to people."""


class PeerAsked(msgspec.Struct, Generic[_Ask_co], frozen=True):
    """A message of another node: it asks for blocks (ServeAsk), has read them (GiveBack), or grants
    room for blocks to be pushed to it (PushGrant) and takes that back (PushRevoke)."""

    peer: int
    """The shell's number for one incarnation of the node; never used again."""
    node: str
    its: _Ask_co


class PeerGone(msgspec.Struct, frozen=True):
    """The connection to a peer has ended: all its servings and grants end."""

    peer: int


class LandingUp(msgspec.Struct, frozen=True):
    """The transfer worker was started, and peers can write to the landing slab for `epoch`; or it
    has ended. Nothing writes there for an earlier epoch any more."""

    epoch: int
    """Random number of one start of the transfer worker; 0: there is none now."""


class Landed(MoveEnded, frozen=True):
    """A Land has ended; `checksums` [n][T]."""

    checksums: bytes


class Written(msgspec.Struct, frozen=True):
    """A WritePush has ended. `trouble`: error if not all bytes were written; the rest may still
    arrive. Empty: all were."""

    job: int
    trouble: str = ""


PushEvent = LandingUp | wire.PushWord | Landed | Written
PeerEvent = Located | Fetched | PeerAsked[wire.OpenAsk] | PeerGone | PushEvent | PrepareBlocks
Event = Received | Ended | Exited | Adopt | Ready | Tick | Clear | PeerEvent | FileEvent | Promoted


class Send(msgspec.Struct, frozen=True):
    """Send one datagram."""

    connection: ConnectionId
    message: Message


class Admit(msgspec.Struct, frozen=True):
    """Send Welcome with file descriptors, in this order: the arena (`with_arena`: for a rank), the
    generation page, and with `welcome.hbm` the page of places in hbm."""

    connection: ConnectionId
    welcome: Welcome
    with_arena: bool


class Hangup(msgspec.Struct, frozen=True):
    """Send what is queued, then close. The engine counts the socket as ended already."""

    connection: ConnectionId
    reason: str


class Release(msgspec.Struct, frozen=True):
    """The engine is done with this connection and its process: drop pidfd and records."""

    connection: ConnectionId


class Cleared(msgspec.Struct, frozen=True):
    """Answer to Clear."""

    blocks: int


class SwitchedOff(msgspec.Struct, frozen=True):
    """A shadow check found values that differ from the blocks of this space, which is now switched
    off: to be logged for people."""

    tenant: str
    space: SpaceId
    tier: Tier | None
    """Tier that is off for the space; None: all."""
    engine: str
    blocks: int
    diverged: int
    error_ppm: int


class Changed(Change, frozen=True, gc=False):
    """A tier holds these blocks from now on (`stored`), or does not hold them any more. Only if
    EngineConfig.tell_changes."""

    label: str
    """Label of the model, from an engine of this space; empty before there was one."""
    block_tokens: int
    """Tokens of a block; 0 before there was an engine of this space."""


class OffersUntold(msgspec.Struct, frozen=True):
    """A space became known whose held blocks were not offered before, because their completeness
    could not be judged: read `Engine.offered` for them."""


class Follow(msgspec.Struct, frozen=True):
    """This engine publishes the blocks of its own cache. Only if EngineConfig.follows; may be
    repeated."""

    connection: ConnectionId
    """Connection of the scheduler, until Unfollow."""
    source: EngineSource


class Unfollow(msgspec.Struct, frozen=True):
    """The scheduler of a followed engine is gone."""

    connection: ConnectionId


class Locate(msgspec.Struct, frozen=True):
    """Ask the index for the locations of these keys, in chain order. Located answers."""

    locate: int
    tenant: str
    space: SpaceId
    keys: bytes


class _Bring(msgspec.Struct, frozen=True):
    """Write blocks of one space to their slots, and verify them there. `slots` u32 [n][T], held for
    the job until Fetched or Landed: one column for each of `targets`; `head_bytes`: from the
    space."""

    job: int
    node: str
    targets: tuple[Scope, ...]
    head_bytes: tuple[int, ...]
    keys: bytes
    slots: Any


class Fetch(_Bring, frozen=True):
    """Bring blocks from another node. Fetched answers."""


class AnswerPeer(msgspec.Struct, frozen=True):
    """Send an answer to a peer: a ServeAnswer, at once or when blocks on disk were read, for a run
    in dram that is pinned until GiveBack or its expiry; a GivenBack, which answers GiveBack; or
    Pushed and PushOver, about a grant of the peer."""

    peer: int
    its: wire.Answer


class AskPush(msgspec.Struct, frozen=True):
    """Send a grant to a prefill node, with the transfer worker's descriptor. Pushed and one
    PushOver answer."""

    node: str
    its: wire.PushGrant


class RevokePush(msgspec.Struct, frozen=True):
    """Revoke a grant at its prefill node; its PushOver follows."""

    grant: int


class Land(_Bring, frozen=True):
    """Copy blocks out of the landing slab. Landed answers. `sources` [S] have the shards in Pushed,
    which may be others than those of `targets`."""

    sources: tuple[Scope, ...]
    checksums: bytes
    extents: bytes


class RecycleTransferWorker(msgspec.Struct, frozen=True):
    """Kill the transfer worker: only its end stops peers that may still write. LandingUp
    follows."""

    reason: str


class WritePush(msgspec.Struct, frozen=True):
    """Write blocks to the extents of a peer's grant, from number `first` of the grant on. Written
    answers. `slots` u32 [n][S]."""

    job: int
    peer: int
    node: str
    its: wire.PushGrant
    first: int
    block_bytes: tuple[int, ...]
    slots: Any


PushCommand = AskPush | RevokePush | Land | RecycleTransferWorker | Staged | WritePush
"""Commands about pushes, to this node and from it."""
PeerCommand = Locate | Fetch | AnswerPeer | PushCommand | BlocksPrepared
ConnectionCommand = Send | Admit | Hangup | Release | Follow | Unfollow
"""Commands about processes of engines."""
Report = Cleared | SwitchedOff | Changed | BlocksChanged | OffersUntold | StoryTold
"""Commands that report to publishers, feeds, traces and logs."""
Command = ConnectionCommand | Report | MemoryCommand | FileCommand | PeerCommand
