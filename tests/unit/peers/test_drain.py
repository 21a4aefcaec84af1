"""Which peer gets which run of a node that leaves, and when it gives up."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from kvstore.peers import preparer
from kvstore.peers.preparer import FAILURES_MAX, PATIENCE_S, Drain
from kvstore.types import SpaceId
from kvstore.wire.peers import PrepareReply, PrepareRequest


def run(name: str, count: int) -> PrepareRequest:
    return PrepareRequest(name, SpaceId(bytes(16)), "", bytes(32 * count))


class Peers:
    """Peers that fetch `step` blocks between two questions, of the tenants that each one serves."""

    def __init__(self, *, step: int = 2, stops_at: int = 1 << 30, **serves: str) -> None:
        self.serves, self.step, self.stops_at = serves, step, stops_at
        self.there: dict[tuple[str, str], int] = {}
        self.asked: list[tuple[str, str]] = []

    async def ask(self, peer: str, request: PrepareRequest) -> PrepareReply:
        self.asked.append((peer, request.tenant))
        if request.tenant not in self.serves[peer]:
            return PrepareReply(refused="no engine of this space is attached here")
        place = peer, request.tenant
        count = len(request.keys) // 32
        dram = min(self.there.get(place, 0), self.stops_at)
        self.there[place] = min(count, dram + self.step)
        return PrepareReply(dram, 0, count - dram)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause is a second, which takes no time."""
    now_s = itertools.count()
    latest = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return latest[0]

    async def sleep(_: float) -> None:
        latest[0] = next(now_s)

    monkeypatch.setattr(preparer, "time", Clock)
    monkeypatch.setattr("kvstore.peers.preparer.asyncio.sleep", sleep)


def drained(peers: Peers, *runs: PrepareRequest) -> Drain:
    made = Drain(runs, sorted(peers.serves), peers.ask)
    asyncio.run(made.run())
    return made


def test_runs_are_shared_out_and_each_is_with_one_peer() -> None:
    peers = Peers(p="abcd", q="abcd")
    made = drained(peers, *(run(name, 5) for name in "abcd"))
    assert (made.drained_count, made.block_count) == (20, 20)
    assert sorted(tenant for _, tenant in peers.there) == ["a", "b", "c", "d"]
    assert {peer for peer, _ in peers.there} == {"p", "q"}


def test_what_one_peer_refuses_is_offered_to_the_next() -> None:
    peers = Peers(p="", q="a", r="b")
    made = drained(peers, run("a", 3), run("b", 3))
    assert made.drained_count == 6
    assert dict(peers.there.keys()) == {"q": "a", "r": "b"}


def test_what_nobody_takes_is_left() -> None:
    peers = Peers(p="", q="")
    assert drained(peers, run("a", 3)).drained_count == 0
    assert sorted(peers.asked) == [("p", "a"), ("q", "a")], "once each"


@pytest.mark.parametrize("names", ["p", "pq"])
def test_a_peer_without_progress_is_given_up_and_what_two_have_counts_once(names: str) -> None:
    peers = Peers(stops_at=4)
    peers.serves = dict.fromkeys(names, "a")
    made = drained(peers, run("a", 9))
    assert made.drained_count == 4
    assert len(peers.asked) == len(names) * (2 + int(PATIENCE_S))


def test_a_peer_that_fails_leaves_its_run_to_others() -> None:
    peers = Peers(p="a", q="a")
    answer = peers.ask

    async def ask(peer: str, request: PrepareRequest) -> PrepareReply:
        if peer == "p":
            raise TimeoutError
        return await answer(peer, request)

    made = Drain([run("a", 3)], ["p", "q"], ask)
    asyncio.run(made.run())
    assert made.drained_count == 3


def test_counts_of_a_peer_are_believed_up_to_the_run() -> None:
    answers = iter([7, 10**6, 3, 10**9, 0])

    async def ask(peer: str, request: PrepareRequest) -> PrepareReply:
        return PrepareReply(next(answers))

    made = Drain([run("a", 9)], ["p"], ask)
    asyncio.run(made.run())
    assert (made.drained_count, next(answers)) == (9, 3), "the second answer was enough"


def test_the_error_of_a_call_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    none = grpc.aio.Metadata()

    async def ask(peer: str, request: PrepareRequest) -> PrepareReply:
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "Connection refused")

    asyncio.run(Drain([run("a", 3)] * FAILURES_MAX, ["p"], ask).run())
    (said,) = caplog.messages
    assert said == "node p is asked for no more: Connection refused"


def test_a_peer_that_hangs_does_not_hold_up_every_run() -> None:
    peers, hung = Peers(p="", q="a" * 9), list[str]()

    async def ask(peer: str, request: PrepareRequest) -> PrepareReply:
        if peer == "p":
            hung.append(request.tenant)
            raise TimeoutError
        return await peers.ask(peer, request)

    made = Drain([run("a", 3)] * 40, ["p", "q"], ask)
    asyncio.run(made.run())
    assert (made.drained_count, len(hung)) == (120, FAILURES_MAX)
