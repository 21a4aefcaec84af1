"""Messages of a node's feed to a replica of the index: a msgpack-encoded struct each, inside gRPC.

    node                                                    replica
      │── Hello ─────────────────────────────────────────────▶│   opens the stream
      │── Delta, FeedBeat, Registry … ───────────────────────▶│
      │◀──────────────────────────────────────── FeedOrder() ─│   a snapshot, please
      │── SnapshotPart 0, 1, … is_last ──────────────────────▶│   deltas may stand between them
      │◀────────────────────────── FeedOrder(refused=…, …) ───│

`kvstore.index.feed` has the rules. Only kvstore says these, and only one version of it: another
one's service has another name. Carries keys, tenants and spaces; never a token.

Ways to be broken, each a ProtocolError: not msgpack; unknown tag; field of another type or out of
bounds; keys that are no multiple of 32 bytes; a word of another stream than its Hello opened.
Engines that are invalid are `RegistryRefused`: the blocks of their node are accepted.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvstore.errors import ProtocolError
from kvstore.types import KEY_BYTES, Tier
from kvstore.wire.bounds import U32, U64, Label, Name, Sentence, Started, WholeSpace
from kvstore.wire.load import EngineEntry, Load
from kvstore.wire.messages import decoded, elements

FEEDS: Final = "kvstore.feed.v2.Feeds"
"""Service of replicas for nodes: `Feed`, a stream both ways."""
MESSAGE_BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 16_384
"""Most keys of one change, and of one question."""
CHANGES_MAX: Final = 4096
"""Most changes of one message: a replica answers no call while it applies one."""
ENGINES_MAX: Final = 64
REGISTRY_BYTES_MAX: Final = 4096
"""Limit of the engines of one node, encoded."""

ChangedKeys = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_MAX)]


class RegistryRefused(ProtocolError):
    """The engines that a node names are invalid; its blocks are accepted."""


class _BlocksChanged(
    msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True
):
    tenant: Label
    space: WholeSpace
    tier: Tier
    keys: ChangedKeys
    """32 bytes each, in chain order where there is one."""
    engine: Label = ""
    """Engine whose memory it is about; empty: the node's own."""
    rank: U32 = 0


class Stored(_BlocksChanged, frozen=True, tag=True):
    """The node now offers these blocks, perhaps again: every shard is in the tier."""


class Removed(_BlocksChanged, frozen=True, tag=True):
    """The node offers these blocks no more; no error if it did not."""


class Left(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """This engine's memory is empty or gone, in every space."""

    engine: Label
    rank: U32 = 0


BlocksChanged = Stored | Removed
Change = BlocksChanged | Left


class OfStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages of a node."""

    node: Name
    """The name in the certificate that opened the stream."""
    incarnation: Started
    stream: U64
    """Counts the streams that this incarnation dialled to this replica."""


class _Numbered(OfStream, frozen=True):
    sequence: U64
    """Number of the last delta that the node made, this one included: 0 when it never offered
    anything."""


class Hello(_Numbered, frozen=True, tag=True):
    """Opens a stream."""

    address: Label = ""
    """Where peers find the node."""


class Delta(_Numbered, frozen=True, tag=True):
    """Changes, in order."""

    changes: Annotated[tuple[Change, ...], Meta(max_length=CHANGES_MAX)]


class FeedBeat(_Numbered, frozen=True, tag="Beat"):
    """Heartbeat of the node."""

    load: Load | None = None
    """Load of the node; None: as published before."""


class SnapshotPart(_Numbered, frozen=True, tag="Part"):
    """A piece of a snapshot: number 0, 1, … of all that the node offers."""

    number: U32
    is_last: bool
    stored: Annotated[tuple[Stored, ...], Meta(max_length=CHANGES_MAX)]


class Registry(OfStream, frozen=True, tag=True):
    """All engines that the node serves now. Earlier registries are void."""

    engines: Annotated[tuple[EngineEntry, ...], Meta(max_length=MESSAGE_BYTES_MAX)]
    """At most ENGINES_MAX, in REGISTRY_BYTES_MAX; more are refused, but not the node's blocks."""


Word = Delta | FeedBeat | SnapshotPart | Registry
"""Messages of an open stream."""


class FeedOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The replica wants a snapshot, unless a field is set."""

    another: Label = ""
    """Host of another process that says that it is this node."""
    refused: Sentence = ""
    """Why the registry is not accepted."""


class _Tagged(msgspec.Struct):
    type: Label


_words: msgspec.msgpack.Decoder[Hello | Word] = msgspec.msgpack.Decoder(Hello | Word)
_orders = msgspec.msgpack.Decoder(FeedOrder)
_tags = msgspec.msgpack.Decoder(_Tagged)


def encode(message: OfStream | FeedOrder) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode_order(data: bytes) -> FeedOrder:
    """An order of a replica. Raises ProtocolError."""
    return decoded(_orders, data, "order")


def decode_hello(data: bytes) -> Hello:
    """The first message of a stream. Raises ProtocolError."""
    word = _decode(data)
    if not isinstance(word, Hello):
        raise ProtocolError("the first word of a feed is Hello")
    return word


def decode_word(data: bytes, hello: Hello) -> Word:
    """A later message of the stream that `hello` opened. Raises ProtocolError, RegistryRefused."""
    word = _decode(data)
    if isinstance(word, Hello):
        raise ProtocolError(
            "a feed has one Hello, then deltas, beats, parts of snapshots and engines"
        )
    if (word.node, word.incarnation, word.stream) != (hello.node, hello.incarnation, hello.stream):
        raise ProtocolError("a word of another stream than its Hello opened")
    match word:
        case Delta(changes=blocks) | SnapshotPart(stored=blocks):
            for each in blocks:
                if not isinstance(each, Left):
                    elements(each.keys, KEY_BYTES, "keys")
        case Registry(engines=engines):
            count, size = len(engines), len(msgspec.msgpack.encode(engines))
            if count > ENGINES_MAX or size > REGISTRY_BYTES_MAX:
                raise RegistryRefused(
                    f"{count} engines in {size} bytes are more than the {ENGINES_MAX} engines and"
                    f" {REGISTRY_BYTES_MAX} bytes that an index takes of one node: serve fewer, or"
                    " give them shorter names"
                )
        case _:
            pass
    return word


def key_count(word: Word) -> int:
    """Number of keys in a message."""
    match word:
        case Delta(changes=blocks) | SnapshotPart(stored=blocks):
            return sum(len(c.keys) for c in blocks if not isinstance(c, Left)) // KEY_BYTES
        case _:
            return 0


def _decode(data: bytes) -> Hello | Word:
    try:
        return decoded(_words, data)
    except ProtocolError as error:
        if _is_registry(data):
            raise RegistryRefused(f"an engine that no node serves: {error}") from None
        raise


def _is_registry(data: bytes) -> bool:
    try:
        return decoded(_tags, data).type == Registry.__name__
    except ProtocolError:
        return False
