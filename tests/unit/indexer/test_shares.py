"""One caller of an index has its share of it, and the others theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.client.certificates import load
from kvstore.client.index import channel
from kvstore.config.cluster import IndexConfig
from kvstore.config.values import HostPort
from kvstore.index.feed import Trust
from kvstore.index.index import Answer, Member
from kvstore.indexer import replica as replica_module, shares
from kvstore.indexer.replica import Replica
from kvstore.indexer.shares import CALLS_MAX, WATCHES_MAX
from kvstore.net.aio import LoopThread
from kvstore.proto import index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub
from kvstore.testing.process import Lab
from kvstore.types import KEY_BYTES, SpaceId
from kvstore.wire.feed import KEYS_MAX

WAIT_S = 60
SPACE = bytes(KEY_BYTES)
LARGEST = pb.MatchRequest(tenant="held", space=SPACE, keys=bytes(KEYS_MAX * KEY_BYTES))
SMALL = pb.MatchRequest(tenant="quick", space=SPACE, keys=bytes(KEY_BYTES))
ASKED = 128


class Store:
    """Answers about the tenant "held" when it may."""

    trouble = ""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.begun = 0
        self.begun_at_once = 0
        self.are_four = threading.Event()
        """So many were under way together."""
        self._under_way = 0

    async def match(self, tenant: str, space: SpaceId, keys: bytes, now_ms: int) -> Answer:
        if tenant == "held":
            self.begun += 1
            self._under_way += 1
            self.begun_at_once = max(self.begun_at_once, self._under_way)
            if self._under_way == 4:
                self.are_four.set()
            await self.may_answer.wait()
            self._under_way -= 1
        return Answer(Trust.EXACT, [])

    def members(self, now_ms: int) -> list[Member]:
        return []

    async def tick(self, now_ms: int) -> None: ...

    async def close(self) -> None: ...


class Served:
    """A replica over that store, and channels to it by name of the caller."""

    def __init__(self, directory: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.store = LoopThread("shares"), Store()
        self._lab, self._stack = Lab(directory), stack
        stack.callback(self.loop.close)
        monkeypatch.setattr(replica_module, "_store_of", lambda *_: self.store)
        tls = load(self._lab.files("index", "i"))
        at = HostPort("127.0.0.1", 0)
        self.replica = Replica(IndexConfig(listen=at, entries=1000, plain=True, tls=tls), self.loop)
        stack.callback(self.replica.close)

    def dial(self, name: str) -> IndexStub:
        return IndexStub(self.channel(name))

    def channel(self, name: str) -> grpc.Channel:
        credentials = load(self._lab.files("client", name)).channel_credentials()
        made = channel(f"127.0.0.1:{self.replica.port}", credentials)
        self._stack.callback(made.close)
        return made

    def let_go(self) -> None:
        self.loop.call(self._let_go(), timeout_s=WAIT_S)

    async def _let_go(self) -> None:
        self.store.may_answer.set()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(shares, "REFUSAL_S", 0.001)
    with ExitStack() as stack:
        made = Served(tmp_path, stack, monkeypatch)
        yield made
        made.let_go()


def code(call: Any) -> grpc.StatusCode | None:
    error = call.exception(timeout=WAIT_S)
    return error.code() if error is not None else None


def test_one_caller_does_not_take_the_index_from_others(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    stubs = [served.dial("a") for _ in range(ASKED // CALLS_MAX)]
    refused = threading.Semaphore(0)
    calls = []
    for number in range(ASKED):
        call = stubs[number % len(stubs)].Match.future(LARGEST, timeout=WAIT_S)
        call.add_done_callback(lambda _: refused.release())
        calls.append(call)
    for _ in range(ASKED - CALLS_MAX):
        assert refused.acquire(timeout=WAIT_S)
    over = [call for call in calls if call.done()]
    assert {code(call) for call in over} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert over[0].exception().details() == (
        "a.client.kvstore has 64 calls open here already: end some of them, or ask another replica"
    )
    told = "a.client.kvstore has 64 calls open here already: more of its calls are refused"
    assert [text for text in caplog.messages if text.startswith("a.client")] == [told], "once"
    assert served.dial("b").Match(SMALL, timeout=WAIT_S).blocks == 1, "the others have their turn"
    assert served.store.begun <= 1, "of those that wait none was decoded"
    served.let_go()
    assert [code(call) for call in calls if call not in over] == [None] * CALLS_MAX
    assert (served.store.begun, served.store.begun_at_once) == (CALLS_MAX, 1)
    assert served.dial("a").Match(SMALL, timeout=WAIT_S).blocks == 1, "all places are free again"


def test_refusals_of_one_caller_take_turns_on_all_its_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that asks again whenever it is refused would have the loop do nothing else."""
    waiting = 40
    monkeypatch.setattr(shares, "REFUSAL_S", 600.0)
    monkeypatch.setattr(shares, "REFUSALS_WAITING_MAX", waiting)
    refused = threading.Semaphore(0)
    stubs = [served.dial("a") for _ in range(16)]
    calls = [stubs[n % 16].Match.future(LARGEST, timeout=WAIT_S) for n in range(ASKED)]
    for call in calls:
        call.add_done_callback(lambda _: refused.release())
    for _ in range(ASKED - CALLS_MAX - waiting):
        assert refused.acquire(timeout=WAIT_S), "only so many wait, which takes memory"
    assert served.dial("b").Match(SMALL, timeout=WAIT_S).blocks == 1
    assert not refused.acquire(blocking=False), "the first refusal has its turn"
    for call in calls:
        call.cancel()


def test_small_questions_of_one_caller_wait_for_each_other_only_to_be_read(served: Served) -> None:
    small = pb.MatchRequest(tenant="held", space=SPACE, keys=bytes(KEY_BYTES))
    stub = served.dial("a")
    calls = [stub.Match.future(small, timeout=WAIT_S) for _ in range(4)]
    assert served.dial("b").Match(SMALL, timeout=WAIT_S).blocks == 1
    assert served.store.are_four.wait(WAIT_S)
    served.let_go()
    assert [code(call) for call in calls] == [None] * len(calls)


def test_one_caller_does_not_take_the_places_of_watchers(served: Served) -> None:
    stub = served.dial("a")
    watchers = [stub.Watch(pb.WatchRequest(nodes=True)) for _ in range(WATCHES_MAX)]
    for watcher in watchers:
        next(watcher)
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Watch(pb.WatchRequest(nodes=True)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "a.client.kvstore has 8 watchers here already" in str(refused.value.details())
    next(served.dial("b").Watch(pb.WatchRequest(nodes=True), timeout=WAIT_S))
    for watcher in watchers:
        watcher.cancel()


def test_a_message_that_does_not_come_keeps_its_caller_waiting_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "READ_TIMEOUT_S", 0.2)
    silent: Future[None] = Future()

    def nothing() -> Iterator[bytes]:
        silent.result(WAIT_S)
        yield b""

    asking: Any = served.channel("a").stream_unary("/kvstore.index.v1.Index/Match")
    call = asking.future(nothing(), timeout=WAIT_S)
    try:
        assert served.dial("b").Match(SMALL, timeout=WAIT_S).blocks == 1
        assert code(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert served.dial("a").Match(SMALL, timeout=WAIT_S).blocks == 1
    finally:
        silent.set_result(None)
