"""Two nodes in one process: real engines, real gRPC between them, a transfer worker that is
memcpy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.client.index import IndexUnavailable, Members
from kvstore.engine.events import (
    AnswerPeer,
    Command,
    Event,
    PeerCommand,
    PeerEvent,
)
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Answer, Match, Member
from kvstore.node.node import MonotonicClock
from kvstore.peers.member import Exchange
from kvstore.ports import Pieces
from kvstore.types import PAGE_BYTES, BlockKey, Incarnation, Shard
from kvstore.wire.messages import LeaseMore, LeaseRelease, PushEnd, PushExpect
from kvstore.wire.peers import PEERS, ServeAnswer
from kvstore.wire.record import Scope, header
from kvstore.wire.space import shard_bytes
from kvstore.wire.transfer_worker import Descriptor, Direction, decode_descriptor, encode
from tests.kit import reference
from tests.kit.peer_parts import PeerParts
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import (
    HEADS,
    LAYERS,
    SMALL,
    Node,
    Peer,
    arrays,
    key,
    keys,
    pairs,
)


class MemoryTransferWorker:
    """Instead of `TransferWorker`: the peers' memories are at hand."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.descriptor = encode(Descriptor("memory", "any", len(memory), 0, b""))
        self.peers: dict[str, bytearray] = {}
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.gate: asyncio.Event | None = None
        self.reason = ""
        self.trouble = ""
        self.forgotten: list[str] = []
        self.recycled: list[str] = []
        self.descriptors: list[bytes] = []

    async def move(
        self,
        peer: str,
        descriptor: bytes,
        pieces: Pieces,
        *,
        timeout_s: float,
        direction: Direction = Direction.READ,
    ) -> str:
        assert decode_descriptor(descriptor).backend == "memory"
        assert timeout_s > 0
        self.descriptors.append(descriptor)
        if self.gate is not None:
            await self.gate.wait()
        self.before()
        for to, begin, size in zip(*(array.tolist() for array in pieces), strict=True):
            there = self.peers[peer.removesuffix(".node.kvstore")]
            if direction is Direction.READ:
                self.memory[to : to + size] = there[begin : begin + size]
            else:
                there[begin : begin + size] = self.memory[to : to + size]
        self.after()
        return self.reason

    def recycle(self, reason: str) -> None:
        self.recycled.append(reason)

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)


class Whereabouts:
    """Instead of an index."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.holders: dict[str, int] = {}
        self.engines: dict[str, int] = {}
        """What some engine of a node has in its own memory."""
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
        found += [
            Match(Holder(node, "e", 0), blocks, blocks, blocks, Trust.EXACT)
            for node, blocks in self.engines.items()
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


class Together(Node, PeerParts):
    """A node whose engine, serving node and fetching node work, without sockets of engines."""

    def __init__(self, name: str, index: Whereabouts, **config: Any) -> None:
        self.name = name
        self.asked: list[PeerCommand] = []
        self.exchange: Exchange | None = None
        Node.__init__(self, fetches=True, **config)
        self.memory = bytearray(self.config.arena_bytes)
        self.transfer_worker = MemoryTransferWorker(self.memory)
        PeerParts.__init__(
            self,
            name,
            abs(hash(name)) + 1,
            self._post,
            transfer_worker=self.transfer_worker,
            memory=self.memory,
            clock=MonotonicClock(),
            jitter=lambda: 0.0,  # members are read as often as may be
            draw_epoch=lambda: 7,
        )
        self.fetcher.index = self._index = index  # type: ignore[assignment]

    def _post(self, event: PeerEvent) -> None:
        assert self.exchange is not None
        self.exchange.put(event)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Reachable while the context lasts."""
        loop = asyncio.get_running_loop()
        self.exchange = Exchange(loop, self.carry_out)
        self.carrier.transfer_worker_changed()
        loop.add_reader(self.exchange.fileno(), self._pump)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self.block_server.handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        self.address = self._index.addresses[self.name] = f"127.0.0.1:{port}"
        await server.start()
        self.fetcher.start()
        try:
            yield
        finally:
            self.carrier.close()
            await self.fetcher.close()
            await server.stop(0)
            loop.remove_reader(self.exchange.fileno())
            self.exchange.close()

    def _pump(self) -> None:
        assert self.exchange is not None
        self.step(*self.exchange.read(0))

    def served(self) -> list[ServeAnswer]:
        """All that its engine has answered to those who asked for blocks."""
        said = [each.its for each in self.asked if isinstance(each, AnswerPeer)]
        return [each for each in said if isinstance(each, ServeAnswer)]

    def step(self, *events: Event) -> list[Command]:
        commands = super().step(*events)
        for command in commands:
            if isinstance(command, PeerCommand):
                self.asked.append(command)
                if self.exchange is not None:
                    self.exchange.carry_out(command)
        return commands


