"""Transfers that fail, and what comes to no transfer; few fetches of one peer are under way at a
time, and of a peer that has left nothing is kept; what becomes of blocks and of questions while the
index hangs; when a fetching node asks who is there."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any, Self, cast

import grpc
import pytest

from kvstore.client.index import Members
from kvstore.engine.events import Fetch, Locate, Located, PeerEvent
from kvstore.errors import ProtocolError
from kvstore.index.feed import Trust
from kvstore.index.index import Answer
from kvstore.node.node import MonotonicClock
from kvstore.peers.fetcher import (
    ASK_THREADS,
    FETCHES_AT_ONCE,
    LOCATE_TIMEOUT_S,
    MEMBERS_EVERY_S,
    Fetcher,
)
from kvstore.peers.peer_session import PeerContext, PeerSession
from kvstore.peers.pushes import Stages
from kvstore.types import Incarnation, Shard
from kvstore.units import NS_PER_S
from kvstore.wire import peers as wire
from kvstore.wire.messages import RANKS_MAX, LeaseMore
from kvstore.wire.peers import PeerHello
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, Descriptor, encode
from tests.kit.coroutines import driven, on_loop
from tests.kit.set_clock import SetClock
from tests.sim.world.loop import SimLoop
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import keys
from tests.unit.peers.two_nodes import Stored, Together, Two, Whereabouts, release, run


@driven(run)
async def test_what_a_transfer_worker_would_choke_on_does_not_come_to_it(two: Two) -> None:
    two.holds(1)
    size = len(two.b.memory)
    two.b.transfer_worker.descriptor = encode(
        Descriptor("memory", "b", size, 0, bytes(DESCRIPTOR_BYTES_MAX))
    )
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    assert two.a.transfer_worker.descriptors == []
    assert "bytes` of length <= 65536 - at `$.descriptor" in two.a.fetcher._told["b"]


def test_more_shards_than_an_engine_has_ranks_are_not_heard() -> None:
    shards = tuple(Shard(n, n + 1, 0, 1) for n in range(3))
    served = wire.ServeAnswer(1, shards, (8, 8, 8), bytes(2 * 3 * 4), bytes(range(96)))
    assert wire.decode_answer(wire.encode(served)) == served
    wire.check_served(served, asked=2)
    assert served.places().shape == (2, 3)
    sums = wire.checksums_of(served.checksums, block=1, shards=3)
    assert sums == [bytes(range(at, at + 16)) for at in (48, 64, 80)]
    count = RANKS_MAX + 1
    with pytest.raises(ProtocolError, match="shards"):
        wire.decode_answer(wire.encode(wire.ServeAnswer(1, shards[:1] * count, (8,) * count)))


@on_loop
async def test_a_node_of_another_version_is_not_asked_for_blocks() -> None:
    """Its checksums are of another form: none of its blocks would be right."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    context = Together("a", Whereabouts()).context
    try:
        session = PeerSession("b", f"127.0.0.1:{port}", context, asyncio.create_task)
        assert (await session.opened()).startswith("node b speaks another peer protocol")
    finally:
        await server.stop(0)


@driven(run)
async def test_a_transfer_that_fails_gives_everything_back_on_both_sides(two: Two) -> None:
    two.holds(1)
    two.a.transfer_worker.reason = "the peer died"
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    two.a.hear(engine.scheduler, release(1))
    await two.at_rest()
    assert "b.node.kvstore" in two.a.transfer_worker.forgotten


@driven(run)
async def test_a_peer_is_not_blamed_for_our_own_transfer_worker(two: Two) -> None:
    two.holds(1)
    two.a.transfer_worker.reason = two.a.transfer_worker.trouble = "our own transfer worker died"
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).slots == b""
    assert two.a.engine._fetches._peers["b"].backoff.failures == 0
    two.a.transfer_worker.reason = two.a.transfer_worker.trouble = ""
    two.a.tick(1001)
    assert (await two.lease(engine, 2, 1)).from_peer == 1


@driven(run)
async def test_slots_stay_the_fetchs_until_the_transfer_has_ended(two: Two) -> None:
    two.holds(1)
    gate = two.a.transfer_worker.gate = asyncio.Event()
    engine = Stored(two.a, "ea")
    engine.hint(1)
    await two.until(lambda: bool(two.b.served()), "b serves")
    two.a.end(engine.scheduler, *engine.ranks)
    assert len(two.a.state.slots.of_writer(-2)) == 1
    assert len(two.b.engine.leases()) == 1
    gate.set()
    await two.at_rest()
    assert len(two.a.blocks()) == 1


# ── an index that hangs ──────────────────────────────────────────────────────────────────────────


class Hanging:
    """An index that answers nothing until it is let go, and what it was asked."""

    def __init__(self, index: Whereabouts) -> None:
        self.asked: list[bytes] = []
        self._let_go = threading.Event()
        self._index, self._match = index, index.match

    def match(self, tenant: str, space: bytes, prompt: bytes, **options: Any) -> Answer:
        self.asked.append(prompt)
        self._let_go.wait()
        return self._match(tenant, space, prompt, **options)

    def __enter__(self) -> Self:
        self._index.match = self.match  # type: ignore[method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        self._let_go.set()


def ask(two: Two, count: int) -> list[Located]:
    """Questions that node a's engine knows nothing of; returns where their answers will be."""
    located: list[Located] = []
    fetcher, first = two.a.fetcher, 1 << 40
    post = fetcher._post

    def posted(event: PeerEvent) -> None:
        if isinstance(event, Located) and event.locate >= first:
            located.append(event)
        else:
            post(event)

    fetcher._post = posted
    for number in range(count):
        fetcher.carry_out(Locate(first + number, "t", SPACE, keys(100 + number)))
    return located


