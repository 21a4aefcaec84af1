"""Bad inputs (200,000 in `make nightly`) to all that reads what others wrote: typed refusals only.

Each test counts its own. Hostile shared memory is in `test_hostile_memory.py`, real sockets of a
real node in `tests/integration/node/test_bad_input.py`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import msgspec
import pytest
import xxhash
from google.protobuf.message import DecodeError, Message as ProtoMessage
from msgspec import Struct, msgpack

from kvstore.cli.prefix import read_tokens
from kvstore.config.node import load_config
from kvstore.errors import ConfigError, ProtocolError
from kvstore.net.http import text_page
from kvstore.net.server import RefusedCall
from kvstore.node.inspect import InspectService
from kvstore.node.publish import Publisher
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import TOPICS, encode_rows
from kvstore.tiers.file.disk import Pages
from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire import kv_events
from kvstore.wire.load import (
    DISK_NS_PER_MIB_MAX,
    LEARNED_BYTES_MAX,
    SPACES_MAX,
    Learned,
    NotLearned,
    SpacePace,
    decode_learned,
    encode_learned,
)
from kvstore.wire.messages import (
    Distrust,
    Drop,
    HelloRank,
    Quiet,
    Refused,
    Seal,
    Story,
    decode_from_engine,
    decode_from_node,
    encode,
)
from kvstore.wire.peers import decode_answer, decode_ask
from kvstore.wire.record import (
    PAGE_COVERED,
    Scope,
    Void,
    parse_page,
    parse_prefix,
    seal_page,
    void_page,
    write_block_page,
)
from kvstore.wire.segment import (
    SegmentHead,
    footer,
    parse_footer,
    parse_segment_page,
    parse_store_page,
    parse_trailer,
    segment_page,
    store_page,
)
from tests.amounts import amount, covered
from tests.faults.door import Door, Guest, Line
from tests.faults.mutate import Mutator, no_growth
from tests.faults.words import answers, answers_of_peers, asks_of_peers, hellos, words
from tests.kit.engine_check import check_engine
from tests.kit.reference import table_of
from tests.unit.engine.harness import Hellos, Node, Peer, key, keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Refusals are logged, and pytest would keep every line; bugs of the node still show."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# ── attach socket ────────────────────────────────────────────────────────────────────────────────

DATAGRAMS = amount(10_000, nightly=80_000)


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        (decode_from_engine, words(7, [(0, 1), (16, 2)]) + hellos()),
        (decode_from_node, answers()),
        (decode_ask, asks_of_peers()),
        (decode_answer, answers_of_peers()),
    ],
    ids=["engine", "node", "asks of peers", "answers of peers"],
)
def test_datagrams_are_decoded_or_refused(
    decode: Callable[[bytes], Struct], said: list[Struct]
) -> None:
    mutator = Mutator(1, [msgpack.encode(message) for message in said])
    outcomes = Counter[str]()
    with no_growth():
        for number in range(DATAGRAMS // 2):
            message = said[number // 2 % len(said)]
            datagram = mutator.datagram(message) if number % 2 else mutator.next()
            try:
                outcomes[type(decode(datagram)).__name__] += 1
            except ProtocolError:
                outcomes["refused"] += 1
    assert outcomes["refused"] > DATAGRAMS // 10
    assert outcomes.keys() >= {type(message).__name__ for message in said}
    covered("bad inputs", DATAGRAMS // 2)


STRANGERS = amount(2_000, nightly=12_000)
INSIDERS = amount(3_000, nightly=15_000)
PARTS = 3


def test_strangers_at_the_door(tmp_path: Path) -> None:
    """First datagrams: with and without a pidfd, nobody's business but their own."""
    mutator = Mutator(2, [encode(message) for message in words(7, [(0, 1)]) + hellos()])
    with Door(tmp_path) as door, no_growth():
        bystander = Guest(door, "bystander")
        bystander.store(1, 2)
        for number in range(STRANGERS):
            line = Line(door)
            message = hellos()[number % 2]
            hello = mutator.datagram(message) if number % 3 else mutator.next()
            if number % 5:
                line.introduce(hello)
            else:
                line.say(hello)
            line.close()
            if number % 100 == 0:
                check_engine(door.engine)
                door.tick()
        assert len(bystander.read(bystander.lease(1, 1, 2))) == 2
        assert door.attach.socket_count == 2
    covered("bad inputs", STRANGERS)


