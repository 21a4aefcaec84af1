"""Messages between nodes, and from routers to nodes: one msgpack-encoded struct each, inside gRPC.

    node that reads, or is written to              node that holds the blocks
      │── PeerHello ─────────────────────────────────▶│   the first word of Session
      │◀──────────────────────────────── PeerWelcome ─│   for the transfer worker
      │── ServeAsk(serving, keys) ───────────────────▶│   pins the longest run that is in dram
      │◀──────────── ServeAnswer(serving, slots, …) ──│   …  the transfer worker reads
      │── GiveBack(serving) ─────────────────────────▶│   or the stream ends
      │◀───────────────── GivenBack(serving, intact) ─│
      │── PushGrant(grant, keys, extents, …) ────────▶│   writes the blocks as they are sealed
      │◀─────────────────────────── Pushed(grant) … ──│   (ADR 12)
      │── PushRevoke(grant) ─────────────────────────▶│
      │◀──────────────────────────── PushOver(grant) ─│   the last word in any case

    router ── PrepareRequest ─▶ node ── PrepareReply ─▶ router   (ADR 14)

Only kvstore says these, and only one version of it: another one's services have other names.
Arrays are as in `messages`, [n][S] of the holder's shards, shard minor.

Ways to be broken: not msgpack; unknown tag; field of another type or out of bounds; a name of more
than NAME_BYTES_MAX bytes; a byte array that is no multiple of its element or not as long as its
neighbours. All of them raise `ProtocolError`: from `decode_*`, or from `check_served`,
`check_pushed` and `intact_of`, which know what was asked for. A slot outside of the arena is the
transport's to refuse.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvstore.errors import ProtocolError
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, Shard
from kvstore.wire.bounds import (
    KEYS_PER_DATAGRAM_MAX,
    U32,
    U64,
    Label,
    Name,
    Sentence,
    Started,
    WholeSpace,
)
from kvstore.wire.messages import (
    RANKS_MAX,
    DeadlineMs,
    SlotArray,
    check_name,
    decoded,
    elements,
    same,
)
from kvstore.wire.record import PAYLOAD_BYTES_MAX
from kvstore.wire.transfer_worker import Blob, Reason

PEERS: Final = "kvstore.peer.v3.Peers"
"""Service of nodes for nodes: `Session`, a stream both ways."""
AHEAD: Final = "kvstore.peer.v3.Ahead"
"""Service of nodes for routers: `Prepare`, one message each way."""
MESSAGE_BYTES_MAX: Final = 1 << 20

SomeKeys = Annotated[
    bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_PER_DATAGRAM_MAX)
]
"""Keys of 32 bytes each, in chain order."""
PayloadBytes = Annotated[int, Meta(ge=1, le=PAYLOAD_BYTES_MAX)]
Shards = Annotated[tuple[Shard, ...], Meta(max_length=RANKS_MAX)]
"""Those of the holder: a shard is what at least one rank has."""
ShardBytes = Annotated[tuple[PayloadBytes, ...], Meta(max_length=RANKS_MAX)]
"""Size of a block in each of them."""
Cells = Annotated[bytes, Meta(max_length=MESSAGE_BYTES_MAX)]
"""[n][S], n blocks of S shards; n may be 0."""
Flags = Annotated[bytes, Meta(max_length=KEYS_PER_DATAGRAM_MAX)]


class PeerMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# ── asks ─────────────────────────────────────────────────────────────────────────────────────────


class PeerHello(PeerMessage, frozen=True):
    """First message of a Session: the node that asks, as its certificate names it, and its
    start."""

    node: Name
    incarnation: Started


class ServeAsk(PeerMessage, frozen=True):
    """Pin the longest run of these keys that is in dram."""

    serving: U64
    """Chosen by the asker; not used again on this stream."""
    tenant: Name
    space: WholeSpace
    keys: SomeKeys


class GiveBack(PeerMessage, frozen=True):
    """The blocks were read, or will not be."""

    serving: U64


class PushGrant(PeerMessage, frozen=True, kw_only=True):
    """Write these blocks to the asker's landing memory as they are sealed, in this order."""

    grant: U64
    """Chosen by the asker; not used again on this stream."""
    epoch: U64
    """Number of one start of the asker's transfer worker, repeated in each message about it."""
    transfer: Name
    tenant: Name
    space: WholeSpace
    keys: SomeKeys
    extents: SlotArray
    """One a key, in pages of the asker's arena: room for one block, its shards in a row."""
    block_bytes: PayloadBytes
    """All shards together."""
    deadline_ms: DeadlineMs
    """Deadline of the grant, from now on."""
    descriptor: Blob = b""
    """Descriptor of the asker's transfer worker, by which that of the receiver writes there."""


class PushRevoke(PeerMessage, frozen=True):
    """Write no more for this grant. PushOver answers."""

    grant: U64


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


class PeerWelcome(PeerMessage, frozen=True):
    """The asker may go on."""

    node: Name
    incarnation: Started
    descriptor: Blob
    """Descriptor of its transfer worker, for that of the asker; empty: there is none now."""


class ServeAnswer(PeerMessage, frozen=True):
    """The pinned run; possibly empty."""

    serving: U64
    shards: Shards = ()
    block_bytes: ShardBytes = ()
    slots: Cells = b""
    checksums: Cells = b""

    def places(self) -> NDArray[np.int64]:
        """Slots, [n][S]."""
        return np.frombuffer(self.slots, "<u4").astype(np.int64).reshape(-1, len(self.shards) or 1)


