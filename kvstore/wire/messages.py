"""The attach protocol: every datagram between an engine and the node.

One SOCK_SEQPACKET unix socket per scheduler and per rank; one msgpack-encoded struct per datagram.
Control only: the bytes of blocks never pass through a socket.

    scheduler                      node                        rank r
      │ HelloScheduler ─────────────▶│◀──────────── HelloRank │        + own pidfd (SCM_RIGHTS)
      │◀──── Welcome (gen. page) ────│── Welcome (arena, gen. page) ──▶│   or Refused, then close
      │                              │── Quiesce(session, columns) ───▶│   drain own copies …
      │                              │◀──────────── Quiet(session) ────│   … serve this session only
      │◀──── SessionOpen, Grant … ───│   (when every rank is quiet)    │
      │ Hint, LeaseAsk, Renew, Release│◀─ Seal, Drop, Distrust, Verified │
      │ Measured, Story, Compared ──▶│◀──────────────────────── Pinned │
      │ Unserved ───────────────────▶│                                 │
      │ PushOpen, Close, Expect, Cancel ▶│     pushes (ADR 12)         │
      │◀──── HintReply, LeaseReply, LeaseMore, Grant, PushEnd                     │
      │◀──── SessionClosed ──────────│   (a member left; forms again by itself)

Arrays travel as bytes, little-endian: keys 32 bytes each, slots u32, generations u64, checksums 16
bytes each. With S shards per block, an array of n blocks is shaped [n][S], shard minor.

Shards are distinct: ranks whose Hellos carry the same shard are replicas (KV heads of fewer number
than ranks, MLA) and share a column. The lowest of them writes it, all of them read it. Columns are
in the order of the writers' rank numbers; Quiesce carries each rank's own (ADR 2).

    rank    shard                column  writes          rank    0   1   2   3
    0       layers 0-8, head 0   0       yes             shard   a   a   b   b
    1       layers 0-8, head 0   0                       column  0   0   1   1
    2       layers 0-8, head 1   1       yes             array   [n][2] = a₀ b₀ a₁ b₁ …
    3       layers 0-8, head 1   1

Each KV cache group of a model has blocks of its own: a space, shards and columns. HelloRank lists
them; from there on `group` is a place in that list, and all arrays of a datagram are of one group.

Ways to be broken: not msgpack; unknown tag; field of another type or out of bounds; longer than
DATAGRAM_BYTES_MAX, a Hello than HELLO_BYTES_MAX; a byte array that is no multiple of its element or
not as long as its neighbours. All of them raise `ProtocolError` from `decode_*`, and the connection
is closed.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvstore.errors import ProtocolError
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES
from kvstore.wire.bounds import (
    KEYS_PER_DATAGRAM_MAX as KEYS_PER_DATAGRAM_MAX,
    NAME_BYTES_MAX,
    U64,
    KeyArray,
    Label,
    Name,
    Sentence,
    Small,
)
from kvstore.wire.requests import TraceText
from kvstore.wire.space import PER_GROUP, Group, GroupIndex, ShardColumn, Slab


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all datagrams between an engine and the node; the tag is the class name."""


# ── reports ───────────────────────────────────────────────────────────────────────────────────────
# Datagrams of engines for the operator of a node: nothing is decided by them, none is answered.

ASKS_PER_LOOKUP_MAX: Final = 8
"""Most LeaseAsks of a lookup. Blocks behind the first 16,384 of a prompt are computed: asking would
hold up the scheduler."""
UNSERVED_LENGTH_MAX: Final = 255


