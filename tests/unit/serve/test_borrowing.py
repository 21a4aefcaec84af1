"""Two nodes in one process: real engines, real gRPC between them, a mover that is memcpy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from kvstore.client.index import IndexUnavailable, Members
from kvstore.engine.events import (
    Clear,
    Command,
    Event,
    Fetch,
    Lent,
    LoanEnded,
    Locate,
    PeerCommand,
    PeerGone,
)
from kvstore.index.feed import Trust
from kvstore.index.index import Answer, Holder, Match, Member
from kvstore.ports import Pieces
from kvstore.proto import loans
from kvstore.proto import peer_pb2 as pb
from kvstore.proto.peer_pb2_grpc import PeersStub, add_PeersServicer_to_server
from kvstore.serve.borrower import Borrower
from kvstore.serve.exchange import Exchange
from kvstore.serve.lender import ASKS_MAX, Lender
from kvstore.serve.mover import Ended
from kvstore.types import PAGE_BYTES, BlockKey, Incarnation, Shard, SlotId
from kvstore.wire.layout import shard_bytes
from kvstore.wire.messages import LeaseMore, LeaseRelease
from kvstore.wire.record import Scope, header
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import (
    HALVES,
    HEADS,
    LAYERS,
    SMALL,
    WHOLE,
    Node,
    Peer,
    arrays,
    key,
    keys,
    pairs,
)


class MemoryMover:
    """Instead of `MoverHost`: the peers' memories are at hand."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.descriptor = b"memory"
        self.peers: dict[str, bytearray] = {}
        self.before: Callable[[], object] = lambda: None
        self.gate: asyncio.Event | None = None
        self.reason = ""
        self.forgotten: list[str] = []

    async def move(
        self, peer: str, descriptor: bytes, pieces: Pieces, *, timeout_s: float
    ) -> Ended:
        assert descriptor == b"memory"
        assert timeout_s > 0
        if self.gate is not None:
            await self.gate.wait()
        self.before()
        for to, begin, size in zip(*(array.tolist() for array in pieces), strict=True):
            there = self.peers[peer.removesuffix(".node.kvstore")]
            self.memory[to : to + size] = there[begin : begin + size]
        return Ended(1, good=not self.reason, reason=self.reason)

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)


class Whereabouts:
    """Instead of an index."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.holders: dict[str, int] = {}
        self.is_away = False

    def match(
        self, tenant: str, space: bytes, prompt: bytes, *, timeout_s: float | None = None
    ) -> Answer:
        del tenant, space, timeout_s
        if self.is_away:
            raise IndexUnavailable("nobody answers")
        count = len(prompt) // 32
        found = [
            Match(Holder(node, "", 0), 0, min(blocks, count), min(blocks, count), Trust.EXACT)
            for node, blocks in self.holders.items()
        ]
        return Answer(Trust.EXACT, found)

    def nodes(self, *, timeout_s: float | None = None) -> Members:
        del timeout_s
        if self.is_away:
            raise IndexUnavailable("nobody answers")
        return Members(
            Trust.EXACT,
            [
                Member(node, Incarnation(1), address, Trust.EXACT, 1)
                for node, address in self.addresses.items()
            ],
        )


class Together(Node):
    """A node whose engine, lender and borrower work, without sockets of engines."""

    def __init__(self, name: str, index: Whereabouts, **config: Any) -> None:
        self.name = name
        self.asked: list[PeerCommand] = []
        self.exchange: Exchange | None = None
        super().__init__(fetches=True, **config)
        self.memory = bytearray(self.config.arena_bytes)
        self.mover = MemoryMover(self.memory)
        who = loans.Who(name, Incarnation(abs(hash(name)) + 1))
        self.borrower = Borrower(
            who=who,
            mover=self.mover,  # type: ignore[arg-type]
            view=lambda slot, size: memoryview(self.memory)[slot * PAGE_BYTES :][:size],
            credentials=None,
        )
        self.borrower.index = index
        self._who = who
        self._index = index

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Reachable while the context lasts."""
        loop = asyncio.get_running_loop()
        self.exchange = self.borrower.exchange = Exchange(loop, self._handle)
        self.lender = Lender(
            self.exchange,
            who=self._who,
            descriptor=lambda: self.mover.descriptor,
            demands_certificates=False,
        )
        loop.add_reader(self.exchange.fileno(), self._pump)
        server = grpc.aio.server()
        add_PeersServicer_to_server(self.lender, server)
        port = server.add_insecure_port("127.0.0.1:0")
        self.address = self._index.addresses[self.name] = f"127.0.0.1:{port}"
        await server.start()
        self.borrower.start()
        try:
            yield
        finally:
            await self.borrower.close()
            await server.stop(0)
            loop.remove_reader(self.exchange.fileno())
            self.exchange.close()

    def _pump(self) -> None:
        assert self.exchange is not None
        self.step(*self.exchange.read(0))

    def _handle(self, command: PeerCommand) -> None:
        match command:
            case Locate():
                self.borrower.locate(command)
            case Fetch():
                self.borrower.fetch(command)
            case Lent():
                self.lender.lent(command)
            case LoanEnded():
                self.lender.loan_ended(command)

    def step(self, *events: Event) -> list[Command]:
        commands = super().step(*events)
        for command in commands:
            if isinstance(command, Locate | Fetch | Lent | LoanEnded):
                self.asked.append(command)
                if self.exchange is not None:
                    self.exchange.carry_out(command)
        return commands