@driven(run)
async def test_questions_behind_an_index_that_hangs_are_answered_without_asking_it(
    two: Two,
) -> None:
    clock = two.a.fetcher._clock = SetClock()
    two.index.is_away = True
    with Hanging(two.index) as index:
        located = ask(two, 256)
        await two.until(lambda: len(index.asked) == ASK_THREADS, "the first are asked")
        clock.ns += int(LOCATE_TIMEOUT_S * NS_PER_S) + 1
    await two.until(lambda: len(located) == 256, "all are answered")
    assert len({answer.locate for answer in located}) == 256
    assert not any(answer.is_known for answer in located)
    assert len(index.asked) == ASK_THREADS


@driven(run)
async def test_what_has_come_is_verified_while_the_index_hangs(two: Two) -> None:
    two.holds(1)
    gate = two.a.transfer_worker.gate = asyncio.Event()
    engine = Stored(two.a, "ea")
    engine.hint(1)
    await two.until(lambda: bool(two.a.transfer_worker.descriptors), "its bytes are moved")
    with Hanging(two.index) as index:
        ask(two, ASK_THREADS + 1)
        await two.until(lambda: len(index.asked) == ASK_THREADS, "all who ask hang")
        gate.set()
        await two.until(lambda: bool(two.a.blocks()), "the block is here")
    assert len(two.a.blocks()) == 1


# ── turns, and what is kept ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reason", ["", "the link is down"])
@driven(run)
async def test_fetches_take_turns_and_a_loss_is_that_of_all_who_wait(two: Two, reason: str) -> None:
    numbers = range(1, 2 * FETCHES_AT_ONCE + 1)
    Stored(two.b, "eb").store(*numbers)
    two.index.holders["b"] = 1
    gate = two.a.transfer_worker.gate = asyncio.Event()
    two.a.transfer_worker.reason = reason
    engine = Stored(two.a, "ea")
    for number in numbers:
        assert engine.lease(number, number).promoting
    await two.until(
        lambda: sum(isinstance(each, Fetch) for each in two.a.asked) == len(numbers),
        "all are asked for",
    )
    tried = two.a.transfer_worker.descriptors
    await two.until(lambda: len(tried) == FETCHES_AT_ONCE, "some have begun")
    assert two.a.count(engine.scheduler, LeaseMore) == 0
    gate.set()
    await two.until(
        lambda: two.a.count(engine.scheduler, LeaseMore) == len(numbers), "all have ended"
    )
    assert len(tried) == (FETCHES_AT_ONCE if reason else len(numbers))
    engine.node.hear(engine.scheduler, release(*numbers))
    await two.at_rest()


@pytest.mark.parametrize("leaves", [True, False])
@driven(run)
async def test_of_whom_nobody_asks_again_nothing_is_kept(two: Two, leaves: bool) -> None:
    two.holds(1)
    engine = Stored(two.a, "ea")
    assert (await two.lease(engine, 1, 1)).from_peer == 1
    assert list(two.a.fetcher._sessions) == ["b"]
    if leaves:
        del two.index.addresses["b"]
    else:
        two.b.block_server.transfer_worker_changed()  # which ends its sessions
    two.tries = 1000  # gRPC itself would end a connection with pings after half a minute
    await two.until(lambda: not two.a.fetcher._sessions, "its session is let go of")
    assert two.a.transfer_worker.forgotten == ["b.node.kvstore"]


@pytest.mark.parametrize("by", ["us", "the peer"])
@driven(run)
async def test_a_session_that_is_lost_gives_its_connection_back(two: Two, by: str) -> None:
    """Whoever still refers to it, such as an exception that nobody has collected."""
    session = await two.a.fetcher.session("b")
    call, close, closed = weakref.ref(session._call), session._channel.close, list[bool]()

    async def seen() -> None:
        closed.append(True)
        await close()

    session._channel.close = seen  # type: ignore[assignment,method-assign]
    if by == "us":
        session.hang_up("it is over")
    else:
        two.b.block_server.transfer_worker_changed()
    await two.until(lambda: bool(closed) and call() is None, "nothing refers to the call")
    assert session.lost == ("it is over" if by == "us" else "it has hung up")
    assert await session.opened() == session.lost


# ── who is there ─────────────────────────────────────────────────────────────────────────────────


def test_fetchers_do_not_ask_who_is_there_in_step() -> None:
    now_ns = 0
    loop = SimLoop(lambda: now_ns)
    asked_ns: list[int] = []

    class Index:
        def nodes(self, *, timeout_s: float | None = None) -> Members:
            asked_ns.append(now_ns)
            return Members(Trust.EXACT, [])

    jitters = iter([0.0, 0.25, 0.75, 0.5])
    nothing: Any = None
    clock = MonotonicClock()
    who = PeerHello("n1", Incarnation(1))
    context = PeerContext(nothing, who, nothing, nothing, clock, None, Stages((), clock, slow_s=1))
    fetcher = Fetcher(context, jitter=lambda: next(jitters))
    fetcher.index = cast("Any", Index())
    loop.call_soon(fetcher.start)
    step_ns = int(MEMBERS_EVERY_S * NS_PER_S) // 4
    for _ in range(12):
        loop.go_on()
        now_ns += step_ns
    loop.end()
    assert [at_ns // step_ns for at_ns in asked_ns] == [0, 2, 5, 10]