class Unserved(Message, frozen=True):
    """Scheduler: no session of this engine can open, or will again. Not answered; for operators."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=UNSERVED_LENGTH_MAX)]


class Pinned(Message, frozen=True):
    """Rank: bytes of the arena pinned for its device, and why not more, if so. For operators."""

    size_bytes: U64
    trouble: Annotated[str, msgspec.Meta(max_length=UNSERVED_LENGTH_MAX)] = ""


class Story(Message, frozen=True):
    """Scheduler: how a request ended, for `kvstore explain`. Not answered; may be lost.

    Counts and times only: neither text nor tokens nor keys. If a request was looked up several
    times (preempted, say), the story is about the last lookup.
    """

    request: Name
    """The engine's id of it, cut to REQUEST_BYTES_MAX."""
    age_ns: U64 = 0
    """Time since the request ended."""
    prompt_tokens: U64 = 0
    local_tokens: U64 = 0
    """Tokens of the prompt in the engine's own cache."""
    loaded_tokens: U64 = 0
    """Tokens behind those that were loaded from the node."""
    file_tokens: U64 = 0
    """Loaded tokens that came from disk for this request."""
    peer_tokens: U64 = 0
    """Loaded tokens that came from another node for this request."""
    outcome: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """Why nothing, or nothing more, was loaded: words of `client.core`; empty after a load."""
    detail: Label = ""
    """Error of a load that failed."""
    session: U64 = 0
    leases: Annotated[list[U64], msgspec.Meta(max_length=ASKS_PER_LOOKUP_MAX)] = []
    """LeaseAsks of the lookup, in chain order."""
    first_block: U64 = 0
    """Number in the prompt of the first block of these LeaseAsks."""
    queued_ns: U64 = 0
    """Time from the request's arrival to the first question to the node."""
    lookup_ns: U64 = 0
    """Time from the first question to the node's answer."""
    promotion_ns: U64 = 0
    """Wait after the node's answer for blocks from disk or another node."""
    load_ns: U64 = 0
    """Time of copying, on the slowest rank."""
    saved_ns: U64 = 0
    """Estimated time to compute the loaded tokens, by the engine's measured pace; 0: none was
    measured."""
    stored_blocks: U64 = 0
    """Leading blocks that were stored, or known to be."""
    first_token_ns: U64 = 0
    """Time from the request's arrival to its first token; 0: none was sampled."""
    transfer: Label = ""
    """Name of its transfer, if it has one."""
    admitted_ns: U64 = 0
    """Time from the request's arrival until its load was planned; 0: it had none."""
    total_ns: U64 = 0
    """Time from the request's arrival to its end."""
    traceparent: TraceText = ""


# ── pushes ────────────────────────────────────────────────────────────────────────────────────────
# Datagrams about pushes, from a prefill node to a decode node (ADR 12); part of `messages`.

DeadlineMs = Annotated[int, Meta(ge=1, le=600_000)]


class PushOpen(Message, frozen=True):
    """Prefill scheduler: blocks of this transfer are being computed; decode nodes may be sent them,
    as they are sealed, until PushClose. Sent again when it goes on after a preemption."""

    transfer: Name
    """Name of the transfer, the same for both legs of a request, which find each other by it
    (ADR 12)."""
    node: Label = ""
    """Decode node, if it is known: no other waits for this transfer."""


class PushClose(Message, frozen=True):
    """Prefill scheduler: no more blocks of this transfer will be sealed."""

    transfer: Name
    reason: Sentence = ""
    """Why it ended early: aborted, preempted, failed. Empty: its stores have ended, all ranks
    reported them."""


class PushExpect(Message, frozen=True):
    """Decode scheduler: a prefill node will send these blocks, keys in chain order. Before the Hint
    and the LeaseAsk that name them; PushEnd answers."""

    transfer: Name
    node: Name
    """Prefill node, by its name; its address comes from membership."""
    keys: KeyArray
    deadline_ms: DeadlineMs
    """Longest wait for the blocks, from now on."""
    group: GroupIndex = 0
    first_block: U64 = 0
    """Number in the prompt of the first of these blocks."""


class PushCancel(Message, frozen=True):
    """Decode scheduler: nobody waits for this transfer any more. PushEnd answers all the same."""

    transfer: Name


class PushEnd(Message, frozen=True):
    """Once for each PushExpect: its blocks are here, or no more will come."""

    transfer: Name
    group: GroupIndex = 0
    first_block: U64 = 0
    """As in the PushExpect."""
    blocks: U64 = 0
    """Number of its keys whose blocks are here now, in any tier."""
    reason: Sentence = ""
    """Why not all of them."""


# ── messages ──────────────────────────────────────────────────────────────────────────────────────

PROTOCOL_VERSION: Final = 2
DATAGRAM_BYTES_MAX: Final = 160 << 10
"""Room for the largest datagram: 2,048 keys with slots, generations and checksums are 120 KiB."""
HELLO_BYTES_MAX: Final = 48 << 10
"""Longest Hello: a rank's is passed on to the node's supervisor, in a datagram of
`supervisor.control`."""
LEASES_PER_DATAGRAM_MAX: Final = 4096
LEASE_LIVES_MAX: Final = 6
"""Renewed or not, a lease ends after this many times its `ttl_ms`."""
ERROR_CHARS_MAX, REQUEST_BYTES_MAX = 200, 255
RANKS_MAX: Final = 1024
"""Most ranks of one engine, and so most shards."""
PUSHED: Final = "(pushed)"
"""Given as the node that blocks come from if they are pushed: they come when they are computed."""