def whole_block(number: int) -> np.ndarray:
    """[layer][head][bytes] of a block."""
    size = SMALL.block_tokens * SMALL.token_bytes
    return np.random.default_rng(number).integers(0, 256, (LAYERS, HEADS, size), dtype=np.uint8)


def cut(number: int, shard: Shard) -> bytes:
    part = whole_block(number)[
        shard.layer_begin : shard.layer_end, shard.head_begin : shard.head_end
    ]
    return np.ascontiguousarray(part).tobytes()


def checksum(number: int, shard: Shard, tenant: str = "t") -> bytes:
    scope = Scope(tenant, SPACE, shard, shard_bytes(SMALL, shard))
    payload = cut(number, shard)
    return xxhash.xxh3_128(header(scope.prefix(), BlockKey(key(number))) + payload).digest()


class Stored(Peer):
    """An engine whose blocks have bytes."""

    node: Together

    def store(self, *numbers: int) -> None:
        for number in numbers:
            for rank in self.writers:
                place = self.unused(rank)[0]
                payload = cut(number, self.shards[rank])
                at = place[0] * PAGE_BYTES
                self.node.memory[at : at + len(payload)] = payload
                event = self.sealed(number, places=[place], rank=rank)
                seal = event.message
                sums = checksum(number, self.shards[rank])
                slots, generations = arrays([place])
                self.node.hear(
                    self.ranks[rank],
                    type(seal)(  # type: ignore[call-arg]
                        session=self.session,
                        keys=keys(number),
                        slots=slots,
                        generations=generations,
                        checksums=sums,
                    ),
                )

    def read(self, message: LeaseMore) -> list[list[bytes]]:
        """What a lease names, [n][S]."""
        found = [
            bytes(self.node.memory[slot * PAGE_BYTES :][: shard_bytes(SMALL, shard)])
            for (slot, _), shard in zip(
                pairs(message), self.columns * len(pairs(message)), strict=False
            )
        ]
        size = len(self.columns)
        return [found[at : at + size] for at in range(0, len(found), size)]