def whole_block(number: int) -> np.ndarray:
    """[layer][head][bytes] of a block."""
    (size,) = SMALL.head_bytes
    return np.random.default_rng(number).integers(0, 256, (LAYERS, HEADS, size), dtype=np.uint8)


def cut(number: int, shard: Shard) -> bytes:
    part = whole_block(number)[
        shard.layer_begin : shard.layer_end, shard.head_begin : shard.head_end
    ]
    return np.ascontiguousarray(part).tobytes()


def checksum(number: int, shard: Shard, tenant: str = "t") -> bytes:
    scope = Scope(tenant, SPACE, shard, shard_bytes(SMALL, shard))
    payload = cut(number, shard)
    return reference.checksum(header(scope.prefix(), BlockKey(key(number))), payload)


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

    tries = 3000

    def __init__(self, a: Together, b: Together, index: Whereabouts) -> None:
        self.a, self.b, self.index = a, b, index

    def holds(self, *numbers: int) -> None:
        """An engine of node b has stored these, and the index knows."""
        Stored(self.b, "eb").store(*numbers)
        self.index.holders["b"] = len(numbers)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(self.tries):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"never: {what}")

    async def knows(self, node: str) -> None:
        """a knows the address of a node, as the index has it now."""
        address = self.index.addresses[node]
        await self.until(lambda: self.a.fetcher._addresses.get(node) == address, f"a knows {node}")

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

    async def push(self, engine: Peer, *numbers: int, transfer: str = "r") -> PushEnd:
        """Expect blocks of node b, and wait for the end of it."""
        before = engine.node.count(engine.scheduler, PushEnd)
        message = PushExpect(transfer, "b", keys(*numbers), 20_000)
        engine.node.hear(engine.scheduler, message)
        await self.until(
            lambda: engine.node.count(engine.scheduler, PushEnd) > before, "the push ends"
        )
        return engine.node.last(engine.scheduler, PushEnd)

    async def at_rest(self) -> None:
        """Nothing is served, granted to peers, or under way."""
        for node in (self.a, self.b):
            await self.until(lambda node=node: not node.engine.leases(), "no lease")  # type: ignore[misc]
            await self.until(
                lambda node=node: not len(node.state.slots.of_writer(-2)),  # type: ignore[misc]
                "no slot is fetched into",
            )


def session(channel: grpc.aio.Channel) -> Any:
    """A stream to a node, of somebody who may say any bytes; answers are as they came."""
    return channel.stream_stream(f"/{PEERS}/Session", bytes, bytes)()


Body = Callable[[Two], Awaitable[None]]


def run(body: Body, **config: Any) -> None:
    async def main() -> None:
        index = Whereabouts()
        a, b = Together("a", index, **config), Together("b", index, **config)
        a.transfer_worker.peers["b"] = b.memory
        b.transfer_worker.peers["a"] = a.memory
        async with AsyncExitStack() as stack:
            for node in (a, b):
                await stack.enter_async_context(node.serving())
            two = Two(a, b, index)
            await two.knows("b")
            await body(two)

    asyncio.run(main())


def release(*leases: int) -> LeaseRelease:
    """To let go of these."""
    return LeaseRelease(list(leases))