SlotArray = Annotated[bytes, msgspec.Meta(max_length=4 * KEYS_PER_DATAGRAM_MAX)]
GenerationArray = Annotated[bytes, msgspec.Meta(max_length=8 * KEYS_PER_DATAGRAM_MAX)]
ChecksumArray = Annotated[bytes, msgspec.Meta(max_length=CHECKSUM_BYTES * KEYS_PER_DATAGRAM_MAX)]
ShardCount = Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
LeaseList = Annotated[list[U64], msgspec.Meta(max_length=LEASES_PER_DATAGRAM_MAX)]


# ── engine → node ────────────────────────────────────────────────────────────────────────────────


class HelloScheduler(Message, frozen=True):
    """First datagram of a scheduler. Ancillary data: its own pidfd."""

    protocol: Small
    engine_id: Name
    nonce: Name
    """Differs between two starts of an engine with the same id."""
    tenant: Name
    rank_count: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    process: Name
    """Random name of this process; another one after a fork or restart."""
    weights_epoch: Annotated[str, msgspec.Meta(max_length=64)] = ""
    label: Label = ""
    """Model name for `kvstore inspect`; no part of any address."""
    data_rank: Small = 0
    """Data-parallel rank of the engine."""
    events: Label = ""
    """Where it publishes KV events, as ZeroMQ spells it; empty: it does not, or not for us."""
    events_replay: Label = ""
    address: Label = ""
    """URL of the engine's HTTP server, for routers; empty: routers know it otherwise."""
    role: Label = ""
    """`prefill`, `decode` or `both`, for routers."""


class HelloRank(Message, frozen=True, omit_defaults=True):
    """First datagram of a rank. Ancillary data: its own pidfd.

    Sending it says: this process runs no copy into the arena, and knows no session yet.
    """

    protocol: Small
    engine_id: Name
    nonce: Name
    tenant: Name
    rank: Small
    process: Name
    groups: Annotated[tuple[Group, ...], PER_GROUP]
    """KV cache groups: the same number, in the same order, on every rank."""
    gpu: Label = ""
    """GPU with its cache, as every process of the machine calls it; empty: none."""


class Quiet(Message, frozen=True):
    """Rank: every copy of earlier sessions has ended; from now on only `session` is served."""

    session: U64


class Hint(Message, frozen=True):
    """Scheduler: a request with these keys (chain order) has arrived. Touches; pins nothing."""

    request: U64
    keys: KeyArray
    group: GroupIndex = 0
    first_block: U64 = 0
    """Number in the prompt of the first of these blocks."""


class LeaseAsk(Message, frozen=True):
    """Scheduler: pin the longest run of these keys, in chain order, that is in dram."""

    lease: U64
    keys: KeyArray
    with_checksums: bool = False
    group: GroupIndex = 0


class LeaseRenew(Message, frozen=True):
    """Scheduler: these leases last `ttl_ms` from now, but LEASE_LIVES_MAX times that in all."""

    leases: LeaseList


class LeaseRelease(Message, frozen=True):
    """Scheduler: nobody reads under these leases any more."""

    leases: LeaseList


class Measured(Message, frozen=True):
    """Scheduler: how quick this engine is, for the next engine of its space; 0: not measured."""

    compute_ns_per_token: U64
    load_ns_per_token: U64
    """Cost of a copy from dram."""


class Compared(Message, frozen=True):
    """Scheduler: blocks under this lease were computed all the same, and compared. Not answered."""

    session: U64
    lease: U64
    blocks: U64
    """Number of blocks compared."""
    diverged: Annotated[bytes, msgspec.Meta(max_length=4 * KEYS_PER_DATAGRAM_MAX)] = b""
    """Which of the lease's blocks hold other values, u32 each, in chain order."""
    error_ppm: U64 = 0
    """The worst of them: its distance from what was computed, relative to either's size."""


class Seal(Message, frozen=True):
    """Rank that writes: these slots hold complete bytes of these keys and will not change."""

    session: U64
    keys: KeyArray
    slots: SlotArray
    generations: GenerationArray
    checksums: ChecksumArray
    group: GroupIndex = 0


class Drop(Message, frozen=True):
    """Rank: these granted slots were not written and will not be: they are free again."""

    session: U64
    slots: SlotArray
    generations: GenerationArray
    group: GroupIndex = 0


class Distrust(Message, frozen=True):
    """Rank: the bytes in these slots failed their checksum. The node forgets the copies."""

    slots: SlotArray
    generations: GenerationArray


