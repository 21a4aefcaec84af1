"""Messages of a feed: there and back, and every way to be broken is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.peers.changes import DELTA_KEYS_MAX, head_bytes
from kvstore.types import Incarnation, SpaceId, Tier
from kvstore.wire.feed import (
    CHANGES_MAX,
    KEYS_MAX,
    Delta,
    FeedBeat,
    FeedOrder,
    Hello,
    Left,
    OfStream,
    Registry,
    RegistryRefused,
    Removed,
    SnapshotPart,
    Stored,
    Word,
    decode_hello,
    decode_order,
    decode_word,
    encode,
    key_count,
)
from kvstore.wire.load import EngineEntry, Load

STREAM = ("n", Incarnation(1), 1)
SPACE = SpaceId(bytes(32))
HELLO = Hello(*STREAM, 0, "n:1")
STORED = Stored("t", SPACE, Tier.DRAM, bytes(64))
REMOVED = Removed("t" * 255, SPACE, Tier.HBM, bytes(32), "e" * 255, 2**32 - 1)
LEFT = Left("e", 1)
BUSY = Load(**{name: 2**40 + n for n, name in enumerate(Load.__struct_fields__)})
ENGINE = EngineEntry(engine="e", tenant="t", space=SPACE, model="m", rank=1, queue=0)
WORDS: list[Word] = [
    Delta(*STREAM, 2**63 - 1, (STORED, REMOVED, LEFT)),
    FeedBeat(*STREAM, 7, BUSY),
    FeedBeat(*STREAM, 7),
    SnapshotPart(*STREAM, 7, 0, is_last=True, stored=(STORED,)),
    Registry(*STREAM, (ENGINE, msgspec.structs.replace(ENGINE, queue=None))),
]


def test_a_hello_words_and_orders_arrive() -> None:
    assert decode_hello(encode(HELLO)) == HELLO
    for word in WORDS:
        assert decode_word(encode(word), HELLO) == word
    for order in (FeedOrder(), FeedOrder(another="h"), FeedOrder(refused="it is too long")):
        assert decode_order(encode(order)) == order


def test_keys_are_counted() -> None:
    assert [key_count(word) for word in WORDS] == [3, 0, 0, 2, 0]


def test_of_changes_there_are_as_many_as_a_node_tells_at_once() -> None:
    assert CHANGES_MAX >= DELTA_KEYS_MAX, "each change of a delta has a key, or counts as one"
    delta = Delta(*STREAM, 1, (LEFT,) * CHANGES_MAX)
    part = SnapshotPart(*STREAM, 1, 0, is_last=False, stored=(STORED,) * CHANGES_MAX)
    for word in (delta, part):
        assert decode_word(encode(word), HELLO) == word
    for word, field in ((delta, "changes"), (part, "stored")):
        longer = {field: (*getattr(word, field), LEFT if word is delta else STORED)}
        with pytest.raises(ProtocolError, match="length <= 4096"):
            decode_word(encode(msgspec.structs.replace(word, **longer)), HELLO)


def test_a_change_takes_no_more_than_is_counted_for_it() -> None:
    removed = Removed("é" * 255, SPACE, Tier.HBM, bytes(32), "é" * 255, 2**32 - 1)
    for change, keys in ((removed, 32), (Left(removed.engine, removed.rank), 0)):
        assert len(msgspec.msgpack.encode(change)) - keys <= head_bytes(change)


BROKEN_CHANGES: list[tuple[Stored | Left, dict[str, Any], str]] = [
    (STORED, {"space": b"x"}, "length >= 32"),
    (STORED, {"tenant": "t" * 256}, "length <= 255"),
    (STORED, {"tier": 3}, "Invalid enum value 3"),
    (STORED, {"keys": b""}, "length >= 32"),
    (STORED, {"keys": bytes(33)}, "keys: 33 bytes are no multiple of 32"),
    (STORED, {"keys": bytes(32 * (KEYS_MAX + 1))}, "length <= 524288"),
    (STORED, {"rank": -1}, "`int` >= 0"),
    (LEFT, {"engine": "e" * 256}, "length <= 255"),
]


@pytest.mark.parametrize(("change", "fields", "why"), BROKEN_CHANGES)
def test_a_broken_change_is_refused(
    change: Stored | Left, fields: dict[str, Any], why: str
) -> None:
    broken: Any = msgspec.structs.replace(change, **fields)
    words: list[OfStream] = [Delta(*STREAM, 1, (broken,))]
    if isinstance(change, Stored):
        words.append(SnapshotPart(*STREAM, 1, 0, is_last=True, stored=(broken,)))
        values = msgspec.structs.asdict(broken).values()
        words.append(Delta(*STREAM, 1, (Removed(*values),)))
    for word in words:
        with pytest.raises(ProtocolError, match=why):
            decode_word(encode(word), HELLO)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (HELLO, "a feed has one Hello"),
        (FeedBeat("m", Incarnation(1), 1, 7), "a word of another stream"),
        (FeedBeat("n", Incarnation(2), 1, 7), "a word of another stream"),
        (FeedBeat("n", Incarnation(1), 2, 7), "a word of another stream"),
        (FeedBeat(*STREAM, 7, Load(dram_bytes=2**63)), "dram_bytes"),
        (FeedBeat(*STREAM, -1), "`int` >= 0"),
    ],
)
def test_a_broken_word_is_refused(word: OfStream, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode_word(encode(word), HELLO)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "malformed message"),
        (b"\x0a\x06\x0a\x02n1\x11\x01", "malformed message"),
        (msgspec.msgpack.encode({"type": "Cleared"}), "Invalid value 'Cleared'"),
        (msgspec.msgpack.encode({"type": "Hello", "x" * 999: 1}), "malformed message: .{0,200}$"),
        (b"\x91" * 5000, "malformed message"),
        (encode(WORDS[1]), "the first word of a feed is Hello"),
        (encode(Hello("", Incarnation(1), 1, 0)), "length >= 1"),
        (encode(Hello("n", Incarnation(0), 1, 0)), "`int` >= 1"),
        (encode(Hello("n" * 256, Incarnation(1), 1, 0)), "length <= 255"),
    ],
)
def test_a_broken_hello_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode_hello(data)


def test_a_broken_order_is_refused() -> None:
    for data in (b"", encode(HELLO), msgspec.msgpack.encode({"refused": "x" * 1025})):
        with pytest.raises(ProtocolError, match="malformed order"):
            decode_order(data)


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        ([{"engine": f"{n}"} for n in range(65)], "65 engines in "),
        ([{"model": "m" * 200}] * 30, "30 engines in "),
        ([{"address": "a" * 256}], "an engine that no node serves: .*length <= 255"),
        ([{"engine": ""}], "an engine that no node serves: .*length >= 1"),
        ([{"space": SpaceId(b"short")}], "an engine that no node serves: .*length >= 32"),
    ],
)
def test_engines_that_cannot_be_taken_are_refused_by_themselves(
    engines: list[dict[str, Any]], why: str
) -> None:
    named = tuple(msgspec.structs.replace(ENGINE, **each) for each in engines)
    with pytest.raises(RegistryRefused, match=why):
        decode_word(encode(Registry(*STREAM, named)), HELLO)