class GivenBack(PeerMessage, frozen=True):
    """The end of a serving."""

    serving: U64
    intact: Flags
    """1 for each block that did not change since ServeAnswer, else 0; empty: it had ended
    before."""


class Pushed(PeerMessage, frozen=True, kw_only=True):
    """Blocks of a grant are in their extents. No shards: the holder's engine stored others."""

    grant: U64
    epoch: U64
    first: U64
    """Place of the first one among the grant's keys."""
    shards: Shards = ()
    """One behind the other in an extent."""
    block_bytes: ShardBytes = ()
    checksums: Cells = b""


class PushOver(PeerMessage, frozen=True):
    """The end of a grant: no further write is begun. If its session is lost first, the asker makes
    this itself."""

    grant: U64
    epoch: U64
    reason: Reason
    """Why not all blocks were pushed; empty: they were."""
    is_quiet: bool
    """False: writes may still arrive, until the asker's transfer worker is dead."""


# ── of routers ───────────────────────────────────────────────────────────────────────────────────


class PrepareRequest(PeerMessage, frozen=True):
    """Bring blocks to dram, as far as there is room; nothing is pinned."""

    tenant: Name
    space: WholeSpace
    engine: Label
    """Engine that will ask for them, by its name in the index; empty: any of the space."""
    keys: SomeKeys


class PrepareReply(PeerMessage, frozen=True):
    """Numbers of leading blocks, by where they were when the request came. The rest stays where it
    is."""

    dram: U32 = 0
    reading: U32 = 0
    """On their way from disk."""
    sought: U32 = 0
    """Asked of other nodes."""
    refused: Sentence = ""
    """Why nothing was done."""


OpenAsk = ServeAsk | GiveBack | PushGrant | PushRevoke
"""Asks of a session that is open."""
Ask = PeerHello | OpenAsk
PushWord = Pushed | PushOver
Answer = PeerWelcome | ServeAnswer | GivenBack | PushWord

_asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_requests = msgspec.msgpack.Decoder(PrepareRequest)
_replies = msgspec.msgpack.Decoder(PrepareReply)


def encode(message: PeerMessage) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode_ask(data: bytes) -> Ask:
    """A message of a node that asks. Raises ProtocolError."""
    ask = decoded(_asks, data)
    match ask:
        case PeerHello(node=node):
            check_name(node)
        case ServeAsk():
            _count_keys(ask)
        case PushGrant():
            same(_count_keys(ask), elements(ask.extents, 4, "extents"), "extents")
        case _:
            pass
    return ask


def decode_answer(data: bytes) -> Answer:
    """A message of a node that holds blocks. Raises ProtocolError."""
    return decoded(_answers, data)


def decode_request(data: bytes) -> PrepareRequest:
    """A request of a router. Raises ProtocolError."""
    request = decoded(_requests, data)
    _count_keys(request)
    check_name(request.engine)
    return request


def decode_reply(data: bytes) -> PrepareReply:
    """The reply to a router's request. Raises ProtocolError."""
    return decoded(_replies, data)


def _count_keys(message: ServeAsk | PushGrant | PrepareRequest) -> int:
    """Number of keys in a message. Checks the name of its tenant, too. Raises ProtocolError."""
    check_name(message.tenant)
    return elements(message.keys, KEY_BYTES, "keys")


def check_served(answer: ServeAnswer, *, asked: int) -> ServeAnswer:
    """The answer to a ServeAsk of `asked` keys. Raises ProtocolError: its arrays do not fit."""
    cells = _count_blocks(answer, count_max=asked) * len(answer.shards)
    same(cells, elements(answer.slots, 4, "slots"), "slots")
    return answer


def check_pushed(word: Pushed) -> None:
    """Check the arrays of a message about pushed blocks. Raises ProtocolError: they do not fit."""
    if bool(_count_blocks(word, count_max=KEYS_PER_DATAGRAM_MAX)) != bool(word.shards):
        raise ProtocolError("shards of no block")


def _count_blocks(message: ServeAnswer | Pushed, *, count_max: int) -> int:
    columns = len(message.shards)
    same(columns, len(message.block_bytes), "block_bytes")
    count, rest = divmod(len(message.checksums), max(1, columns) * CHECKSUM_BYTES)
    if rest or count > count_max * bool(columns):
        raise ProtocolError("checksums of other blocks or shards than were asked for")
    return count


def intact_of(answer: GivenBack, *, count: int) -> NDArray[np.bool_]:
    """Which of `count` blocks did not change; none if the serving had ended. Raises
    ProtocolError."""
    if not answer.intact:
        return np.zeros(count, dtype=bool)
    if len(answer.intact) != count or not set(answer.intact) <= {0, 1}:
        raise ProtocolError("an answer about other blocks than were served")
    return np.frombuffer(answer.intact, dtype=np.bool_)


def checksums_of(checksums: bytes, *, block: int, shards: int) -> list[bytes]:
    """Checksums of one block, by shard, out of an array [n][S]. `block`: its number."""
    ats = range(block * shards * CHECKSUM_BYTES, (block + 1) * shards * CHECKSUM_BYTES)
    return [checksums[at : at + CHECKSUM_BYTES] for at in ats[::CHECKSUM_BYTES]]