class Verified(Message, frozen=True):
    """Rank: the bytes in these slots were compared with their checksum, and are right."""

    slots: SlotArray
    generations: GenerationArray


# ── node → engine ────────────────────────────────────────────────────────────────────────────────


class Welcome(Message, frozen=True, omit_defaults=True):
    """Answer to a Hello that is accepted. Ancillary data: [generation page] to a scheduler, [arena,
    generation page] to a rank, with `hbm` the page of places behind them."""

    protocol: Small
    incarnation: U64
    now_ns: U64
    """The node's monotonic clock while sending; the heartbeat word counts on the same clock."""
    arena_bytes: U64
    generation_bytes: U64
    hbm: Slab | None = None


class Refused(Message, frozen=True):
    """The node will not serve this engine; the connection ends. `reason` is one clear sentence."""

    reason: Sentence
    permanent: bool
    """True: asking again with the same engine is pointless."""


class Quiesce(Message, frozen=True):
    """To a rank: end every copy, then answer Quiet(session)."""

    session: U64
    weights_epoch: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """From the scheduler's Hello: ranks need it for the space in the checksum's header."""
    columns: Annotated[tuple[ShardColumn, ...], PER_GROUP] = (ShardColumn(),)


class SessionOpen(Message, frozen=True):
    """All ranks are attached and quiet. Credits follow; lookups are answered from now on."""

    session: U64
    shard_counts: Annotated[tuple[ShardCount, ...], PER_GROUP]
    """S by group: distinct shards, of which there may be fewer than ranks."""
    compute_ns_per_token: U64 = 0
    """Cost of computing a token, as earlier engines of this space measured it; 0: unknown."""
    load_ns_per_token: U64 = 0
    node: Label = ""
    """Name of this node, by which pushes find it; empty: it serves none."""


class SessionClosed(Message, frozen=True):
    """Credits and leases of the session are void; another session may open on this socket."""

    session: U64
    reason: Sentence


