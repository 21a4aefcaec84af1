"""Transfers that fail, and what comes to no transfer."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvstore.errors import ProtocolError
from kvstore.peers.peer_session import PeerSession
from kvstore.types import Shard
from kvstore.wire import peers as wire
from kvstore.wire.messages import RANKS_MAX
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, Descriptor, encode
from tests.kit.coroutines import driven, on_loop
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
