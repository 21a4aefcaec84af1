"""Few fetches of one peer are under way at a time; of a peer that has left nothing is kept."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from kvstore.engine.events import Fetch
from kvstore.peers.fetcher import FETCHES_AT_ONCE
from kvstore.wire.messages import LeaseMore
from tests.kit.coroutines import driven
from tests.unit.peers.two_nodes import Stored, Two, release, run


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
