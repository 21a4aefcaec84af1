"""Messages between nodes: there and back, and every way to be broken is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvstore.errors import ProtocolError
from kvstore.types import Incarnation, Shard, SpaceId
from kvstore.wire import peers as wire
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, RANKS_MAX
from kvstore.wire.record import PAYLOAD_BYTES_MAX
from tests.faults.words import answers_of_peers, asks_of_peers

SPACE = SpaceId(bytes(32))
SHARD = Shard(0, 4, 0, 2)
REQUEST, REPLY = wire.PrepareRequest("t", SPACE, "e", bytes(32)), wire.PrepareReply(1, 2, 3)
HELLO = wire.PeerHello("n", Incarnation(1))
ASK = wire.ServeAsk(1, "t", SPACE, bytes(64))
GRANT = wire.PushGrant(
    grant=1,
    epoch=2,
    transfer="r",
    tenant="t",
    space=SPACE,
    keys=bytes(64),
    extents=bytes(8),
    block_bytes=4096,
    deadline_ms=10,
)
PUSHED = wire.Pushed(
    grant=1, epoch=2, first=0, shards=(SHARD,), block_bytes=(8,), checksums=bytes(16)
)


@pytest.mark.parametrize("message", answers_of_peers())
def test_an_answer_arrives(message: wire.Answer) -> None:
    assert wire.decode_answer(wire.encode(message)) == message


def test_a_preparation_and_its_answer_arrive() -> None:
    assert wire.decode_request(wire.encode(REQUEST)) == REQUEST
    assert wire.decode_reply(wire.encode(REPLY)) == REPLY


@pytest.mark.parametrize(
    "message",
    [
        *asks_of_peers(),
        # Just within bounds.
        wire.PeerHello("é" * 127 + "n", Incarnation(2**63 - 1)),
        wire.ServeAsk(2**63 - 1, "t" * 255, SPACE, bytes(32 * KEYS_PER_DATAGRAM_MAX)),
        msgspec.structs.replace(
            GRANT,
            keys=bytes(32 * KEYS_PER_DATAGRAM_MAX),
            extents=bytes(4 * KEYS_PER_DATAGRAM_MAX),
            block_bytes=PAYLOAD_BYTES_MAX,
            deadline_ms=600_000,
            transfer="é" * 255,
        ),
    ],
)
def test_an_ask_arrives(message: wire.Ask) -> None:
    assert wire.decode_ask(wire.encode(message)) == message


@pytest.mark.parametrize(
    ("message", "fields", "sentence"),
    [
        (HELLO, {"node": ""}, r"length >= 1 - at `\$.node`"),
        (HELLO, {"node": "é" * 128}, "a name of more than 255 bytes"),
        (HELLO, {"incarnation": 0}, r"`int` >= 1 - at `\$.incarnation`"),
        (ASK, {"tenant": "é" * 128}, "a name of more than 255 bytes"),
        (ASK, {"keys": bytes(33)}, "keys: 33 bytes are no multiple of 32"),
        (ASK, {"keys": b""}, r"length >= 32 - at `\$.keys`"),
        (ASK, {"keys": bytes(32 * 2049)}, r"length <= 65536 - at `\$.keys`"),
        (ASK, {"space": bytes(31)}, r"length >= 32 - at `\$.space`"),
        (ASK, {"serving": 2**63}, r"`int` <= 9223372036854775807 - at `\$.serving`"),
        (ASK, {"type": "Serve"}, r"Invalid value 'Serve' - at `\$.type`"),
        (ASK, {"x" * 5000: 1}, "unknown field"),
        (GRANT, {"keys": bytes(96)}, "extents: 2 elements where 3 were announced"),
        (GRANT, {"extents": bytes(9)}, "extents: 9 bytes are no multiple of 4"),
        (GRANT, {"tenant": "é" * 128}, "a name of more than 255 bytes"),
        (GRANT, {"block_bytes": 0}, r"`int` >= 1 - at `\$.block_bytes`"),
        (GRANT, {"block_bytes": PAYLOAD_BYTES_MAX + 1}, r"at `\$.block_bytes`"),
        (GRANT, {"deadline_ms": 600_001}, r"`int` <= 600000 - at `\$.deadline_ms`"),
        (GRANT, {"descriptor": bytes((64 << 10) + 1)}, r"length <= 65536 - at `\$.descriptor`"),
    ],
)
def test_an_ask_that_is_none_is_refused(
    message: wire.Ask, fields: dict[str, Any], sentence: str
) -> None:
    """In one short sentence."""
    its = msgspec.to_builtins(message, builtin_types=(bytes,))
    with pytest.raises(ProtocolError, match=sentence) as refused:
        wire.decode_ask(msgspec.msgpack.encode({**its, **fields}))
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("fields", [{"engine": "é" * 128}, {"keys": bytes(33)}, {"tenant": ""}])
def test_a_preparation_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    its = msgspec.to_builtins(REQUEST, builtin_types=(bytes,))
    with pytest.raises(ProtocolError):
        wire.decode_request(msgspec.msgpack.encode({**its, **fields}))


@pytest.mark.parametrize(
    "answer",
    [
        wire.ServeAnswer(1, (Shard(0, 65_536, 0, 1),), (8,)),
        wire.ServeAnswer(1, (SHARD,) * (RANKS_MAX + 1), (8,) * (RANKS_MAX + 1)),
        wire.ServeAnswer(1, (SHARD,), (0,)),
        wire.ServeAnswer(1, (SHARD,), (PAYLOAD_BYTES_MAX + 1,)),
        msgspec.structs.replace(PUSHED, grant=2**63),
        wire.PushOver(1, 2, "x" * 401, is_quiet=True),
        wire.GivenBack(1, bytes(KEYS_PER_DATAGRAM_MAX + 1)),
        wire.PeerWelcome("", Incarnation(1), b""),
        wire.PeerWelcome("n", Incarnation(0), b""),
    ],
)
def test_an_answer_beyond_bounds_is_refused(answer: wire.Answer) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        wire.decode_answer(wire.encode(answer))


def test_each_side_takes_only_what_the_other_says() -> None:
    for message, decode in (
        (PUSHED, wire.decode_ask),
        (ASK, wire.decode_answer),
        (REPLY, wire.decode_request),
        (REQUEST, wire.decode_reply),
    ):
        with pytest.raises(ProtocolError, match="malformed message"):
            decode(wire.encode(message))


@given(st.binary(max_size=200))
def test_noise_is_refused_with_a_protocol_error(data: bytes) -> None:
    decoders = wire.decode_ask, wire.decode_answer, wire.decode_request, wire.decode_reply
    for decode in decoders:
        with pytest.raises(ProtocolError):
            decode(data)


# ── what a decoder cannot know ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shards", "sizes", "slots", "sums", "is_taken"),
    [
        (0, 0, 0, 0, True),
        (2, 2, 0, 0, True),
        (1, 1, 12, 48, True),
        (2, 2, 24, 96, True),
        (1, 1, 16, 64, False),
        (2, 1, 24, 96, False),
        (0, 0, 4, 0, False),
        (0, 0, 4, 16, False),
        (1, 1, 4, 0, False),
        (1, 1, 0, 16, False),
        (1, 1, 2, 16, False),
        (1, 1, 4, 15, False),
        (2, 2, 4, 16, False),
    ],
)
def test_an_answer_is_about_what_was_asked(
    shards: int, sizes: int, slots: int, sums: int, *, is_taken: bool
) -> None:
    """Of three blocks, in so many shards, and bytes of slots and checksums."""
    answer = wire.ServeAnswer(1, (SHARD,) * shards, (8,) * sizes, bytes(slots), bytes(sums))
    if is_taken:
        wire.check_served(answer, asked=3)
        assert answer.places().shape == (sums // 16 // max(1, shards), max(1, shards))
        return
    with pytest.raises(ProtocolError):
        wire.check_served(answer, asked=3)


@pytest.mark.parametrize(
    ("shards", "sizes", "sums", "is_taken"),
    [
        (0, 0, 0, True),
        (1, 1, 1, True),
        (2, 2, 4, True),
        (1, 1, KEYS_PER_DATAGRAM_MAX, True),
        (1, 1, KEYS_PER_DATAGRAM_MAX + 1, False),
        (1, 1, 0, False),
        (0, 0, 1, False),
        (2, 2, 3, False),
        (2, 1, 2, False),
        (0, 1, 0, False),
    ],
)
def test_a_word_about_pushed_blocks_fits_itself(
    shards: int, sizes: int, sums: int, *, is_taken: bool
) -> None:
    """In so many shards, and so many checksums."""
    its = {"shards": (SHARD,) * shards, "block_bytes": (8,) * sizes, "checksums": bytes(16 * sums)}
    word = msgspec.structs.replace(PUSHED, **its)
    if is_taken:
        wire.check_pushed(word)
        return
    with pytest.raises(ProtocolError):
        wire.check_pushed(word)


@pytest.mark.parametrize(
    ("intact", "stayed"), [(b"", [False] * 2), (b"\1\0", [True, False]), (b"\1\1", [True] * 2)]
)
def test_blocks_that_stayed(intact: bytes, stayed: list[bool]) -> None:
    assert wire.intact_of(wire.GivenBack(1, intact), count=2).tolist() == stayed


@pytest.mark.parametrize("intact", [b"\1", b"\1\1\1", b"\1\2"])
def test_flags_of_other_blocks_are_refused(intact: bytes) -> None:
    with pytest.raises(ProtocolError, match="other blocks than were served"):
        wire.intact_of(wire.GivenBack(1, intact), count=2)
