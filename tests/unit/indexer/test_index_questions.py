"""What many who ask cost an index: bounded queues, and no work for what has not changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar, cast

import grpc
import msgspec
import pytest

from kvstore.index.feed import ConnectRefused, Event, FeedClosed, Trust, Verdict
from kvstore.index.index import Answer, Member
from kvstore.indexer.service import TOKEN_QUESTIONS_MAX, WATCH_PERIOD_S, IndexService
from kvstore.net.server import RefusedCall
from kvstore.ports import IndexStore
from kvstore.proto import forms, index_pb2 as pb
from kvstore.types import Incarnation, SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.feed import Delta, FeedBeat, Hello, SnapshotPart
from kvstore.wire.load import EngineEntry
from tests.sim.world.loop import SimLoop

WATCHERS = 20
NODES = 50
PERIOD_NS = int(WATCH_PERIOD_S * NS_PER_S)

T = TypeVar("T")


class Store:
    """Knows these nodes, who say something all the time, and holds nothing."""

    def __init__(self) -> None:
        self.nodes = {
            name: Member(name, Incarnation(1), "", Trust.EXACT, sequence=0)
            for name in (f"n{number:02}" for number in range(NODES))
        }
        self.asked = 0
        self.verdict = Verdict.GO_ON

    async def hear(self, event: Event, now_ms: int) -> Verdict:
        return self.verdict

    def members(self, now_ms: int) -> list[Member]:
        self.asked += 1
        replace = msgspec.structs.replace
        return [replace(its, sequence=now_ms) for its in self.nodes.values()]

    async def match(self, tenant: str, space: SpaceId, keys: bytes, now_ms: int) -> Answer:
        return Answer(Trust.EXACT, [])


class Caller:
    """A call, as the service sees it."""

    def __init__(self) -> None:
        self.told: list[pb.WatchReply] = []

    async def write(self, reply: pb.WatchReply) -> None:
        self.told.append(reply)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def service(store: Store) -> Iterator[IndexService]:
    made = IndexService(cast("IndexStore", store), demands_names=False)
    yield made
    made.close()


class Crowd:
    """Watchers who came one after the other, in virtual time."""

    def __init__(self, service: IndexService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.loop = SimLoop(lambda: self.now_ns)
        self.callers = [Caller() for _ in range(WATCHERS)]
        self.rows: list[str] = []
        """Of whom a row was made."""
        self._make_row = forms.node_row
        monkeypatch.setattr(forms, "node_row", self._row)
        for caller in self.callers:
            watching = service.Watch(pb.WatchRequest(nodes=True), cast("Any", caller))
            self.loop.create_task(watching)
            self.wait(PERIOD_NS // 7)

    def _row(self, member: Member, *, engines: bool) -> pb.Node:
        self.rows.append(member.node)
        return self._make_row(member, engines=engines)

    def wait(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.now_ns += NS_PER_S // 1000
            self.loop.go_on()

    def news(self) -> list[tuple[list[str], list[str]]]:
        """What each was told since: whom, and who is gone."""
        news = [
            (
                [row.node for reply in caller.told for row in reply.nodes],
                [name for reply in caller.told for name in reply.gone],
            )
            for caller in self.callers
        ]
        for caller in self.callers:
            caller.told.clear()
        self.rows.clear()
        return news


def test_watchers_look_together_and_only_at_what_has_changed(
    service: IndexService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(service, monkeypatch)
    crowd.wait(2 * PERIOD_NS)
    assert len(crowd.rows) == WATCHERS * NODES, "each is told all there is"
    assert crowd.news() == [(sorted(store.nodes), [])] * WATCHERS
    crowd.wait(20 * PERIOD_NS)
    assert store.asked <= crowd.now_ns // PERIOD_NS + 1
    assert not crowd.rows
    assert crowd.news() == [([], [])] * WATCHERS, "numbers are nobody's news"
    store.nodes["n07"] = msgspec.structs.replace(store.nodes["n07"], address="10.0.0.7:1")
    del store.nodes["n03"]
    crowd.wait(3 * PERIOD_NS)
    assert crowd.rows == ["n07"] * WATCHERS
    assert crowd.news() == [(["n07"], ["n03"])] * WATCHERS
    # Who comes now is told what there is now.
    late = Caller()
    crowd.loop.create_task(service.Watch(pb.WatchRequest(nodes=True), cast("Any", late)))
    begin_ms = crowd.now_ns * 1000 // NS_PER_S
    crowd.wait(PERIOD_NS)
    assert [row.node for row in late.told[0].nodes] == sorted(store.nodes)
    assert min(row.sequence for row in late.told[0].nodes) >= begin_ms - WATCH_PERIOD_S * 1000
    crowd.loop.end()


def test_engines_are_told_to_those_who_ask_for_them(service: IndexService, store: Store) -> None:
    now_ns = 0
    loop = SimLoop(lambda: now_ns)
    plain, thorough = Caller(), Caller()
    for caller in (plain, thorough):
        request = pb.WatchRequest(nodes=True, engines=caller is thorough)
        loop.create_task(service.Watch(request, cast("Any", caller)))
    loop.go_on()
    its = EngineEntry(engine="e", tenant="t", space=SpaceId(bytes(32)))
    store.nodes["n07"] = msgspec.structs.replace(store.nodes["n07"], engines=(its,))
    for _ in range(3):
        now_ns += PERIOD_NS
        loop.go_on()
    assert [len(reply.nodes) for reply in plain.told] == [NODES]
    assert [len(reply.nodes) for reply in thorough.told] == [NODES, 1]
    assert [each.engine for each in thorough.told[1].nodes[0].engines] == ["e"]
    loop.end()


class Asker:
    """Of the list of the nodes, in virtual time."""

    def __init__(self, service: IndexService) -> None:
        self.now_ns = 0
        self._loop = SimLoop(lambda: self.now_ns)
        self._service = service

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        task: asyncio.Task[T] = self._loop.create_task(work)
        self._loop.go_on()
        return task.result()

    def encoded(self) -> bytes:
        return self.run(self._service.Nodes(pb.NodesRequest(), cast("Any", Caller())))

    def ask(self) -> list[str]:
        return [row.node for row in pb.NodesReply.FromString(self.encoded()).nodes]


def test_all_who_ask_for_the_nodes_are_told_the_same_list(
    service: IndexService, store: Store
) -> None:
    asker = Asker(service)
    assert [asker.ask() for _ in range(NODES)] == [sorted(store.nodes)] * NODES
    assert store.asked == 1
    assert asker.encoded() is asker.encoded(), "made and encoded once"
    asker.now_ns = PERIOD_NS - 1
    assert asker.ask() == sorted(store.nodes)
    assert store.asked == 1
    del store.nodes["n03"]
    asker.now_ns = PERIOD_NS
    assert asker.ask() == sorted(store.nodes)
    assert store.asked == 2


OF_N1: Final[dict[str, Any]] = {"node": "n01", "incarnation": Incarnation(1), "stream": 1}
LAST: Final = SnapshotPart(**OF_N1, sequence=1, number=1, is_last=True, stored=())
BEAT: Final = FeedBeat(**OF_N1, sequence=1)


@pytest.mark.parametrize(
    ("event", "verdict", "is_news"),
    [
        (Hello(**OF_N1, sequence=0), Verdict.GO_ON, True),
        (FeedClosed(**OF_N1), Verdict.GO_ON, True),
        (ConnectRefused("n01"), Verdict.GO_ON, True),
        (LAST, Verdict.GO_ON, True),
        (msgspec.structs.replace(LAST, is_last=False), Verdict.GO_ON, False),
        (Delta(**OF_N1, sequence=1, changes=()), Verdict.GO_ON, False),
        (BEAT, Verdict.GO_ON, False),
        (BEAT, Verdict.ASK, True),
    ],
)
def test_who_comes_or_goes_is_in_the_next_list_of_the_nodes(
    service: IndexService, store: Store, event: Event, verdict: Verdict, *, is_news: bool
) -> None:
    asker = Asker(service)
    before = asker.ask()
    del store.nodes["n01"]
    store.verdict = verdict
    asker.run(service._tell_store(event))
    assert (asker.ask() != before) is is_news


def test_questions_by_tokens_that_are_too_many_are_refused_at_once(service: IndexService) -> None:
    may_go_on = threading.Event()
    tokens = pb.Tokens(ids=[1, 2], block_tokens=2)
    request = pb.MatchRequest(space=bytes(32), tokens=tokens)

    def ask() -> asyncio.Task[pb.MatchReply]:
        return asyncio.create_task(service.Match(request, cast("Any", Caller())))

    async def is_refused() -> bool:
        try:
            await asyncio.wait_for(ask(), 30)
        except RefusedCall as refused:
            return refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False

    async def body() -> None:
        held = service._hashing.submit(may_go_on.wait)
        waiting = [ask() for _ in range(TOKEN_QUESTIONS_MAX)]
        await asyncio.sleep(0)
        assert await is_refused()
        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting[1:])
        assert await is_refused(), "who hangs up leaves his question behind"
        keys = pb.MatchRequest(space=bytes(32), keys=bytes(32))
        assert (await service.Match(keys, cast("Any", Caller()))).blocks == 1
        may_go_on.set()
        assert (await waiting[0]).blocks == 1
        await asyncio.wrap_future(service._hashing.submit(held.result))  # after all of them
        assert not await is_refused()

    try:
        asyncio.run(body())
    finally:
        may_go_on.set()
