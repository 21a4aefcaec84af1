"""Short forms for the tests of the index."""

from __future__ import annotations

import hashlib

from kvstore.index.feed import FeedClosed, Holder
from kvstore.index.index import Index
from kvstore.types import Incarnation, SpaceId, Tier
from kvstore.wire.feed import (
    Change,
    Delta,
    FeedBeat,
    Hello,
    Registry,
    Removed,
    SnapshotPart,
    Stored,
)
from kvstore.wire.load import EngineEntry, Load
from tests.kit.index_check import done

SPACE = SpaceId(bytes(32))


def keys(*numbers: int) -> bytes:
    """A key of 32 bytes for each number. Four neighbours differ in their last byte only."""
    return b"".join(
        hashlib.sha256(b"%d" % (number // 4)).digest()[:-1] + bytes([number % 4])
        for number in numbers
    )


NODE = "a"


def hello(*, node: str = NODE, incarnation: int = 1, stream: int = 1, sequence: int = 0) -> Hello:
    return Hello(node, Incarnation(incarnation), stream, sequence, f"{node}:1")


def delta(
    sequence: int, *changes: Change, node: str = NODE, incarnation: int = 1, stream: int = 1
) -> Delta:
    return Delta(node, Incarnation(incarnation), stream, sequence, changes)


def beat(
    sequence: int,
    *,
    node: str = NODE,
    incarnation: int = 1,
    stream: int = 1,
    load: Load | None = None,
) -> FeedBeat:
    return FeedBeat(node, Incarnation(incarnation), stream, sequence, load)


def served(*names: str, node: str = NODE, incarnation: int = 1, stream: int = 1) -> Registry:
    engines = tuple(EngineEntry(engine=name, tenant="t", space=SPACE) for name in names)
    return Registry(node, Incarnation(incarnation), stream, engines)


def part(
    sequence: int,
    number: int,
    *what: Stored,
    is_last: bool = False,
    node: str = NODE,
    incarnation: int = 1,
    stream: int = 1,
) -> SnapshotPart:
    return SnapshotPart(node, Incarnation(incarnation), stream, sequence, number, is_last, what)


def closed(*, incarnation: int = 1, stream: int = 1) -> FeedClosed:
    return FeedClosed(NODE, Incarnation(incarnation), stream)


def stored(*numbers: int, tier: Tier = Tier.DRAM, engine: str = "", tenant: str = "t") -> Stored:
    return Stored(tenant, SPACE, tier, keys(*numbers), engine)


def removed(*numbers: int, tier: Tier = Tier.DRAM) -> Removed:
    return Removed("t", SPACE, tier, keys(*numbers))


def lengths(index: Index, now_ms: int, *numbers: int, tenant: str = "t") -> dict[Holder, int]:
    """Blocks by holder, in any tier."""
    matches = done(index.match(tenant, SPACE, keys(*numbers), now_ms)).matches
    return {match.holder: match.file_blocks for match in matches}
