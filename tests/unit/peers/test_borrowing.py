"""What one node lends another: byte by byte, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from kvstore.engine.events import (
    Clear,
    Lent,
    LoanEnded,
    PeerGone,
)
from kvstore.peers.lender import ASKS_MAX
from kvstore.proto import peer_pb2 as pb
from kvstore.proto.peer_pb2_grpc import PeersStub
from kvstore.transport.tcp_ends import Address
from kvstore.types import PAGE_BYTES, BlockKey, Shard
from kvstore.wire.assembly import Assembly
from kvstore.wire.layout import shard_bytes
from kvstore.wire.mover import Descriptor, encode
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import (
    HALVES,
    HEADS,
    LAYERS,
    SMALL,
    WHOLE,
    keys,
    pairs,
)
from tests.unit.peers.two_nodes import (
    Stored,
    Two,
    checksum,
    cut,
    release,
    run,
)


@pytest.mark.parametrize(
    ("there", "here"),
    [((WHOLE,), (WHOLE,)), (HALVES, (WHOLE,)), ((WHOLE,), HALVES), (HALVES, HALVES)],
)
def test_blocks_of_another_node_are_here_byte_by_byte(
    there: tuple[Shard, ...], here: tuple[Shard, ...]
) -> None:
    async def body(two: Two) -> None:
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

    run(body)


def test_a_flipped_bit_on_the_way_is_a_miss() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1, 2)
        two.index.holders["b"] = 2

        def flip() -> None:
            lent = next(c for c in two.b.asked if isinstance(c, Lent))
            second = int(np.frombuffer(lent.slots, "<u4")[1])
            two.b.memory[second * PAGE_BYTES + 100] ^= 4

        two.a.mover.before = flip
        engine = Stored(two.a, "ea")
        more = await two.lease(engine, 1, 1, 2)
        assert len(pairs(more)) == 1
        assert two.a.borrower.counters.damaged == 1
        assert two.a.engine.counters.fetch_blocks_lost == 1

    run(body)


def test_what_did_not_stay_until_it_was_read_is_a_miss_even_if_its_bytes_did() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        two.a.mover.before = lambda: two.b.step(Clear(None, None))
        engine = Stored(two.a, "ea")
        more = await two.lease(engine, 1, 1)
        assert more.slots == b""
        assert two.a.borrower.counters.not_kept == 1
        assert two.a.blocks() == {}

    run(body)


def test_what_did_not_stay_and_is_something_else_by_now_is_no_damage() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1

        def reuse() -> None:
            two.b.step(Clear(None, None))
            two.b.memory[:] = bytes(len(two.b.memory))

        two.a.mover.before = reuse
        more = await two.lease(Stored(two.a, "ea"), 1, 1)
        assert more.slots == b""
        assert (two.a.borrower.counters.not_kept, two.a.borrower.counters.damaged) == (1, 0)

    run(body)


def test_blocks_are_verified_while_the_peer_is_asked_whether_they_stayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        looked: list[BlockKey] = []
        verify, answer = Assembly.verify, two.b.lender.loan_ended
        late: set[asyncio.Task[None]] = set()

        def look(self: Assembly, key: BlockKey, *its: Any) -> list[bytes] | None:
            looked.append(key)
            return verify(self, key, *its)

        async def after_that(command: LoanEnded) -> None:
            await two.until(lambda: bool(looked), "the block is verified")
            answer(command)

        def ended(command: LoanEnded) -> None:
            late.add(asyncio.get_running_loop().create_task(after_that(command)))

        monkeypatch.setattr(Assembly, "verify", look)
        monkeypatch.setattr(two.b.lender, "loan_ended", ended)
        more = await two.lease(Stored(two.a, "ea"), 1, 1)
        assert more.from_peer == 1
        await asyncio.gather(*late)

    run(body)


def test_an_index_that_lies_costs_a_miss() -> None:
    async def body(two: Two) -> None:
        two.index.holders["b"] = 5
        engine = Stored(two.a, "ea")
        more = await two.lease(engine, 1, 1, 2)
        assert more.slots == b""
        two.a.hear(engine.scheduler, release(1))
        await two.at_rest()

    run(body)


def test_what_engines_have_in_their_own_memory_is_not_asked_for() -> None:
    async def body(two: Two) -> None:
        two.index.engines["b"] = 5
        engine = Stored(two.a, "ea")
        more = await two.lease(engine, 1, 1, 2)
        assert more.slots == b""
        assert two.a.borrower._sessions == {}, "nobody was dialled"

    run(body)


def test_an_index_that_is_away_costs_a_miss() -> None:
    async def body(two: Two) -> None:
        two.index.is_away = True
        engine = Stored(two.a, "ea")
        more = await two.lease(engine, 1, 1, 2)
        assert more.slots == b""

    run(body)


def test_a_peer_that_is_gone_costs_a_miss_and_comes_back() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        right = two.index.addresses["b"]
        two.index.addresses["b"] = "127.0.0.1:1"
        await two.knows("b")
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        two.index.addresses["b"] = right
        await two.knows("b")
        two.a.tick(60_000)
        assert (await two.lease(engine, 2, 1)).from_peer == 1

    run(body)


def test_somebody_else_at_the_address_is_not_read_from() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.addresses["c"] = two.index.addresses["b"]
        two.index.holders["c"] = 1
        await two.knows("c")
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert not any(isinstance(c, Lent) for c in two.b.asked)

    run(body)


def test_a_peer_that_sends_this_node_elsewhere_is_not_dialled() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        address = encode_address("169.254.169.254", 80)
        two.b.mover.descriptor = encode(Descriptor("tcp", "b", 1 << 20, 0, address))
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert not any(isinstance(c, Lent) for c in two.b.asked)

    run(body)


def encode_address(host: str, port: int) -> bytes:
    return msgspec.msgpack.encode(Address(host, port, secure=True))


def test_a_peer_that_hangs_up_ends_its_loans() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        async with grpc.aio.insecure_channel(two.b.address) as channel:
            call = PeersStub(channel).Session()
            await call.write(pb.Ask(hello=pb.Hello(node="x", incarnation=3)))
            assert (await call.read()).welcome.node == "b"
            lend = pb.Lend(loan=1, tenant="t", space=SPACE, keys=keys(1))
            await call.write(pb.Ask(lend=lend))
            assert (await call.read()).lent.slots
            assert len(two.b.engine.leases()) == 1
            call.cancel()
        await two.at_rest()
        assert two.b.lender.session_count == 0

    run(body)


def hello(node: str = "x") -> pb.Ask:
    return pb.Ask(hello=pb.Hello(node=node, incarnation=3))


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.peers.lender.HELLO_TIMEOUT_S", 0.01)

    async def body(two: Two) -> None:
        async with grpc.aio.insecure_channel(two.b.address) as channel:
            call = PeersStub(channel).Session()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _read_to_its_end(call)
            assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "begins with Hello" in str(refused.value.details())

    run(body)


def test_a_node_has_one_session_its_last_one() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        async with grpc.aio.insecure_channel(two.b.address) as channel:
            calls = [PeersStub(channel).Session() for _ in range(3)]
            for call, node in zip(calls, ("x", "y", "x"), strict=True):
                await call.write(hello(node))
                assert (await call.read()).welcome.node == "b"
                if call is calls[0]:
                    lend = pb.Lend(loan=1, tenant="t", space=SPACE, keys=keys(1))
                    await call.write(pb.Ask(lend=lend))
                    assert (await call.read()).lent.slots
            await _read_to_its_end(calls[0])
            await two.until(lambda: not two.b.engine.leases(), "its loan has ended, too")
            assert two.b.lender.session_count == 2
            for call in calls:
                call.cancel()

    run(body)


def test_another_mover_there_is_read_by_its_own_descriptor() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1, 2)
        two.index.holders["b"] = 2
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).from_peer == 1
        two.b.mover.descriptor = encode(Descriptor("memory", "another", len(two.b.memory), 0, b""))
        two.b.lender.mover_changed()
        await two.until(lambda: two.b.lender.session_count == 0, "the session ends")
        assert (await two.lease(engine, 2, 2)).from_peer == 1
        assert two.a.mover.descriptors[-1] == two.b.mover.descriptor != two.a.mover.descriptors[0]

    run(body)


def test_what_failed_before_ends_no_session_that_another_opened_since() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).from_peer == 1
        before = await two.a.borrower.session("b")
        two.b.lender.mover_changed()
        await two.until(lambda: bool(before.lost), "the session is lost")
        after = await two.a.borrower.session("b")
        assert after is not before
        two.a.borrower._forget("b", before)
        assert await two.a.borrower.session("b") is after
        assert two.b.lender.session_count == 1
        two.a.borrower._forget("b", after)
        await two.until(lambda: two.b.lender.session_count == 0, "it has ended")

    run(body)


def test_many_may_ask_a_peer_at_a_time() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        session = await two.a.borrower.session("b")
        asks = [session.lend("t", SPACE, keys(1), timeout_s=60) for _ in range(40)]
        lent = await asyncio.gather(*asks)
        assert [len(borrowed.slots) for _, borrowed in lent] == [1] * 40
        assert not session.lost

    run(body)


def test_of_who_is_no_member_any_more_nothing_is_kept() -> None:
    async def body(two: Two) -> None:
        two.index.addresses["c"] = "127.0.0.1:1"
        two.index.holders["c"] = 1
        await two.knows("c")
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert "node c" in two.a.borrower._told
        del two.index.addresses["c"]
        await two.until(lambda: not two.a.borrower._told, "a knows that c is gone")

    run(body)


def test_who_has_just_joined_is_fetched_from_at_once() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        address = two.index.addresses.pop("b")
        two.a.borrower._members.discard("b")
        two.a.borrower._addresses.pop("b", None)
        two.index.holders["b"] = 1
        two.index.addresses["b"] = address
        more = await two.lease(Stored(two.a, "ea"), 1, 1)
        assert more.from_peer == 1

    run(body)


async def _read_to_its_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


GARBAGE = {
    "no hello": [pb.Ask(give_back=pb.GiveBack(loan=1))],
    "no name": [pb.Ask(hello=pb.Hello(incarnation=1))],
    "no incarnation": [pb.Ask(hello=pb.Hello(node="x"))],
    "nothing": [pb.Ask(hello=pb.Hello(node="x", incarnation=1)), pb.Ask()],
    "a second hello": [pb.Ask(hello=pb.Hello(node="x", incarnation=1))] * 2,
    "short keys": [
        pb.Ask(hello=pb.Hello(node="x", incarnation=1)),
        pb.Ask(lend=pb.Lend(loan=1, tenant="t", space=bytes(32), keys=b"short")),
    ],
    "no keys": [
        pb.Ask(hello=pb.Hello(node="x", incarnation=1)),
        pb.Ask(lend=pb.Lend(loan=1, tenant="t", space=bytes(32))),
    ],
    "a short space": [
        pb.Ask(hello=pb.Hello(node="x", incarnation=1)),
        pb.Ask(lend=pb.Lend(loan=1, tenant="t", space=b"s", keys=keys(1))),
    ],
    "no tenant": [
        pb.Ask(hello=pb.Hello(node="x", incarnation=1)),
        pb.Ask(lend=pb.Lend(loan=1, space=bytes(32), keys=keys(1))),
    ],
    "a loan too great": [
        pb.Ask(hello=pb.Hello(node="x", incarnation=1)),
        pb.Ask(lend=pb.Lend(loan=1 << 63, tenant="t", space=bytes(32), keys=keys(1))),
    ],
}


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE.keys())
def test_nonsense_is_hung_up_on_in_words(words: list[pb.Ask]) -> None:
    async def body(two: Two) -> None:
        async with grpc.aio.insecure_channel(two.b.address) as channel:
            call = PeersStub(channel).Session()
            for word in words:
                await call.write(word)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _read_to_its_end(call)
            assert refused.value.code() in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.INVALID_ARGUMENT,
            )
            assert refused.value.details()
        await two.until(lambda: two.b.lender.session_count == 0, "the session ends")

    run(body)


def test_too_many_asks_at_once_are_hung_up_on() -> None:
    async def body(two: Two) -> None:
        two.b.handle = lambda command: None  # type: ignore[method-assign]
        two.b.exchange._handle = lambda command: None  # type: ignore[union-attr]
        async with grpc.aio.insecure_channel(two.b.address) as channel:
            call = PeersStub(channel).Session()
            await call.write(pb.Ask(hello=pb.Hello(node="x", incarnation=1)))
            for loan in range(ASKS_MAX + 1):
                await call.write(pb.Ask(give_back=pb.GiveBack(loan=loan)))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _read_to_its_end(call)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await two.until(lambda: two.b.lender.session_count == 0, "the session ends")

    run(body)


def lies() -> dict[str, pb.Lent]:
    good = pb.Shard(layer_end=LAYERS, head_end=HEADS, block_bytes=shard_bytes(SMALL, WHOLE))
    slots = np.zeros(1, "<u4").tobytes()
    return {
        "more than was asked": pb.Lent(shards=[good], slots=slots * 2, checksums=bytes(32)),
        "no shards": pb.Lent(slots=slots, checksums=bytes(16)),
        "no checksums": pb.Lent(shards=[good], slots=slots),
        "half a slot": pb.Lent(shards=[good], slots=slots[:2], checksums=bytes(16)),
        "half the heads": pb.Lent(
            shards=[pb.Shard(layer_end=LAYERS, head_end=1, block_bytes=good.block_bytes // HEADS)],
            slots=slots,
            checksums=bytes(16),
        ),
        "huge": pb.Lent(
            shards=[pb.Shard(layer_end=1, head_end=1, block_bytes=1 << 60)],
            slots=slots,
            checksums=bytes(16),
        ),
        "inside out": pb.Lent(
            shards=[pb.Shard(layer_begin=5, layer_end=1, head_end=1, block_bytes=8)],
            slots=slots,
            checksums=bytes(16),
        ),
        "right in form": pb.Lent(shards=[good], slots=slots, checksums=bytes(16)),
    }


@pytest.mark.parametrize("lie", lies().values(), ids=lies().keys())
def test_a_peer_that_lies_costs_a_miss(lie: pb.Lent) -> None:
    async def body(two: Two) -> None:
        def lent(command: Lent) -> None:
            answer = pb.Answer()
            answer.lent.CopyFrom(lie)
            answer.lent.loan = command.loan
            two.b.lender.answer(command.peer, answer)

        two.b.lender.lent = lent  # type: ignore[method-assign]
        two.index.holders["b"] = 1
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert two.a.blocks() == {}
        two.a.hear(engine.scheduler, release(1))
        await two.at_rest()

    run(body)


def test_a_restarted_peer_voids_what_it_had_lent() -> None:
    async def body(two: Two) -> None:
        two.b.step(PeerGone(77))
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        two.a.mover.before = lambda: two.b.step(PeerGone(1))
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert two.a.borrower.counters.not_kept == 1

    run(body)