@pytest.mark.parametrize("part", range(PARTS))
def test_insiders_that_talk_nonsense(tmp_path: Path, part: int) -> None:
    """In an open session, about its own slots and about others'."""
    mutator = Mutator(part, [encode(message) for message in words(7, [(0, 1)]) + hellos()])
    source = mutator.random
    with Door(tmp_path) as door, no_growth():
        bystander = Guest(door, "bystander")
        bystander.store(1, 2)
        expected = bystander.read(bystander.lease(1, 1, 2))
        theirs = [(slot, 1) for slot in range(0, 32 * 16, 16)]
        insider = Guest(door, "insider", tenant="other")
        sent = reopened = 0
        for number in range(INSIDERS // PARTS):
            if not insider.is_open:
                insider.close()
                insider = Guest(door, f"insider{number}", tenant="other")
                reopened += 1
            places = (insider.credits or theirs)[:2] if number % 2 else source.sample(theirs, 2)
            message = source.choice(words(insider.session, places))
            is_rank = isinstance(message, Seal | Drop | Distrust | Quiet)
            line = insider.rank if is_rank == (source.random() < 0.95) else insider.scheduler
            kind = source.random()
            datagram = encode(message) if kind < 0.2 else mutator.datagram(message)
            line.say(mutator.next() if kind > 0.9 else datagram)
            insider.hear()
            sent += 1
            if number % 50 == 0:
                check_engine(door.engine)
                door.tick(ms=1)
        assert sent == INSIDERS // PARTS
        assert reopened < sent, "some of it must be heard"
        insider.close()
        assert bystander.read(bystander.lease(2, 1, 2)) == expected
        check_engine(door.engine)
    covered("bad inputs", sent)


# ── files ────────────────────────────────────────────────────────────────────────────────────────

PAGE_INPUTS = amount(8_000, nightly=60_000)
_SCOPE = Scope("t", b"s" * 32, Shard(0, 4, 0, 2), 5_000)
_HEAD = SegmentHead(b"d" * 16, b"i" * 16, 7)


def _pages() -> list[bytes]:
    block = Pages(PAGE_BYTES)
    write_block_page(
        block.view,
        prefix=_SCOPE.prefix(),
        key=key(1),
        checksum=b"c" * 16,
        segment_id=_HEAD.segment_id,
        place=5,
    )
    void = void_page(Void("t", None, 9), segment_id=_HEAD.segment_id, place=5)
    return [bytes(block.view), void, segment_page(_HEAD), store_page(b"d" * 16)]


def test_pages_of_a_segment_are_parsed_or_none() -> None:
    """Half of them are sealed: whoever can write to the disk can do that too."""
    table = table_of(
        (_SCOPE,),
        (Void("t", None, 9),),
        pages=[1, 4],
        scope_of=[0, 0],
        keys=keys(1, 2),
        checksums=bytes(32),
    )
    closing = footer(_HEAD, table, first_page=7)
    size = 7 * PAGE_BYTES + len(closing)
    mutator = Mutator(4, [page[:200] for page in [*_pages(), closing[-PAGE_BYTES:]]])
    place = parse_trailer(closing[-PAGE_BYTES:], _HEAD, file_bytes=size)
    assert place is not None
    bodies = Mutator(5, [closing[: place.table_bytes]])
    parsed = Counter[str]()
    with no_growth():
        for number in range(PAGE_INPUTS):
            if number % 5 == 0:
                body = bodies.next()
                good = parse_footer(
                    body, _with_checksum(place, body) if number % 2 else place, _HEAD
                )
                parsed["footer"] += good is not None
                continue
            page = bytearray(mutator.next()[:PAGE_COVERED].ljust(PAGE_BYTES, b"\0"))
            if number % 2:
                page[PAGE_COVERED:] = seal_page(page)
            whole = bytes(page)
            parsed["page"] += parse_page(whole, segment_id=_HEAD.segment_id, place=5) is not None
            parsed["head"] += parse_segment_page(whole) is not None
            parsed["store"] += parse_store_page(whole) is not None
            parsed["trailer"] += parse_trailer(whole, _HEAD, file_bytes=size) is not None
            parsed["prefix"] += parse_prefix(whole[92 : 92 + number % 90]) is not None
    assert parsed["page"]
    assert parsed["head"]
    assert parsed["store"]
    assert parsed["footer"]
    covered("bad inputs", PAGE_INPUTS)


def _with_checksum(place: Any, body: bytes) -> Any:
    return type(place)(
        place.first_page,
        place.record_count,
        place.scope_count,
        place.void_count,
        place.scope_bytes,
        xxhash.xxh3_128_digest(body),
    )


NOTES = amount(2_000, nightly=10_000)


def test_a_note_is_learned_or_not(tmp_path: Path) -> None:
    good = Learned(5_000_000, (SpacePace("t", "ab" * 32, 10_000, 10),))
    whole = encode_learned(good).rstrip()
    body = whole[whole.index(b'"learned":') + 10 : -1]
    mutator, bodies = Mutator(6, [whole]), Mutator(7, [body])
    learned = 0
    with no_growth():
        for number in range(NOTES):
            if number % 2:
                text = mutator.next()
            else:
                changed = bodies.next()
                text = whole.replace(body, changed).replace(
                    xxhash.xxh3_128_hexdigest(body).encode(),
                    xxhash.xxh3_128_hexdigest(changed).encode(),
                )
            try:
                found = decode_learned(text[:LEARNED_BYTES_MAX])
            except NotLearned:
                continue
            learned += 1
            assert len(found.spaces) <= SPACES_MAX
            assert 0 <= found.disk_ns_per_mib <= DISK_NS_PER_MIB_MAX
    assert learned > NOTES // 100
    covered("bad inputs", NOTES)


# ── gRPC and ZeroMQ ──────────────────────────────────────────────────────────────────────────────

REQUESTS = amount(5_000, nightly=30_000)


def live_service() -> InspectService:
    """The service over a live engine with a block and a request."""
    node = Node()
    peer = Peer(node)
    peer.store(1)
    peer.lease(1, 1, 2)
    node.hear(peer.scheduler, Story(request="r", session=peer.session, leases=[1]))
    driver = SimpleNamespace(
        query=lambda ask, timeout_s: ask(node.engine),
        clear=lambda **names: len(names),
        executor=SimpleNamespace(member=None),
    )
    return InspectService(cast("Any", driver), lambda: text_page(200, "{}"))


REQUEST_KINDS: dict[str, ProtoMessage] = {
    **{
        topic: pb.RowsRequest(
            topic=topic,
            filter=pb.Filter(
                limit=7,
                space="ab",
                request="r",
                number=1,
                prompt=pb.Prompt(space=bytes(32), tenant="t", keys=keys(1, 2)),
            ),
        )
        for topic in TOPICS
    },
    "clear": pb.ClearRequest(space="ab"),
}


def test_requests_are_answered_or_refused() -> None:
    service = live_service()
    mutator = Mutator(8, [kind.SerializeToString() for kind in REQUEST_KINDS.values()])
    outcomes = Counter[object]()
    with no_growth():
        for number in range(REQUESTS):
            name = list(REQUEST_KINDS)[number % len(REQUEST_KINDS)]
            call: Any = service.Clear if name == "clear" else service.Rows
            try:
                request: Any = type(REQUEST_KINDS[name]).FromString(mutator.next())
            except DecodeError:
                outcomes["undecodable"] += 1
                prompt = pb.Prompt(space=mutator.next(), keys=mutator.next())
                request = pb.RowsRequest(topic=name, filter=pb.Filter(prompt=prompt))
                call = service.Rows
            if number % 2 and call == service.Rows:
                request.topic = name  # what asks for nothing reaches nothing
            try:
                reply = call(request, cast("Any", None))
            except RefusedCall as error:
                outcomes[error.code] += 1
            else:
                outcomes["answered"] += 1
                assert reply.ByteSize() < 1 << 20
    assert outcomes["answered"] > REQUESTS // 10
    assert {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT} <= set(outcomes)
    covered("bad inputs", REQUESTS)


REPLAYS = amount(2_000, nightly=10_000)


def test_replay_requests_are_bounded() -> None:
    """Frames of any number and content; whoever is not understood gets no answer."""
    mutator = Mutator(9, [kv_events.END, (5).to_bytes(8, "big"), b"", b"client"])
    frames: list[bytes] = []
    publisher: Any = object.__new__(Publisher)
    publisher._router = SimpleNamespace(recv_multipart=lambda: frames)
    publisher._kept = [(number, b"batch") for number in range(10)]
    publisher._clock = SimpleNamespace(now_ns=lambda: 0)
    publisher._next_number = 10
    publisher._who = kv_events.PublisherName("n", "7")
    publisher._ask = lambda row: ([], -1)
    publisher.counters = SimpleNamespace(replays=0, requests_refused=0)
    with no_growth():
        for number in range(REPLAYS):
            frames[:] = [mutator.next() for _ in range(mutator.random.randrange(1, 5))]
            if number % 2:
                frames[:] = [b"client", b"", mutator.next()[:8]]
            publisher._replies, publisher._asked = {}, {}
            publisher._take_request()
            for reply in publisher._replies.values():
                told = list(reply.frames)
                assert len(told) <= 11
                assert told[-1] == (kv_events.END, b"")
    assert publisher.counters.replays > 100
    assert publisher.counters.requests_refused > 100
    covered("bad inputs", REPLAYS)


# ── files and flags of the operator ──────────────────────────────────────────────────────────────

CONFIGS = amount(1_000, nightly=4_000)
CONFIG_TEXT = b"""\
dram: 64MiB
slab: 1MiB
file: %s:1GiB
file-admission: second-sight
file-writes-per-day: 1TiB
policy: reuse
metrics: 127.0.0.1:0
events: ipc:///tmp/x
quota: {llama: 30%%, other: 20MiB}
allow-uid: [1, 2]
log-level: info
"""
VALUES: list[Any] = [
    *("", "auto", "off", "-1", "1e400", "9" * 400, "\0", "0x10", "64GiB", "NaN", "inf", "64 gib"),
    *("é", "../..", "/" * 5_000, "127.0.0.1:99999", "[::1]:0", "::1", "ipc://", "tcp://[::]:1"),
    *("/tmp/x:1GiB", "/tmp/x:" + "9" * 400 + "TiB", ":1GiB", "a:b:c", "30%", "1" * 300 + "%"),
    *(True, False, None, 0, -1, 2**70, 1.5, float("inf"), [], [-1], ["x"], {}, {"a": {}}, {"": ""}),
    {str(n): "1%" for n in range(200)},
]


def test_configuration_files_load_or_say_why(tmp_path: Path) -> None:
    mutator = Mutator(10, [CONFIG_TEXT % bytes(tmp_path / "store"), b"quota: &a {b: *a}", b"- 1"])
    path = tmp_path / "node.yaml"
    loaded = 0
    with no_growth():
        for _ in range(CONFIGS):
            path.write_bytes(mutator.next())
            try:
                load_config(path, {})
            except ConfigError:
                continue
            loaded += 1
    assert loaded > CONFIGS // 50
    covered("bad inputs", CONFIGS)


def test_values_of_flags_are_taken_or_refused_in_one_sentence(tmp_path: Path) -> None:
    names = ["socket", "dram", "policy", "file", "file-admission", "file-writes-per-day", "slab"]
    names += ["node-name", "metrics", "events", "event-hashes", "quota", "allow-uid", "log-level"]
    fixed = {"dram": "64MiB", "file": f"{tmp_path}/store:1GiB"}
    source = random.Random(11)
    refused, said = 0, set()
    for number in range(CONFIGS):
        chosen = {name: source.choice(VALUES) for name in source.sample(names, 1 + number % 3)}
        try:
            load_config(None, fixed | chosen)
        except ConfigError as error:
            said.add(str(error))
            refused += 1
    assert CONFIGS // 4 < refused < CONFIGS
    assert not [text for text in said if not text or "\n" in text]
    covered("bad inputs", CONFIGS)


TOKEN_FILES = amount(500, nightly=2_000)


def test_token_files_are_read_or_refused(tmp_path: Path) -> None:
    mutator = Mutator(12, [b"[1, 2, 3]", b"1 2 3", b'["a", {"b": [1]}]', b"[" * 20_000, b"1e9"])
    path = tmp_path / "tokens"
    read = 0
    for _ in range(TOKEN_FILES):
        path.write_bytes(mutator.next())
        try:
            tokens = read_tokens(path)
        except ConfigError:
            continue
        assert min(tokens) >= 0
        read += 1
    assert read > TOKEN_FILES // 40
    covered("bad inputs", TOKEN_FILES)


# ── numbers that no model has ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("field", "value"),
    [("hash_block_tokens", 2**63), ("hash_block_tokens", -1), ("block_tokens", -16)],
)
def test_an_absurd_hello_is_refused_and_inspect_goes_on(
    tmp_path: Path, field: str, value: int
) -> None:
    absurd = Hellos("absurd")
    hello = absurd.rank_hello(0)
    assert isinstance(hello, HelloRank)
    (group,) = hello.groups
    space = msgspec.structs.replace(group.space, **{field: value})
    hello = msgspec.structs.replace(hello, groups=(msgspec.structs.replace(group, space=space),))
    with Door(tmp_path) as door:
        Guest(door, "bystander")
        scheduler, rank = Line(door), Line(door)
        scheduler.introduce(encode(absurd.scheduler_hello()))
        rank.introduce(encode(hello))
        (refused,) = rank.hear()
        assert isinstance(refused, Refused)
        assert refused.permanent
        assert f"space.{field}" in refused.reason
        assert encode_rows(door.engine.explain.hashings()) != "[]"
        assert encode_rows(door.engine.spaces()) != "[]"
