"""The ways to be broken that the module texts of `wire` list, one by one: each is refused.

Whoever writes the disk or the socket can also make checksums right: here they are.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from kvstore.errors import ProtocolError
from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.messages import (
    ASKS_PER_LOOKUP_MAX,
    DATAGRAM_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Compared,
    Distrust,
    Drop,
    Grant,
    HelloScheduler,
    Hint,
    LeaseAsk,
    LeaseMore,
    LeaseReply,
    Message,
    Seal,
    Story,
    decode_from_engine,
    decode_from_node,
    encode,
)
from kvstore.wire.record import (
    PAGE_COVERED,
    PAYLOAD_BYTES_MAX,
    Scope,
    Void,
    parse_page,
    parse_prefix,
    seal_page,
    void_page,
)
from kvstore.wire.segment import (
    FooterPlace,
    SegmentHead,
    footer,
    parse_footer,
    parse_trailer,
)
from tests.kit.reference import table_of

ID = b"i" * 16
SCOPE = Scope("tenant", b"s" * 32, Shard(0, 4, 0, 2), 5_000)
HEAD = SegmentHead(b"d" * 16, ID, 7)
PREFIX = SCOPE.prefix()
NO_RECORDS: Any = {"pages": [], "scope_of": [], "keys": b"", "checksums": b""}


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


# ── prefixes and pages ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX[:63],
        changed(PREFIX, 0, b"KVSX"),
        changed(PREFIX, 4, struct.pack("<H", 9)),
        changed(PREFIX, 6, struct.pack("<H", 7)),
        changed(PREFIX, 56, struct.pack("<Q", 0)),
        changed(PREFIX, 56, struct.pack("<Q", PAYLOAD_BYTES_MAX + 1)),
        changed(PREFIX, 64, b"\xff"),
        changed(PREFIX[:64], 6, struct.pack("<H", 256)) + b"t" * 256,
    ],
    ids=["short", "magic", "version", "length", "no payload", "payload", "no text", "long name"],
)
def test_a_prefix_that_is_none(prefix: bytes) -> None:
    assert parse_prefix(PREFIX) == SCOPE
    assert parse_prefix(prefix) is None


def test_the_longest_name_is_one() -> None:
    scope = Scope("t" * 255, b"s" * 32, Shard(0, 4, 0, 2), PAYLOAD_BYTES_MAX)
    assert parse_prefix(scope.prefix()) == scope


VOID = void_page(Void("tenant", b"s" * 32, 9), segment_id=ID, place=5)


def resealed(page: bytes, at: int, new: bytes) -> bytes:
    data = bytearray(changed(page, at, new))
    data[PAGE_COVERED:] = seal_page(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (4, struct.pack("<H", 9)),
        (6, struct.pack("<H", 3)),
        (8, b"j"),
        (24, struct.pack("<Q", 6)),
        (88, struct.pack("<H", 4)),
        (90, struct.pack("<H", 31)),
        (90, struct.pack("<H", 32 + 256)),
        (90, struct.pack("<H", PAGE_BYTES)),
        (92 + 32, b"\xff"),
    ],
    ids=["version", "kind", "segment", "place", "filter", "short", "long", "outside", "no text"],
)
def test_a_void_that_is_none(at: int, new: bytes) -> None:
    assert parse_page(VOID, segment_id=ID, place=5) == Void("tenant", b"s" * 32, 9)
    assert parse_page(resealed(VOID, at, new), segment_id=ID, place=5) is None


# ── footers ──────────────────────────────────────────────────────────────────────────────────────


def table_bytes() -> tuple[bytes, FooterPlace]:
    """A footer's table and its place: one scope, one void, two records."""
    table = table_of(
        (SCOPE,),
        (Void("tenant", None, 9),),
        pages=[1, 4],
        scope_of=[0, 0],
        keys=bytes(64),
        checksums=bytes(32),
    )
    data = footer(HEAD, table, first_page=7)
    place = parse_trailer(data[-PAGE_BYTES:], HEAD, file_bytes=7 * PAGE_BYTES + len(data))
    assert place is not None
    return data[: place.table_bytes], place


def parsed(body: bytes, place: FooterPlace, **counts: int) -> bool:
    """Whether this is a table, its checksum being right."""
    fields = {
        "first_page": place.first_page,
        "record_count": place.record_count,
        "scope_count": place.scope_count,
        "void_count": place.void_count,
        "scope_bytes": place.scope_bytes,
        **counts,
    }
    return (
        parse_footer(body, FooterPlace(**fields, checksum=xxhash.xxh3_128_digest(body)), HEAD)
        is not None
    )