class Two:
    """Node b holds, node a wants."""

    def __init__(self, a: Together, b: Together, index: Whereabouts) -> None:
        self.a, self.b, self.index = a, b, index

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"never: {what}")

    async def known(self) -> None:
        """a knows where b is."""
        await self.until(lambda: "b" in self.a.borrower._addresses, "a knows b")

    async def lease(self, engine: Peer, lease: int, *numbers: int) -> LeaseMore:
        """Ask, and wait for the end of what comes."""
        before = engine.node.count(engine.scheduler, LeaseMore)
        assert engine.lease(lease, *numbers).promoting
        await self.until(
            lambda: (
                engine.node.count(engine.scheduler, LeaseMore) > before
                and engine.node.last(engine.scheduler, LeaseMore).promoting == 0
            ),
            "the wait ends",
        )
        return engine.node.last(engine.scheduler, LeaseMore)

    async def at_rest(self) -> None:
        """Nothing is lent, granted to peers, or under way."""
        for node in (self.a, self.b):
            await self.until(lambda node=node: not node.engine.leases(), "no lease")  # type: ignore[misc]
            await self.until(
                lambda node=node: not len(node.engine._state.slots.of_writer(-2)),  # type: ignore[misc]
                "no slot is fetched into",
            )


Body = Callable[[Two], Awaitable[None]]


def run(body: Body, **config: Any) -> None:
    async def main() -> None:
        index = Whereabouts()
        a, b = Together("a", index, **config), Together("b", index, **config)
        a.mover.peers["b"] = b.memory
        b.mover.peers["a"] = a.memory
        async with AsyncExitStack() as stack:
            for node in (a, b):
                await stack.enter_async_context(node.serving())
            two = Two(a, b, index)
            await two.known()
            await body(two)

    asyncio.run(main())


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
        two.a.hear(engine.scheduler, _release(1, 2))
        await two.at_rest()

    run(body)


def _release(*leases: int) -> LeaseRelease:
    return LeaseRelease(list(leases))


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


def test_an_index_that_lies_costs_a_miss() -> None:
    async def body(two: Two) -> None:
        two.index.holders["b"] = 5
        engine = Stored(two.a, "ea")
        more = await two.lease(engine, 1, 1, 2)
        assert more.slots == b""
        two.a.hear(engine.scheduler, _release(1))
        await two.at_rest()

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
        await two.until(lambda: two.a.borrower._addresses["b"] == "127.0.0.1:1", "a knows")
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        two.index.addresses["b"] = right
        await two.until(lambda: two.a.borrower._addresses["b"] == right, "a knows")
        two.a.tick(60_000)
        assert (await two.lease(engine, 2, 1)).from_peer == 1

    run(body)


def test_somebody_else_at_the_address_is_not_read_from() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.addresses["c"] = two.index.addresses["b"]
        two.index.holders["c"] = 1
        await two.until(lambda: "c" in two.a.borrower._addresses, "a knows c")
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert not any(isinstance(c, Lent) for c in two.b.asked)

    run(body)


def test_a_transfer_that_fails_gives_everything_back_on_both_sides() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        two.a.mover.reason = "the peer died"
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        two.a.hear(engine.scheduler, _release(1))
        await two.at_rest()
        assert "b.node.kvstore" in two.a.mover.forgotten

    run(body)


def test_slots_stay_the_fetchs_until_the_transfer_has_ended() -> None:
    async def body(two: Two) -> None:
        Stored(two.b, "eb").store(1)
        two.index.holders["b"] = 1
        gate = two.a.mover.gate = asyncio.Event()
        engine = Stored(two.a, "ea")
        engine.hint(1)
        await two.until(lambda: any(isinstance(c, Lent) for c in two.b.asked), "b lends")
        two.a.end(engine.scheduler, *engine.ranks)
        assert len(two.a.engine._state.slots.of_writer(-2)) == 1
        assert len(two.b.engine.leases()) == 1
        gate.set()
        await two.at_rest()
        assert len(two.a.blocks()) == 1

    run(body)


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
        two.b._handle = lambda command: None  # type: ignore[method-assign]
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
            two.b.lender._answer(command.peer, answer)

        two.b.lender.lent = lent  # type: ignore[method-assign]
        two.index.holders["b"] = 1
        engine = Stored(two.a, "ea")
        assert (await two.lease(engine, 1, 1)).slots == b""
        assert two.a.blocks() == {}
        two.a.hear(engine.scheduler, _release(1))
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


def test_a_slot_is_seen_where_it_is() -> None:
    node = Together("a", Whereabouts())
    view = node.borrower._view(SlotId(16), 8)
    node.memory[16 * PAGE_BYTES] = 9
    assert view[0] == 9
