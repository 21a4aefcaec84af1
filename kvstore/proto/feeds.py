"""Messages of the index to and from the values of its core: checked here, once, at the door.

Covers: messages of a feed, prompts, answers. Does not cover: rows of `inspect` (`rows`).

Ways for a message to be broken, each a ProtocolError: no kind; a space or keys of another length
than 32 bytes each; more keys than fit a message; a change of no block; more changes than a message
may have; a name that is empty or too long; an unknown tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from kvstore.engine.events import Offered
from kvstore.errors import ProtocolError
from kvstore.index.feed import (
    Change,
    Delta,
    FeedBeat,
    Hello,
    Left,
    Registry,
    Removed,
    SnapshotPart,
    Stored,
    Trust,
    Word,
)
from kvstore.index.index import Answer, Holder, Match
from kvstore.proto import index_pb2 as pb
from kvstore.proto.inspect_pb2 import LoadReply
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier
from kvstore.wire.load import EngineEntry, Load

MESSAGE_BYTES_MAX: Final = 1 << 20
ENGINES_MAX: Final = 64
REGISTRY_BYTES_MAX: Final = 4096
"""Limit of the engines of one node, encoded."""
REPLY_BYTES_MAX: Final = 20 << 20
"""Limit of an answer: 4,096 nodes with the largest names and registries."""
KEYS_MAX: Final = 16_384
"""Limit of one question, and of one change."""
CHANGES_MAX: Final = 4096
"""Limit of one message: a replica answers no call while it applies one."""
TOKENS_MAX: Final = 262_144
NAME_BYTES_MAX: Final = 256
_TIERS: Final = {Tier.HBM: pb.TIER_HBM, Tier.DRAM: pb.TIER_DRAM, Tier.FILE: pb.TIER_FILE}
_OUT: Final = pb.TRUST_OUT
_TRUSTS: Final = {
    Trust.EXACT: pb.TRUST_EXACT,
    Trust.CATCHING_UP: pb.TRUST_CATCHING_UP,
    Trust.STALE: pb.TRUST_STALE,
}
_Change = TypeVar("_Change", pb.Change, pb.Stored)
_Blocks = TypeVar("_Blocks", Stored, Removed)
_Message = TypeVar("_Message", pb.Stored, pb.Removed)
_OF_TRUST: Final[dict[int, Trust]] = {number: trust for trust, number in _TRUSTS.items()}


class RegistryRefused(ProtocolError):
    """The engines that a node names are invalid; its blocks are accepted."""


# ── what nodes say ───────────────────────────────────────────────────────────────────────────────


def hello_of(word: pb.FeedWord) -> Hello:
    """The first message of a stream. Raises ProtocolError."""
    if word.WhichOneof("kind") != "hello":
        raise ProtocolError("the first word of a feed is Hello")
    hello = word.hello
    if not hello.incarnation:
        raise ProtocolError("an incarnation is not 0")
    return Hello(
        node=_name(hello.node),
        incarnation=Incarnation(hello.incarnation),
        stream=hello.stream,
        sequence=hello.sequence,
        address=_text(hello.address),
    )


def word_of(word: pb.FeedWord, hello: Hello) -> Word:
    """A later message of the stream that `hello` opened. Raises ProtocolError."""
    who = (hello.node, hello.incarnation, hello.stream)
    match word.WhichOneof("kind"):
        case "delta":
            changes = tuple(_change(change) for change in _few(word.delta.changes))
            return Delta(*who, word.delta.sequence, changes)
        case "beat":
            return FeedBeat(*who, word.beat.sequence, _bounded(load_of(word.beat)))
        case "part":
            part = word.part
            stored = tuple(_blocks(Stored, each) for each in _few(part.stored))
            return SnapshotPart(*who, part.sequence, part.number, part.is_last, stored)
        case "registry":
            return Registry(*who, _engines(word.registry))
        case _:
            raise ProtocolError(
                "a feed has one Hello, then deltas, beats, parts of snapshots and engines"
            )


def _engines(registry: pb.Registry) -> tuple[EngineEntry, ...]:
    """Raises RegistryRefused."""
    count, size = len(registry.engines), registry.ByteSize()
    if count > ENGINES_MAX or size > REGISTRY_BYTES_MAX:
        raise RegistryRefused(
            f"{count} engines in {size} bytes are more than the {ENGINES_MAX} engines and"
            f" {REGISTRY_BYTES_MAX} bytes that an index takes of one node: serve fewer, or give"
            " them shorter names"
        )
    try:
        found = engines_of(registry.engines)
        for each in found:
            msgspec.convert(msgspec.structs.asdict(each), EngineEntry)
            _space(each.space)
    except (msgspec.ValidationError, ProtocolError) as error:
        raise RegistryRefused(f"an engine that no node serves: {error}") from None
    return found


def engines_of(rows: Sequence[pb.Engine]) -> tuple[EngineEntry, ...]:
    """Engines of a message, not checked."""
    return tuple(
        EngineEntry(
            engine=row.engine,
            tenant=row.tenant,
            space=SpaceId(row.space),
            model=row.model,
            rank=row.rank,
            role=row.role,
            address=row.address,
            queue=row.queue if row.HasField("queue") else None,
        )
        for row in rows
    )


def engine_rows(engines: Sequence[EngineEntry]) -> list[pb.Engine]:
    """Engines as a message has them."""
    return [pb.Engine(**msgspec.structs.asdict(each)) for each in engines]


def key_count(word: Word) -> int:
    """Number of keys in a message."""
    match word:
        case Delta(changes=changes):
            count = sum(len(c.keys) for c in changes if isinstance(c, Stored | Removed))
        case SnapshotPart(stored=stored):
            count = sum(len(each.keys) for each in stored)
        case _:
            count = 0
    return count // KEY_BYTES


def _change(change: pb.Change) -> Change:
    match change.WhichOneof("kind"):
        case "stored":
            return _blocks(Stored, change.stored)
        case "removed":
            return _blocks(Removed, change.removed)
        case "left":
            return Left(_text(change.left.engine), change.left.rank)
        case _:
            raise ProtocolError("a change of no known kind")


def _blocks(kind: type[_Blocks], told: pb.Stored | pb.Removed) -> _Blocks:
    return kind(
        tenant=_text(told.tenant),
        space=_space(told.space),
        tier=_tier(told.tier),
        keys=_some(told.keys),
        engine=_text(told.engine),
        rank=told.rank,
    )


def _few(changes: Sequence[_Change]) -> Sequence[_Change]:
    if len(changes) > CHANGES_MAX:
        raise ProtocolError(f"a word has {CHANGES_MAX} changes at most")
    return changes


def _name(text: str) -> str:
    if not text:
        raise ProtocolError("a node has a name")
    return _text(text)


def _text(text: str) -> str:
    if len(text) > NAME_BYTES_MAX:
        raise ProtocolError(f"a name is longer than {NAME_BYTES_MAX}")
    return text


def _space(space: bytes) -> SpaceId:
    if len(space) != KEY_BYTES:
        raise ProtocolError(f"a space has {KEY_BYTES} bytes")
    return SpaceId(space)


def _tier(number: int) -> Tier:
    try:
        return Tier(number)
    except ValueError:
        raise ProtocolError(f"there is no tier {number}") from None


def _keys(keys: bytes) -> bytes:
    if len(keys) % KEY_BYTES or len(keys) > KEYS_MAX * KEY_BYTES:
        raise ProtocolError(f"keys are {KEY_BYTES} bytes each, {KEYS_MAX} at most")
    return keys


def _some(keys: bytes) -> bytes:
    if not keys:
        raise ProtocolError("nothing is stored or removed without a key")
    return _keys(keys)


def change_of(told: Offered | Left) -> pb.Change:
    """Blocks stored or removed by a node or its engine, or the engine's end, as in a delta."""
    if isinstance(told, Left):
        return pb.Change(left=pb.Left(engine=told.engine, rank=told.rank))
    if told.stored:
        return pb.Change(stored=stored_of(told))
    return pb.Change(removed=_message(pb.Removed, told))


