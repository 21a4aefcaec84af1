"""What a feed tells of blocks: changes joined where they are alike, and split to fit a message.

Does not cover: queues and streams (`feed`), forms (`proto.feeds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvstore.engine.events import Offered
from kvstore.index.feed import Left
from kvstore.types import KEY_BYTES

DELTA_KEYS_MAX: Final = 4096
"""Of one message: a replica takes it in within a millisecond or two."""
_CHANGE_BYTES: Final = 96
"""Of a change, besides its keys and names: a space, numbers, lengths."""

Told = Offered | Left


class FeedCounters:
    """What was told since the start, to all replicas together."""

    def __init__(self) -> None:
        self.deltas = 0
        self.snapshots = 0
        self.keys_lost = 0
        self.streams = 0


def key_count(told: Told) -> int:
    """What it takes of a queue, in keys."""
    return 1 if isinstance(told, Left) else len(told.keys) // KEY_BYTES


def head_bytes(told: Told) -> int:
    """Of a change in a message, without its keys: so much at most."""
    names = [told.engine] if isinstance(told, Left) else [told.engine, told.tenant]
    return _CHANGE_BYTES + sum(len(name.encode()) for name in names)


def is_like(one: Told, other: Offered) -> bool:
    """Whether they differ in their keys only."""
    return isinstance(one, Offered) and (
        one.stored,
        one.tier,
        one.space,
        one.tenant,
        one.engine,
        one.rank,
    ) == (other.stored, other.tier, other.space, other.tenant, other.engine, other.rank)


def joined(told: Told, keys: Sequence[bytes]) -> Told:
    """One change instead of several alike: engines store block by block."""
    if len(keys) <= 1 or isinstance(told, Left):
        return told
    return msgspec.structs.replace(told, keys=b"".join(keys))


def split(offer: Offered, count: int) -> tuple[Offered, Offered | None]:
    """The first `count` keys, and the others."""
    if len(offer.keys) <= count * KEY_BYTES:
        return offer, None
    first, rest = offer.keys[: count * KEY_BYTES], offer.keys[count * KEY_BYTES :]
    replace = msgspec.structs.replace
    return replace(offer, keys=first), replace(offer, keys=rest)


def pieces(offers: Sequence[Offered]) -> Iterator[list[Offered]]:
    """Of messages that a replica takes in quickly."""
    for offer in offers:
        rest: Offered | None = offer
        while rest is not None:
            first, rest = split(rest, DELTA_KEYS_MAX)
            yield [first]
