"""What one node pushes to another: byte by byte, or not at all, and only what was granted to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import msgspec
import numpy as np
import pytest

from kvstore.engine.events import AskPush, Land, WritePush
from kvstore.node.node import MonotonicClock
from kvstore.peers import peer_session
from kvstore.peers.peer_session import GRANTS_MAX, BlockServer, PeerContext, _Session
from kvstore.peers.pushes import FRESH_NS, SLOW_S, SLOW_TCP_S, PushCarrier, Stages
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Incarnation, Shard
from kvstore.units import NS_PER_S
from kvstore.wire import peers as wire
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, PushCancel, PushClose, PushExpect, PushOpen
from kvstore.wire.transfer_worker import Descriptor, encode
from tests.kit.coroutines import driven, on_loop
from tests.kit.set_clock import SetClock
from tests.unit.engine.harness import HALVES, WHOLE, keys, pairs
from tests.unit.engine.pushing import push_grant
from tests.unit.peers.two_nodes import MemoryTransferWorker, Stored, Two, cut, run, session as dial

HELLO = wire.encode(wire.PeerHello("x", Incarnation(1)))
LANDING = {"landing_bytes": 8 * SLOT_BYTES_MIN, "slots": 32, "node": ""}


def pushing(body: Any) -> None:
    run(body, **LANDING)


async def asked_for(two: Two, engine: Stored, *numbers: int) -> wire.PushGrant:
    """What node b was granted for these blocks, which an engine of node a expects."""
    two.a.hear(engine.scheduler, PushExpect("r", "b", keys(*numbers), 20_000))
    await two.until(lambda: two.b.engine.push_counts()[("prefill",)] == 1, "asked")
    return next(c.its for c in two.a.asked if isinstance(c, AskPush))


def prefills(two: Two, **options: Any) -> Stored:
    """An engine of node b that pushes from now on."""
    engine = Stored(two.b, "eb", **options)
    two.b.hear(engine.scheduler, PushOpen("r"))
    return engine


@pytest.mark.parametrize(
    ("there", "here"),
    [((WHOLE,), (WHOLE,)), (HALVES, (WHOLE,)), ((WHOLE,), HALVES), (HALVES, HALVES)],
)
@driven(pushing)
async def test_pushed_blocks_are_here_byte_by_byte(
    two: Two, there: tuple[Shard, ...], here: tuple[Shard, ...]
) -> None:
    prefill = prefills(two, shards=there)
    prefill.store(1, 2, 3)
    engine = Stored(two.a, "ea", shards=here)
    end = await two.push(engine, 1, 2, 3)
    assert (end.blocks, end.reason) == (3, "")
    reply = engine.lease(1, 1, 2, 3)
    found = engine.read(reply)  # type: ignore[arg-type]
    assert found == [[cut(n, s) for s in engine.columns] for n in (1, 2, 3)]


@driven(pushing)
async def test_each_write_goes_to_the_extents_of_its_blocks(two: Two) -> None:
    prefill, engine = prefills(two), Stored(two.a, "ea")
    prefill.store(1)
    two.a.hear(engine.scheduler, PushExpect("r", "b", keys(1, 2, 3), 20_000))
    await two.until(lambda: len(two.a.blocks()) == 1, "the first one is here")
    prefill.store(2, 3)
    await two.until(lambda: len(two.a.blocks()) == 3, "and the others")
    assert two.a.engine.counters.push_blocks_damaged == 0


@driven(pushing)
async def test_a_flipped_bit_on_the_way_is_a_miss(two: Two) -> None:
    prefill = prefills(two)
    prefill.store(1, 2)

    def flip() -> None:
        asked = next(c.its for c in two.a.asked if isinstance(c, AskPush))
        begin = int.from_bytes(asked.extents[4:8], "little") * PAGE_BYTES
        two.a.memory[begin + 100] ^= 4

    two.b.transfer_worker.after = flip
    engine = Stored(two.a, "ea")
    end = await two.push(engine, 1, 2)
    assert (end.blocks, "damaged" in end.reason) == (1, True)
    assert len(pairs(engine.lease(1, 1, 2))) == 1
    assert two.a.engine.counters.push_blocks_damaged == 1


@driven(pushing)
async def test_a_write_that_failed_is_told_and_leaves_limbo(two: Two) -> None:
    prefill = prefills(two)
    prefill.store(1)
    two.b.transfer_worker.reason = "it is broken"
    engine = Stored(two.a, "ea")
    assert "it is broken" in (await two.push(engine, 1)).reason
    assert two.a.engine.grants.landing_bytes()[("limbo",)] > 0


@driven(pushing)
async def test_an_abort_is_told_and_nothing_is_left(two: Two) -> None:
    engine = Stored(two.a, "ea")
    prefills(two)
    await asked_for(two, engine, 1, 2)
    two.a.hear(engine.scheduler, PushCancel("r"))
    await two.until(lambda: two.b.engine.push_counts()[("prefill",)] == 0, "told")
    await two.until(lambda: two.a.engine.grants.landing_bytes()[("granted",)] == 0, "free")
    assert two.a.engine.grants.landing_bytes()[("limbo",)] == 0


@driven(pushing)
async def test_the_end_of_a_prefill_is_told(two: Two) -> None:
    prefill = prefills(two)
    engine = Stored(two.a, "ea")
    await asked_for(two, engine, 1, 2)
    two.b.hear(prefill.scheduler, PushClose("r", "preempted"))
    assert (await two.push(engine, 3, transfer="other")).reason
    assert "preempted" in [m.reason for m in two.a.sent[engine.scheduler] if hasattr(m, "reason")]


@driven(pushing)
async def test_a_descriptor_of_another_machine_is_refused(two: Two) -> None:
    there = encode(Descriptor("tcp", "a.node.kvstore", 1, 0, b"203.0.113.9:1"))
    two.a.transfer_worker.descriptor = there
    prefill = prefills(two)
    prefill.store(1)
    engine = Stored(two.a, "ea")
    assert "own machine" in (await two.push(engine, 1)).reason
    assert not any(isinstance(c, WritePush) for c in two.b.asked)


@on_loop
async def test_a_grant_is_used_by_the_peer_that_has_it() -> None:
    moved: list[tuple[str, list[int]]] = []

    async def move(peer: str, _: bytes, pieces: Any, **__: Any) -> str:
        moved.append((peer, pieces.remote.tolist()))
        return "not now"

    clock, nothing = MonotonicClock(), SimpleNamespace()
    its: Any = (
        nothing,
        SimpleNamespace(move=move),
        nothing,
        clock,
        None,
        Stages((), clock, slow_s=1),
    )
    sessions = {peer: SimpleNamespace(node=f"d{peer}", grants={7: None}) for peer in (1, 2)}
    carrier = PushCarrier(PeerContext(lambda _: None, *its), cast("Any", nothing), sessions)
    for peer in (1, 2):
        grant = msgspec.structs.replace(push_grant(7, keys(1)), extents=peer.to_bytes(4, "little"))
        size = (grant.block_bytes,)
        carrier.carry_out(WritePush(peer, peer, f"d{peer}", grant, 0, size, np.zeros(1, np.int64)))
    await asyncio.gather(*carrier._tasks._running)
    assert moved == [(f"d{peer}.node.kvstore", [peer * PAGE_BYTES]) for peer in (1, 2)]


def pushed(asked: wire.PushGrant, shard: Shard, block_bytes: int) -> wire.Pushed:
    """Its first block is."""
    return wire.Pushed(
        grant=asked.grant,
        epoch=asked.epoch,
        first=0,
        shards=(shard,),
        block_bytes=(block_bytes,),
        checksums=bytes(16),
    )


@driven(pushing)
async def test_words_of_a_session_that_has_no_such_grant_are_dropped(two: Two) -> None:
    engine = Stored(two.a, "ea")
    asked = await asked_for(two, engine, 1)
    word = pushed(asked, Shard(0, 1, 0, 1), 1)
    two.a.carrier._hear(object(), word)  # type: ignore[arg-type]
    assert not any(isinstance(c, Land) for c in two.a.asked)
    # Nor can another peer end it by a word that is none.
    none = msgspec.structs.replace(word, checksums=b"x")
    two.a.carrier._hear(object(), none)  # type: ignore[arg-type]
    over = wire.PushOver(asked.grant, asked.epoch, "", is_quiet=True)
    two.a.carrier._hear(object(), over)  # type: ignore[arg-type]
    # Nor does its own session end what others were granted.
    two.a.carrier._hear(SimpleNamespace(lost="gone"), None)  # type: ignore[arg-type]
    assert two.a.carrier._given.keys() == {asked.grant}
    assert two.a.engine.grants.landing_bytes()[("granted",)] > 0


@on_loop
async def test_grants_of_one_number_are_those_of_two_peers() -> None:
    """Each is taken back, answered, and ends with its session, by itself."""
    transfer_worker = MemoryTransferWorker(bytearray(1))
    posted: list[Any] = []

    async def address_of(_: str) -> str:
        await asyncio.sleep(0)
        return "127.0.0.1:1"

    nothing: Any = None
    its = nothing, transfer_worker, nothing, nothing, None, nothing
    server = BlockServer(PeerContext(posted.append, *its), address_of)  # type: ignore[arg-type]
    grant = {"descriptor": transfer_worker.descriptor}
    for peer in (1, 2, 3):
        session = server.sessions[peer] = _Session(peer, f"d{peer}")
        server._hear(session, push_grant(7, keys(1), epoch=10 * peer, **grant))
        if peer == 2:  # before it is known who asks
            server._hear(session, wire.PushRevoke(7))
    await asyncio.gather(*server._checks._running)
    await asyncio.sleep(0)
    assert [(each.peer, type(each.its)) for each in posted] == [
        *((peer, wire.PushGrant) for peer in (1, 2, 3)),
        (2, wire.PushRevoke),
    ]
    over = server.sessions.pop(1)
    server._hear(over, wire.PushRevoke(7))
    await asyncio.sleep(0)
    assert len(posted) == 4, "a session that has ended says nothing more"
    server.answer(3, wire.PushOver(7, 30, "it was taken back", is_quiet=True))
    for peer in (1, 2, 3):
        server.answer(peer, wire.Pushed(grant=7, epoch=10 * peer, first=0))
    queued = [server.sessions[peer].answers for peer in (2, 3)]
    assert [[type(queue.get_nowait()) for _ in range(queue.qsize())] for queue in queued] == [
        [wire.Pushed],
        [wire.PushOver],
    ]


@driven(pushing)
async def test_a_last_word_counts_for_the_transfer_worker_that_its_grant_names(two: Two) -> None:
    epochs = iter((8, 9))
    two.a.carrier._draw_epoch = lambda: next(epochs)
    two.a.carrier.transfer_worker_changed()
    await two.until(lambda: two.a.engine.grants._epoch == 8, "up")
    engine = Stored(two.a, "ea")
    asked = await asked_for(two, engine, 1)
    session = two.a.carrier._given[asked.grant].session
    assert session is not None

    def over(epoch: int) -> wire.PushOver:
        return wire.PushOver(asked.grant, epoch, "", is_quiet=True)

    assert (asked.epoch, two.a.carrier.epoch) == (8, 8)
    two.a.carrier._hear(session, over(7))
    assert asked.grant in two.a.carrier._given, "a word of an older one ends nothing"
    assert two.a.engine.grants.landing_bytes()[("granted",)] > 0
    two.a.carrier.transfer_worker_changed()
    await two.until(lambda: two.a.engine.grants.landing_bytes()[("granted",)] == 0, "void")
    two.a.carrier._hear(session, over(9))
    assert asked.grant in two.a.carrier._given, "nor does one of the next"
    two.a.carrier._hear(session, over(8))
    assert not two.a.carrier._given, "the worker is gone, and its grants are not kept"


@driven(pushing)
async def test_a_word_without_blocks_is_no_first_block_and_ends_nothing(two: Two) -> None:
    engine = Stored(two.a, "ea")
    prefills(two)
    asked = await asked_for(two, engine, 1)
    given = two.a.carrier._given[asked.grant]
    assert given.session is not None
    for sums in (b"", bytes(16)):
        assert not given.has_begun
        assert asked.grant in two.a.carrier._given
        word = wire.Pushed(grant=asked.grant, epoch=asked.epoch, first=0, checksums=sums)
        two.a.carrier._hear(given.session, word)
    assert asked.grant not in two.a.carrier._given, "checksums of no shard"


@pytest.mark.parametrize(
    "other",
    [
        {"checksums": b""},
        {"checksums": bytes(17)},
        {"checksums": bytes(16 * (KEYS_PER_DATAGRAM_MAX + 1))},
        {"block_bytes": ()},
        {"block_bytes": (1, 1)},
        {"shards": ()},
    ],
    ids=["no checksums", "a part of one", "too many", "no size", "two sizes", "no shards"],
)
@driven(pushing)
async def test_a_word_whose_arrays_do_not_fit_ends_its_grant_and_not_the_session(
    two: Two, other: dict[str, Any]
) -> None:
    engine = Stored(two.a, "ea")
    asked = await asked_for(two, engine, 1)
    session = two.a.carrier._given[asked.grant].session
    assert session is not None
    word = msgspec.structs.replace(pushed(asked, Shard(0, 1, 0, 1), 1), **other)
    assert wire.decode_answer(wire.encode(word)) == word
    two.b.block_server.answer(next(iter(two.b.block_server.sessions)), word)
    await two.until(lambda: asked.grant not in two.a.carrier._given, "the grant is over")
    assert not session.lost
    await two.until(lambda: two.a.engine.grants.landing_bytes()[("limbo",)] > 0, "limbo")


def test_shards_that_nobody_can_have_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def body(two: Two) -> None:
        engine = Stored(two.a, "ea")
        prefills(two)
        asked = await asked_for(two, engine, 1)
        session = two.a.carrier._given[asked.grant].session
        assert session is not None
        word = pushed(asked, Shard(9, 3, 0, 2), asked.block_bytes)
        two.a.carrier._hear(session, word)
        await two.until(lambda: two.a.engine.grants.landing_bytes()[("granted",)] == 0, "free")
        assert two.a.engine.counters.push_blocks_damaged == 1

    pushing(body)
    assert "node b pushed 1 of 1 blocks with other bytes" in caplog.text


@driven(pushing)
async def test_a_node_that_has_just_joined_is_looked_for(two: Two) -> None:
    prefill = prefills(two)
    prefill.store(1)
    two.a.fetcher._addresses.clear()
    engine = Stored(two.a, "ea")
    assert not (await two.push(engine, 1)).reason


@pytest.mark.parametrize(("slow_ns", "lines"), [(-1, 1), (10**12, 0)])
def test_a_slow_write_is_reported(
    slow_ns: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(two: Two) -> None:
        two.b.carrier.stages.slow_ns = slow_ns
        prefill = prefills(two)
        prefill.store(1)
        assert not (await two.push(Stored(two.a, "ea"), 1)).reason

    pushing(body)
    assert sum("is busy" in line for line in caplog.messages) == lines


ASKED = 4000


@contextlib.asynccontextmanager
async def deaf_peer(two: Two) -> AsyncIterator[tuple[Any, Any, asyncio.Task[None]]]:
    """Node x asks b, and reads no answer: its call, its session at b, and its asking."""
    # A member: b need not look for it, and has no time to be asked for more than GRANTS_MAX.
    two.index.addresses["x"] = two.b.fetcher._addresses["x"] = "127.0.0.1:1"
    # As little as possible is buffered on its side.
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(two.b.address, options=small) as channel:
        call = dial(channel)
        await call.write(HELLO)
        await two.until(lambda: len(two.b.block_server.sessions) == 1, "it is there")
        (session,) = two.b.block_server.sessions.values()

        async def ask() -> None:
            for number in range(ASKED):
                await call.write(wire.encode(push_grant(number + 1, bytes(32), deadline_ms=1)))

        asking = asyncio.create_task(ask())
        await two.until(lambda: not session.has_room.is_set(), "it takes none")
        yield call, session, asking
        asking.cancel()
        call.cancel()


@driven(run)
async def test_a_peer_that_takes_no_answers_is_not_read(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_session, "UNREAD_MAX", 8)

    async with deaf_peer(two) as (call, session, asking):
        for _ in range(200):  # whatever is still under way
            if asking.done():
                break
            await asyncio.sleep(0.01)
        assert session.answers.qsize() <= GRANTS_MAX + 8
        overs = 0
        while overs < ASKED:
            overs += isinstance(wire.decode_answer(await call.read()), wire.PushOver)
        await asking
    await two.until(lambda: len(two.b.block_server.sessions) == 0, "the session ends")


@driven(run)
async def test_a_peer_that_takes_no_answers_is_cut_off_when_it_comes_anew(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its sessions would take one of SESSIONS_MAX places for ever."""
    monkeypatch.setattr(peer_session, "UNREAD_MAX", 8)
    monkeypatch.setattr(peer_session, "HANG_UP_S", 0.05)

    async with (
        deaf_peer(two) as (_, session, _),
        grpc.aio.insecure_channel(two.b.address) as channel,
    ):
        again = dial(channel)
        await again.write(HELLO)
        assert isinstance(wire.decode_answer(await again.read()), wire.PeerWelcome)
        sessions = two.b.block_server.sessions
        await two.until(lambda: session.number not in sessions, "the first one has ended")
        assert len(sessions) == 1
        again.cancel()