def stored_of(offer: Offered) -> pb.Stored:
    """Stored blocks, as in a part of a snapshot."""
    return _message(pb.Stored, offer)


def _message(kind: type[_Message], offer: Offered) -> _Message:
    return kind(
        tenant=offer.tenant,
        space=offer.space,
        tier=_TIERS[offer.tier],
        keys=offer.keys,
        engine=offer.engine,
        rank=offer.rank,
    )


# ── what is asked, and answered ──────────────────────────────────────────────────────────────────


def check_match(request: pb.MatchRequest) -> None:
    """Raises ProtocolError."""
    _text(request.tenant)
    _space(request.space)
    match request.WhichOneof("prompt"):
        case "keys":
            _keys(request.keys)
        case "tokens":
            tokens = request.tokens
            if not 0 < tokens.block_tokens <= TOKENS_MAX or len(tokens.ids) > TOKENS_MAX:
                raise ProtocolError(f"a block has 1 token or more, a prompt {TOKENS_MAX} at most")
            if len(tokens.ids) // tokens.block_tokens > KEYS_MAX:
                raise ProtocolError(f"a prompt has {KEYS_MAX} blocks at most")
            _text(tokens.hash_seed)
            _text(tokens.cache_salt)
        case _:
            raise ProtocolError("name a prompt: its keys, or its tokens")


def reply_of(answer: Answer, *, blocks: int) -> pb.MatchReply:
    """An answer as a message."""
    holders = [
        pb.Holder(
            node=match.holder.node,
            engine=match.holder.engine,
            rank=match.holder.rank,
            hbm_blocks=match.hbm_blocks,
            dram_blocks=match.dram_blocks,
            file_blocks=match.file_blocks,
            trust=_TRUSTS[match.trust],
        )
        for match in answer.matches
    ]
    return pb.MatchReply(trust=_TRUSTS[answer.trust], holders=holders, blocks=blocks)


def answer_of(reply: pb.MatchReply) -> Answer:
    """The answer in a message. An unknown trust counts as the lowest."""
    matches = [
        Match(
            Holder(each.node, each.engine, each.rank),
            each.hbm_blocks,
            each.dram_blocks,
            each.file_blocks,
            _OF_TRUST.get(each.trust, Trust.STALE),
        )
        for each in reply.holders
    ]
    return Answer(_OF_TRUST.get(reply.trust, Trust.STALE), matches)


def load_message(load: Load) -> pb.Load:
    """A load as a message."""
    return pb.Load(**msgspec.structs.asdict(load))


def _bounded(load: Load | None) -> Load | None:
    """Check the bounds of a load: it is shown to all, and added to the loads of other nodes."""
    try:
        return load and msgspec.convert(msgspec.structs.asdict(load), Load)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a load that no node has: {error}") from None


def load_of(message: pb.Beat | pb.Node | LoadReply) -> Load | None:
    """The load in a message, if there is one."""
    if not message.HasField("load"):
        return None
    told = message.load
    return Load(**{name: getattr(told, name) for name in Load.__struct_fields__})


def trust_number(trust: Trust | None) -> pb.Trust:
    """None: out."""
    return _OUT if trust is None else _TRUSTS[trust]


def trust_of(number: int) -> Trust | None:
    """None: out, or unknown."""
    return _OF_TRUST.get(number)