class HintReply(Message, frozen=True):
    """Known blocks among a Hint's keys: a snapshot, not a guarantee."""

    request: U64
    present: Annotated[bytes, msgspec.Meta(max_length=KEYS_PER_DATAGRAM_MAX // 8)]
    """One bit per key, little bit order, whole bytes: 1 = all shards known in any tier."""
    group: GroupIndex = 0
    first_block: U64 = 0
    """As in the Hint."""


class LeaseReply(Message, frozen=True):
    """The leased run, from the first key asked for; may be empty. [n][S] slots and generations."""

    lease: U64
    ttl_ms: U64
    slots: SlotArray
    generations: GenerationArray
    checksums: ChecksumArray = b""
    """[n][S] too, or none. A load verifies blocks that have one; 16 bytes 0: not needed."""
    promoting: U64 = 0
    """Number of blocks behind these that are on their way to dram: LeaseMore brings them."""
    promoting_ms: U64 = 0
    """Estimate of how long that takes."""
    from_file: U64 = 0
    """Number of the leased blocks that came from disk, and that nobody has leased since."""
    from_peer: U64 = 0
    """The same number for blocks from another node."""
    promoting_from: Label = ""
    """Name of the other node that they come from; `*` while that is open; PUSHED; empty: disk."""


class LeaseMore(Message, frozen=True):
    """A lease has grown, by blocks that follow in chain order; possibly none, when none come."""

    lease: U64
    slots: SlotArray
    generations: GenerationArray
    checksums: ChecksumArray = b""
    promoting: U64 = 0
    """Number of blocks that are still on their way; 0: this was the last message."""
    from_file: U64 = 0
    """As in LeaseReply."""
    from_peer: U64 = 0


class Grant(Message, frozen=True):
    """Credits: free slots, one per shard for each of n blocks, recorded with their owner."""

    session: U64
    slots: SlotArray
    generations: GenerationArray
    group: GroupIndex = 0


RankMessage = HelloRank | Quiet | Seal | Drop | Distrust | Verified | Pinned
LookupMessage = Hint | LeaseAsk | LeaseRenew | LeaseRelease
PushMessage = PushOpen | PushClose | PushExpect | PushCancel
Report = Measured | Story | Compared | Unserved
EngineMessage = HelloScheduler | LookupMessage | PushMessage | Report | RankMessage
Answer = HintReply | LeaseReply | LeaseMore | PushEnd
NodeMessage = Welcome | Refused | Quiesce | SessionOpen | SessionClosed | Grant | Answer

_M = TypeVar("_M")
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_node_decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)


def encode(message: Message) -> bytes:
    """The datagram of a message. Callers keep batches within KEYS_PER_DATAGRAM_MAX."""
    datagram = msgspec.msgpack.encode(message)
    assert len(datagram) <= DATAGRAM_BYTES_MAX, f"{type(message).__name__}: {len(datagram)} bytes"
    return datagram


def decode_from_engine(datagram: bytes | memoryview) -> EngineMessage:
    """Decode what a node received. Raises ProtocolError for anything malformed."""
    message = _decode(_engine_decoder, datagram)
    match message:
        case HelloScheduler() | HelloRank():
            if len(datagram) > HELLO_BYTES_MAX:
                raise ProtocolError(f"hello of {len(datagram)} bytes; at most {HELLO_BYTES_MAX}")
            for name in (message.engine_id, message.nonce, message.tenant, message.process):
                check_name(name)
        case Hint(keys=keys) | LeaseAsk(keys=keys) | PushExpect(keys=keys):
            elements(keys, KEY_BYTES, "keys")
        case Seal():
            n = elements(message.keys, KEY_BYTES, "keys")
            same(n, elements(message.slots, 4, "slots"), "slots")
            same(n, elements(message.generations, 8, "generations"), "generations")
            same(n, elements(message.checksums, CHECKSUM_BYTES, "checksums"), "checksums")
        case Compared():
            elements(message.diverged, 4, "diverged")
        case Drop() | Distrust() | Verified():
            n = elements(message.slots, 4, "slots")
            same(n, elements(message.generations, 8, "generations"), "generations")
        case _:
            pass
    return message


def decode_from_node(datagram: bytes | memoryview) -> NodeMessage:
    """Decode what an engine received. Raises ProtocolError for anything malformed."""
    message = _decode(_node_decoder, datagram)
    match message:
        case LeaseReply() | LeaseMore() | Grant():
            n = elements(message.slots, 4, "slots")
            same(n, elements(message.generations, 8, "generations"), "generations")
            if not isinstance(message, Grant) and message.checksums:
                same(n, elements(message.checksums, CHECKSUM_BYTES, "checksums"), "checksums")
        case _:
            pass
    return message


def _decode(decoder: msgspec.msgpack.Decoder[_M], datagram: bytes | memoryview) -> _M:
    if len(datagram) > DATAGRAM_BYTES_MAX:
        raise ProtocolError(f"datagram of {len(datagram)} bytes; at most {DATAGRAM_BYTES_MAX}")
    return decoded(decoder, datagram, "datagram")


def decoded(
    decoder: msgspec.msgpack.Decoder[_M], data: bytes | memoryview, what: str = "message"
) -> _M:
    """Decode a message. `what`: its name in errors. Raises ProtocolError: it is malformed."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # It may quote what a stranger wrote.
        raise ProtocolError(f"malformed {what}: {str(error)[:ERROR_CHARS_MAX]}") from None


def check_name(name: str) -> None:
    """Raises ProtocolError: the name is too long in UTF-8."""
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ProtocolError(f"a name of more than {NAME_BYTES_MAX} bytes")


def elements(array: bytes, size: int, name: str) -> int:
    """Number of elements of `size` bytes in an array. Raises ProtocolError: one is cut off."""
    count, rest = divmod(len(array), size)
    if rest:
        raise ProtocolError(f"{name}: {len(array)} bytes are no multiple of {size}")
    return count


def same(expected: int, count: int, name: str) -> None:
    """Check the number of an array's elements. Raises ProtocolError: it is not the expected one."""
    if count != expected:
        raise ProtocolError(f"{name}: {count} elements where {expected} were announced")


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────


def slots_array(data: bytes) -> NDArray[np.uint32]:
    """Read-only view, shape [count]."""
    return np.frombuffer(data, dtype="<u4")


def generations_array(data: bytes) -> NDArray[np.uint64]:
    """Read-only view, shape [count]."""
    return np.frombuffer(data, dtype="<u8")


def keys_array(data: bytes) -> NDArray[np.uint64]:
    """Read-only view of 32-byte keys as words, shape [count, 4]."""
    return np.frombuffer(data, dtype="<u8").reshape(-1, KEY_BYTES // 8)


def checksums_array(data: bytes) -> NDArray[np.uint64]:
    """Read-only view of 16-byte checksums as words, shape [count, 2]."""
    return np.frombuffer(data, dtype="<u8").reshape(-1, CHECKSUM_BYTES // 8)
