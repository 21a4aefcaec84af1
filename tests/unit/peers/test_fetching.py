"""What one node serves another: byte by byte, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from kvstore.engine.events import Clear, PeerGone
from kvstore.peers.peer_session import ASKS_MAX
from kvstore.transport.tcp import Address
from kvstore.types import PAGE_BYTES, Incarnation, Shard
from kvstore.wire import peers as wire
from kvstore.wire.assembly import Assembly
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX
from kvstore.wire.record import PAYLOAD_BYTES_MAX
from kvstore.wire.space import shard_bytes
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, Descriptor, encode
from tests.kit.coroutines import driven
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import HALVES, HEADS, LAYERS, SMALL, WHOLE, keys, pairs
from tests.unit.engine.pushing import push_grant
from tests.unit.peers.two_nodes import Stored, Two, checksum, cut, release, run, session


@pytest.mark.parametrize(
    ("there", "here"),
    [((WHOLE,), (WHOLE,)), (HALVES, (WHOLE,)), ((WHOLE,), HALVES), (HALVES, HALVES)],
)
@driven(run)
async def test_blocks_of_another_node_are_here_byte_by_byte(
    two: Two, there: tuple[Shard, ...], here: tuple[Shard, ...]
) -> None:
    Stored(two.b, "eb", shards=there).store(1, 2, 3)
    two.index.holders["b"] = 3
    engine = Stored(two.a, "ea", shards=here)
    more = await two.lease(engine, 1, 1, 2, 3)
    assert more.from_peer == 3
    assert engine.read(more) == [[cut(n, s) for s in engine.columns] for n in (1, 2, 3)]
    again = engine.lease(2, 1, 2, 3, with_checksums=True)
    expected = b"".join(checksum(n, s) for n in (1, 2, 3) for s in engine.columns)
    assert again.checksums == expected
    two.a.hear(engine.scheduler, release(1, 2))
    await two.at_rest()


@driven(run)
async def test_a_flipped_bit_on_the_way_is_a_miss(two: Two) -> None:
    two.holds(1, 2)

    def flip() -> None:
        served = two.b.served()[0]
        second = int(np.frombuffer(served.slots, "<u4")[1])
        two.b.memory[second * PAGE_BYTES + 100] ^= 4

    two.a.transfer_worker.before = flip
    engine = Stored(two.a, "ea")
    more = await two.lease(engine, 1, 1, 2)
    assert len(pairs(more)) == 1
    assert two.a.fetcher.damaged == 1
    assert two.a.engine.counters.fetch_blocks_lost == 1


@pytest.mark.parametrize("is_used_again", [False, True])
@driven(run)
async def test_what_did_not_stay_until_it_was_read_is_a_miss_even_if_its_bytes_did(
    two: Two, *, is_used_again: bool
) -> None:
    two.holds(1)

    def clear() -> None:
        two.b.step(Clear(None, None))
        if is_used_again:
            two.b.memory[:] = bytes(len(two.b.memory))

    two.a.transfer_worker.before = clear
    more = await two.lease(Stored(two.a, "ea"), 1, 1)
    assert more.slots == b""
    assert (two.a.fetcher.not_kept, two.a.fetcher.damaged) == (1, 0)
    assert two.a.blocks() == {}


@driven(run)
async def test_blocks_are_verified_while_the_peer_is_asked_whether_they_stayed(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.holds(1)
    looked: list[object] = []
    verify, answer = Assembly.verify, two.b.block_server.answer
    late: set[asyncio.Task[None]] = set()

    def look(self: Assembly, *its: Any) -> Iterator[list[bytes] | None]:
        for made in verify(self, *its):
            looked.append(made)
            yield made

    async def after_that(peer: int, its: wire.Answer) -> None:
        await two.until(lambda: bool(looked), "the block is verified")
        answer(peer, its)

    def ended(peer: int, its: wire.Answer) -> None:
        if isinstance(its, wire.GivenBack):
            late.add(asyncio.get_running_loop().create_task(after_that(peer, its)))
        else:
            answer(peer, its)

    monkeypatch.setattr(Assembly, "verify", look)
    monkeypatch.setattr(two.b.block_server, "answer", ended)
    more = await two.lease(Stored(two.a, "ea"), 1, 1)
    assert more.from_peer == 1
    await asyncio.gather(*late)


@pytest.mark.parametrize("says", ["too much", "what an engine has in its own memory", "nothing"])
@driven(run)
async def test_an_index_that_lies_costs_a_miss(two: Two, says: str) -> None:
    match says:
        case "too much":
            two.index.holders["b"] = 5
        case "nothing":
            two.index.is_away = True
        case _:
            two.index.engines["b"] = 5
    engine = Stored(two.a, "ea")
    more = await two.lease(engine, 1, 1, 2)
    assert more.slots == b""
    assert list(two.a.fetcher._sessions) == (["b"] if says == "too much" else [])
    two.a.hear(engine.scheduler, release(1))
    await two.at_rest()


def test_a_peer_that_is_gone_costs_a_miss_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        right = two.index.addresses["b"]
        two.index.addresses["b"] = "127.0.0.1:1"
        await two.knows("b")
        engine = Stored(two.a, "ea")
        for lease in (1, 2):
            assert (await two.lease(engine, lease, 1)).slots == b""
            two.a.tick(60_000)
        two.index.addresses["b"] = right
        await two.knows("b")
        assert (await two.lease(engine, 3, 1)).from_peer == 1

    run(body)
    said = [line for line in caplog.messages if "are fetched from" in line or "are not" in line]
    assert [line.split(":")[0] for line in said] == [
        "blocks are not fetched from node b",
        "blocks are fetched from node b again",
    ]


def test_an_index_that_is_away_is_logged_once_until_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def body(two: Two) -> None:
        two.index.is_away = True
        for lease in (1, 2):
            assert (await two.lease(Stored(two.a, f"e{lease}"), lease, 1)).slots == b""
        two.index.is_away = False
        await two.until(lambda: not two.a.fetcher._told[""], "it answers")

    run(body)
    assert [line for line in caplog.messages if line.startswith("where blocks are")] == [
        "where blocks are cannot be asked: nobody answers",
        "where blocks are can be asked again",
    ]


@driven(run)
async def test_somebody_else_at_the_address_is_not_read_from(two: Two) -> None:
    Stored(two.b, "eb").store(1)
    two.index.addresses["c"] = two.index.addresses["b"]
    two.index.holders["c"] = 1
    await two.knows("c")
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    assert not two.b.served()


@driven(run)
async def test_a_peer_that_sends_this_node_elsewhere_is_not_dialled(two: Two) -> None:
    two.holds(1)
    address = encode_address("169.254.169.254", 80)
    two.b.transfer_worker.descriptor = encode(Descriptor("tcp", "b", 1 << 20, 0, address))
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    assert not two.b.served()


def encode_address(host: str, port: int) -> bytes:
    return msgspec.msgpack.encode(Address(host, port, secure=True))


@driven(run)
async def test_a_peer_that_hangs_up_ends_its_servings(two: Two) -> None:
    Stored(two.b, "eb").store(1)
    async with grpc.aio.insecure_channel(two.b.address) as channel:
        call = session(channel)
        await call.write(hello())
        welcome = wire.decode_answer(await call.read())
        assert isinstance(welcome, wire.PeerWelcome)
        assert (welcome.node, welcome.descriptor) == ("b", two.b.transfer_worker.descriptor)
        await call.write(SERVE)
        assert await slots_of(call)
        assert len(two.b.engine.leases()) == 1
        call.cancel()
    await two.at_rest()
    assert len(two.b.block_server.sessions) == 0


def hello(node: str = "x") -> bytes:
    return wire.encode(wire.PeerHello(node, Incarnation(3)))


SERVE = wire.encode(wire.ServeAsk(1, "t", SPACE, keys(1)))


async def slots_of(call: Any) -> bytes:
    """Those that are served next."""
    answer = wire.decode_answer(await call.read())
    assert isinstance(answer, wire.ServeAnswer)
    return answer.slots


@driven(run)
async def test_a_node_has_one_session_its_last_one(two: Two) -> None:
    Stored(two.b, "eb").store(1)
    async with grpc.aio.insecure_channel(two.b.address) as channel:
        calls = [session(channel) for _ in range(3)]
        for call, node in zip(calls, ("x", "y", "x"), strict=True):
            await call.write(hello(node))
            assert isinstance(wire.decode_answer(await call.read()), wire.PeerWelcome)
            if call is calls[0]:
                await call.write(SERVE)
                assert await slots_of(call)
        await _read_to_its_end(calls[0])
        await two.until(lambda: not two.b.engine.leases(), "its serving has ended, too")
        assert len(two.b.block_server.sessions) == 2
        for call in calls:
            call.cancel()


@driven(run)
async def test_another_transfer_worker_there_is_read_by_its_own_descriptor(two: Two) -> None:
    two.holds(1, 2)
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).from_peer == 1
    two.b.transfer_worker.descriptor = encode(
        Descriptor("memory", "another", len(two.b.memory), 0, b"")
    )
    two.b.block_server.transfer_worker_changed()
    await two.until(lambda: len(two.b.block_server.sessions) == 0, "the session ends")
    assert (await two.lease(engine, 2, 2)).from_peer == 1
    assert (
        two.a.transfer_worker.descriptors[-1]
        == two.b.transfer_worker.descriptor
        != two.a.transfer_worker.descriptors[0]
    )


@driven(run)
async def test_what_failed_before_ends_no_session_that_another_opened_since(two: Two) -> None:
    two.holds(1)
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).from_peer == 1
    before = await two.a.fetcher.session("b")
    two.b.block_server.transfer_worker_changed()
    await two.until(lambda: bool(before.lost), "the session is lost")
    after = await two.a.fetcher.session("b")
    assert after is not before
    two.a.fetcher._forget(before, "it failed")
    assert await two.a.fetcher.session("b") is after
    assert len(two.b.block_server.sessions) == 1
    two.a.fetcher._forget(after, "it failed")
    await two.until(lambda: len(two.b.block_server.sessions) == 0, "it has ended")


@driven(run)
async def test_many_may_ask_a_peer_at_a_time(two: Two) -> None:
    Stored(two.b, "eb").store(1)
    session = await two.a.fetcher.session("b")
    asks = [session.serve("t", SPACE, keys(1), timeout_s=60) for _ in range(40)]
    served = await asyncio.gather(*asks)
    assert [len(answer.places()) for answer in served] == [1] * 40
    assert not session.lost


@driven(run)
async def test_of_who_is_no_member_any_more_nothing_is_kept(two: Two) -> None:
    two.index.addresses["c"] = "127.0.0.1:1"
    two.index.holders["c"] = 1
    await two.knows("c")
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    assert "c" in two.a.fetcher._told
    del two.index.addresses["c"]
    await two.until(lambda: not two.a.fetcher._told, "a knows that c is gone")


@driven(run)
async def test_who_has_just_joined_is_fetched_from_at_once(two: Two) -> None:
    Stored(two.b, "eb").store(1)
    address = two.index.addresses.pop("b")
    two.a.fetcher._addresses.pop("b", None)
    two.index.holders["b"] = 1
    two.index.addresses["b"] = address
    more = await two.lease(Stored(two.a, "ea"), 1, 1)
    assert more.from_peer == 1


async def _read_to_its_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def serve(**other: Any) -> bytes:
    """Another ask than SERVE."""
    fields = {"type": "ServeAsk", "serving": 1, "tenant": "t", "space": SPACE, "keys": keys(1)}
    return msgspec.msgpack.encode({**fields, **other})


def grant(**other: Any) -> bytes:
    """A grant with another field than it may have."""
    fields = msgspec.to_builtins(push_grant(1, keys(1, 2)), builtin_types=(bytes,))
    return msgspec.msgpack.encode({**fields, **other})


UNNAMED = {
    "nothing": b"",
    "no message": b"\xc1",
    "lists in lists": b"\x91" * 5_000,
    "a name that is no text": hello().replace(b"\xa1x", b"\xa1\xff"),
    "no name": hello(""),
    "a long name": hello("n" * 256),
    "a name that is long in UTF-8": hello("é" * 128),
    "no incarnation": wire.encode(wire.PeerHello("x", Incarnation(0))),
    "an incarnation too great": wire.encode(wire.PeerHello("x", Incarnation(1 << 63))),
}
"""First words of nobody."""
GARBAGE = {
    "nothing": b"",
    "no message": bytes(range(200, 240)),
    "an answer": wire.encode(wire.ServeAnswer(1)),
    "an unknown kind": msgspec.msgpack.encode({"type": "Steal", "serving": 1}),
    "an unknown field": serve(priority=1),
    "a second hello": hello(),
    "short keys": serve(keys=b"short"),
    "keys and a half": serve(keys=bytes(48)),
    "no keys": serve(keys=b""),
    "too many keys": serve(keys=bytes(32 * (KEYS_PER_DATAGRAM_MAX + 1))),
    "a short space": serve(space=b"s"),
    "a long space": serve(space=bytes(33)),
    "no tenant": serve(tenant=""),
    "a long tenant": serve(tenant="é" * 128),
    "a serving too great": serve(serving=1 << 63),
    "a serving below 0": serve(serving=-1),
    "a grant too great": grant(grant=1 << 63),
    "a grant of no tenant": grant(tenant=""),
    "a grant of a long tenant": grant(tenant="é" * 128),
    "a grant of no transfer": grant(transfer=""),
    "a grant without keys": grant(keys=b"", extents=b""),
    "fewer extents than keys": grant(extents=bytes(4)),
    "half an extent": grant(extents=bytes(6)),
    "blocks of no size": grant(block_bytes=0),
    "blocks too large": grant(block_bytes=PAYLOAD_BYTES_MAX + 1),
    "no time": grant(deadline_ms=0),
    "too much time": grant(deadline_ms=600_001),
    "a long descriptor": grant(descriptor=bytes(DESCRIPTOR_BYTES_MAX + 1)),
}


@driven(run)
async def test_nonsense_is_hung_up_on_in_words(two: Two, subtests: pytest.Subtests) -> None:
    said = {f"at first {name}": [word] for name, word in UNNAMED.items()}
    said |= {name: [hello(), word] for name, word in GARBAGE.items()}

    async with grpc.aio.insecure_channel(two.b.address) as channel:
        other = session(channel)
        await other.write(hello("y"))
        await other.read()
        for serving, (name, words) in enumerate(said.items()):
            with subtests.test(name):
                refused = await ended(channel, *words)
                assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
                sentence = refused.details()
                assert sentence
                assert "\n" not in sentence
                await two.until(lambda: len(two.b.block_server.sessions) == 1, "the session ends")
                await other.write(serve(serving=serving))
                assert await slots_of(other) == b"", "and no other one"
        other.cancel()
    await two.until(lambda: len(two.b.block_server.sessions) == 0, "the other one ends, too")


async def ended(channel: grpc.aio.Channel, *words: bytes) -> grpc.aio.AioRpcError:
    """How a session of these words is hung up on."""
    call = session(channel)
    for word in words:
        await call.write(word)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _read_to_its_end(call)
    return refused.value


@driven(run)
async def test_who_does_not_begin_with_hello_is_nobody(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.peers.peer_session.HELLO_TIMEOUT_S", 0.01)

    async with grpc.aio.insecure_channel(two.b.address) as channel:
        refused = await ended(channel, SERVE)
        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "first word of a session" in str(refused.details())
        refused = await ended(channel)
        assert refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "begins with Hello" in str(refused.details())


@driven(run)
async def test_too_many_asks_at_once_are_hung_up_on(two: Two) -> None:
    two.b.exchange._handle = lambda command: None  # type: ignore[union-attr]
    async with grpc.aio.insecure_channel(two.b.address) as channel:
        words = (wire.encode(wire.GiveBack(serving)) for serving in range(ASKS_MAX + 1))
        refused = await ended(channel, hello(), *words)
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    await two.until(lambda: len(two.b.block_server.sessions) == 0, "the session ends")


def lies() -> dict[str, wire.ServeAnswer]:
    good, size = (WHOLE,), (shard_bytes(SMALL, WHOLE),)
    slots, sums = bytes(4), bytes(16)

    def lie(shard: Shard, size: int) -> wire.ServeAnswer:
        return wire.ServeAnswer(1, (shard,), (size,), slots, sums)

    return {
        "more than was asked": wire.ServeAnswer(1, good, size, slots * 2, sums * 2),
        "no shards": wire.ServeAnswer(1, slots=slots, checksums=sums),
        "slots of no shards": wire.ServeAnswer(1, slots=slots),
        "no checksums": wire.ServeAnswer(1, good, size, slots),
        "half a checksum": wire.ServeAnswer(1, good, size, slots, sums[:8]),
        "no slots": wire.ServeAnswer(1, good, size, checksums=sums),
        "half a slot": wire.ServeAnswer(1, good, size, slots[:2], sums),
        "no size": wire.ServeAnswer(1, good, slots=slots, checksums=sums),
        "half the heads": lie(Shard(0, LAYERS, 0, 1), size[0] // HEADS),
        "huge": lie(Shard(0, 1, 0, 1), 1 << 60),
        "empty": lie(Shard(0, 1, 0, 1), 0),
        "inside out": lie(Shard(5, 1, 0, 1), 8),
        "too many layers": lie(Shard(0, 1 << 20, 0, 1), 8),
        "right in form": wire.ServeAnswer(1, good, size, slots, sums),
    }


@driven(run)
async def test_a_peer_that_lies_costs_a_miss(two: Two, subtests: pytest.Subtests) -> None:
    say = two.b.block_server.answer
    lie, told = wire.ServeAnswer(1), list[wire.ServeAnswer]()

    def served(peer: int, answer: wire.Answer) -> None:
        assert isinstance(answer, wire.ServeAnswer | wire.GivenBack)
        told.append(lie)
        say(peer, msgspec.structs.replace(lie, serving=answer.serving))

    two.b.block_server.answer = served  # type: ignore[method-assign]
    two.index.holders["b"] = 1
    engine = Stored(two.a, "ea")
    for lease, (name, lie) in enumerate(lies().items(), start=1):
        with subtests.test(name):
            assert (await two.lease(engine, lease, 1)).slots == b""
            assert lie in told
            assert two.a.blocks() == {}
            two.a.hear(engine.scheduler, release(lease))
            await two.at_rest()
            two.a.tick(60_000)  # it is tried again


@pytest.mark.parametrize("intact", [bytes(2), b"\2"])
@driven(run)
async def test_who_takes_other_blocks_back_is_hung_up_on(two: Two, intact: bytes) -> None:
    two.holds(1)

    say = two.b.block_server.answer

    def ended(peer: int, answer: wire.Answer) -> None:
        is_end = isinstance(answer, wire.GivenBack)
        say(peer, msgspec.structs.replace(answer, intact=intact) if is_end else answer)

    two.b.block_server.answer = ended  # type: ignore[method-assign]
    assert (await two.lease(Stored(two.a, "ea"), 1, 1)).slots == b""
    assert "other blocks than were served" in two.a.fetcher._told["b"]


@driven(run)
async def test_a_restarted_peer_voids_what_it_had_served(two: Two) -> None:
    two.b.step(PeerGone(77))
    two.holds(1)
    two.a.transfer_worker.before = lambda: two.b.step(PeerGone(1))
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    assert two.a.fetcher.not_kept == 1