# ── durations of stages: counted, and told when nothing explains them ────────────────────────────


KINDS = ("push_grant", "push_first", "write", "push_seal", "push_token")


@pytest.mark.parametrize("kind", ["push_grant", "write", "push_seal", "push_token"])
@pytest.mark.parametrize("slow_s", [SLOW_S, SLOW_TCP_S])
def test_a_stage_above_its_limit_is_told_for_a_while(
    kind: str, slow_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SetClock(5 * NS_PER_S)
    stages = Stages(KINDS, clock, slow_s=slow_s)
    stages.took(kind, int(slow_s * NS_PER_S), node="p")
    assert (stages.trouble, caplog.messages) == ("", [])
    stages.took(kind, int((slow_s + 1) * NS_PER_S), 1 << 20, node="p")
    (line,) = caplog.messages
    assert "node p" in line
    assert f"{slow_s + 1:.1f} s" in line
    clock.ns += 9 * NS_PER_S
    assert stages.trouble == f"{line} (9 s ago)"
    clock.ns += FRESH_NS
    assert stages.trouble == ""
    assert stages.timings[kind].count == 2


def test_a_stage_that_follows_a_prefill_is_never_slow(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock(5 * NS_PER_S)
    stages = Stages(KINDS, clock, slow_s=SLOW_S)
    stages.since("push_first", clock.ns - 60 * NS_PER_S)
    assert (stages.trouble, caplog.messages) == ("", [])
    assert stages.timings["push_first"].count == 1