def test_a_table_whose_parts_do_not_parse() -> None:
    body, place = table_bytes()
    assert parsed(body, place)
    assert not parsed(body[:-1], place), "shorter than announced"
    assert not parsed(changed(body, 4, b"KVSX"), place), "a scope that is none"
    assert not parsed(changed(body, 0, struct.pack("<I", 1 << 30)), place), "a scope without end"
    assert not parsed(body, place, scope_count=2), "one scope more than there is"
    assert not parsed(body, place, scope_count=0), "a scope that nobody announced"
    void_at = place.scope_bytes
    assert not parsed(changed(body, void_at, b"XXXX"), place), "a void that is none"
    scope_at = place.scope_bytes + PAGE_BYTES + 8
    one = np.array([1], "<u4").tobytes()
    assert not parsed(changed(body, scope_at, one), place), "a record of no scope"


def test_a_trailer_of_another_kind_or_version_is_none() -> None:
    data = footer(HEAD, table_of((), (), **NO_RECORDS), first_page=1)
    page, size = data[-PAGE_BYTES:], PAGE_BYTES + len(data)
    assert parse_trailer(resealed(page, 0, page[:1]), HEAD, file_bytes=size) is not None
    for at, new in ((0, b"XXXX"), (4, struct.pack("<H", 9))):
        assert parse_trailer(resealed(page, at, new), HEAD, file_bytes=size) is None


# ── datagrams ────────────────────────────────────────────────────────────────────────────────────


HELLO = HelloScheduler(1, "e", "n", "t", 1, "p")


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (Hint(1, bytes(33)), "keys: 33 bytes are no multiple of 32"),
        (LeaseAsk(1, bytes(31)), "keys: 31 bytes are no multiple of 32"),
        (Seal(1, bytes(32), bytes(3), bytes(8), bytes(16)), "slots: 3 bytes are no multiple of 4"),
        (Seal(1, bytes(32), bytes(8), bytes(8), bytes(16)), "slots: 2 elements where 1"),
        (Seal(1, bytes(32), bytes(4), bytes(0), bytes(16)), "generations: 0 elements where 1"),
        (Seal(1, bytes(32), bytes(4), bytes(8), bytes(32)), "checksums: 2 elements where 1"),
        (Drop(1, bytes(8), bytes(8)), "generations: 1 elements where 2"),
        (Distrust(bytes(5), bytes(8)), "slots: 5 bytes are no multiple of 4"),
        (Compared(1, 2, 3, bytes(5)), "diverged: 5 bytes are no multiple of 4"),
        (HelloScheduler(1, "é" * 128, "n", "t", 1, "p"), "a name of more than 255 bytes"),
    ],
)
def test_what_an_engine_may_not_say(message: Message, sentence: str) -> None:
    assert decode_from_engine(encode(HELLO)) == HELLO
    with pytest.raises(ProtocolError, match=sentence):
        decode_from_engine(encode(message))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (Grant(1, bytes(3), bytes(8)), "slots: 3 bytes are no multiple of 4"),
        (Grant(1, bytes(4), bytes(16)), "generations: 2 elements where 1"),
        (LeaseReply(1, 2, bytes(4), bytes(8), bytes(15)), "checksums: 15 bytes"),
        (LeaseMore(1, bytes(4), bytes(8), bytes(32)), "checksums: 2 elements where 1"),
    ],
)
def test_what_a_node_may_not_say(message: Message, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        decode_from_node(encode(message))


@pytest.mark.parametrize(
    "datagram", [b"", b"\xc1", b"\x91" * 5_000, encode(HELLO).replace(b"\xa1e", b"\xa1\xff")]
)
def test_what_is_no_datagram(datagram: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed datagram"):
        decode_from_engine(datagram)


def test_a_datagram_that_is_too_long() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_from_engine(bytes(DATAGRAM_BYTES_MAX + 1))


# ── the story of a request ───────────────────────────────────────────────────────────────────────


FULL = Story(
    request="r" * REQUEST_BYTES_MAX,
    age_ns=1,
    prompt_tokens=2,
    local_tokens=3,
    loaded_tokens=4,
    file_tokens=5,
    outcome="o" * 32,
    detail="d" * 255,
    session=6,
    leases=list(range(ASKS_PER_LOOKUP_MAX)),
    first_block=7,
    queued_ns=8,
    lookup_ns=9,
    promotion_ns=10,
    load_ns=11,
    stored_blocks=12,
    first_token_ns=13,
    transfer="t" * 255,
    admitted_ns=14,
    total_ns=15,
    traceparent="0" * 55,
)


@pytest.mark.parametrize("story", [FULL, Story(request="r")])
def test_it_comes_back_as_it_was(story: Story) -> None:
    assert decode_from_engine(encode(story)) == story


@pytest.mark.parametrize(
    "change",
    [
        {"request": ""},
        {"request": "r" * (REQUEST_BYTES_MAX + 1)},
        {"outcome": "o" * 33},
        {"detail": "d" * 256},
        {"transfer": "t" * 256},
        {"traceparent": "0" * 56},
        {"leases": list(range(ASKS_PER_LOOKUP_MAX + 1))},
        {"leases": [-1]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    fields = {**msgspec.structs.asdict(FULL), "type": "Story", **change}
    with pytest.raises(ProtocolError):
        decode_from_engine(msgspec.msgpack.encode(fields))
