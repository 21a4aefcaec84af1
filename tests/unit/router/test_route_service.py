"""`Router/Route`: what a caller can do to the requests of others, and what it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import grpc
import pytest

from kvstore.config.router import WorkerAddress
from kvstore.proto import router_pb2 as pb
from kvstore.router.dispatch import Dispatcher, RoutedLife
from kvstore.router.engines.workers import WORKERS_MAX, Worker
from kvstore.router.front.intake import NAME_BYTES_MAX
from kvstore.router.keys.prefixes import TOKENS_PER_PIECE, Prefixes
from kvstore.router.rpc import (
    BLOCK_TOKENS_MAX,
    FIRST_WORD_S,
    SILENCE_S,
    STREAMS_PER_CALLER,
    TOKENS_MAX,
    RouteService,
)
from kvstore.routing.core import RETRY_BURST, RouterCore
from kvstore.routing.events import (
    Ending,
    Failure,
    Fault,
    Leg,
    Probed,
    Rejected,
    RequestEnded,
    Routed,
    RouteEvent,
)
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.rows import FAULTS_MAX
from kvstore.routing.values import Prefix, ProbeResult, RouteRequest, WorkerWord
from kvstore.types import KEY_BYTES
from tests.kit.byte_prefixes import BytePrefixes
from tests.kit.coroutines import driven
from tests.kit.routing_check import check
from tests.kit.virtual_loop import VirtualLoop

KEY = bytes(KEY_BYTES)
PLAIN = pb.Ask(model="m", prompt_tokens=100)


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Caller:
    """As grpc's context."""

    def __init__(self, name: str) -> None:
        self._names = [f"{each}.client.kvstore".encode() for each in name.split()]

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_dns": self._names}

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Aborted(code, text)


class Stream:
    """One call, spoken word by word."""

    def __init__(self, site: Site, caller: str = "") -> None:
        self._words = asyncio.Queue[pb.RouteWord | None]()
        context: Any = Caller(caller)
        self._call = aiter(site.service.Route(self._said(), context))

    async def _said(self) -> AsyncIterator[pb.RouteWord]:
        while (word := await self._words.get()) is not None:
            yield word

    async def say(self, **word: Any) -> pb.Decision:
        """The answer to a word. Raises Aborted; StopAsyncIteration: the stream has ended."""
        self._words.put_nowait(pb.RouteWord(**word))
        return await anext(self._call)

    async def failed(self) -> pb.Decision:
        return await self.say(failed=pb.WorkerFailed())

    async def over(self, **word: Any) -> None:
        """Say a last word, or nothing more."""
        self._words.put_nowait(pb.RouteWord(**word) if word else None)
        with pytest.raises(StopAsyncIteration):
            await anext(self._call)

    async def left(self) -> None:
        """The call is cancelled."""
        await cast("Any", self._call).aclose()


class Site:
    """Workers a, b … that are up."""

    def __init__(self, loop: VirtualLoop, count: int, prefixes: Prefixes | None = None) -> None:
        self.loop, self.core = loop, RouterCore(RoutingPolicy(), seed=1)
        self.dispatcher = Dispatcher(self.core, clock=loop.clock_ns)
        self.workers = self.dispatcher.workers
        self.suspected: list[Worker] = []
        self.service = RouteService(
            self.dispatcher,
            prefixes or BytePrefixes(),
            suspected=self.suspected.append,
        )
        self.workers.replace(
            WorkerAddress(name=name, url=f"http://{name}:1", models=("m",))
            for name in "abcdefgh"[:count]
        )
        for worker in self.workers:
            self.core.fleet.probed(Probed(worker.name, ProbeResult.ANSWERED))

    @property
    def in_flight(self) -> int:
        return sum(self.core.fleet.in_flight(worker.name) for worker in self.workers)

    def words(self) -> set[WorkerWord]:
        return {state.word for state in self.core.fleet.workers}

    async def own(self, name: str = "own") -> tuple[RoutedLife, Routed | Rejected]:
        """A request of another front end."""
        life = RoutedLife(self.dispatcher)
        request = RouteRequest(request_id=name, model="m", prompt_tokens=1000)
        async with asyncio.timeout(1):
            return life, await life.enter(request)


def run(
    test: Callable[[Site], Coroutine[Any, Any, None]], count: int = 2, prefixes: Any = None
) -> None:
    loop = VirtualLoop()

    async def running() -> None:
        site = Site(loop, count, prefixes)
        await test(site)
        check(site.core)

    loop.run(running())


@driven(run)
async def test_a_stream_counts_from_its_question_to_its_end(site: Site) -> None:
    for end in ("done", "end", "cancelled"):
        stream = Stream(site)
        decision = await stream.say(ask=PLAIN)
        assert (decision.worker, decision.model) == (decision.address[7], "m")
        assert site.in_flight == len(site.core.open) == 1
        if end == "done":
            await stream.over(done=pb.Done(output_tokens=7, cached_tokens=3))
        elif end == "end":
            await stream.over()
        else:
            await stream.left()
        assert site.in_flight == len(site.core.open) == 0
        [draft] = site.core.take_drafts()
        outcome = draft.plain.outcome
        assert outcome.end == ("done" if end == "done" else "aborted")
        assert outcome.output_tokens == (7 if end == "done" else 0)
    assert not site.service._streams


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (pb.Ask(model="m", keys=KEY[:-1]), "32 bytes"),
        (pb.Ask(model="m", keys=KEY, block_tokens=BLOCK_TOKENS_MAX + 1), "a block has at most"),
        (pb.Ask(model="m", keys=KEY, block_tokens=2**32 - 1), "a block has at most"),
        (pb.Ask(model="m", keys=KEY * 65, block_tokens=BLOCK_TOKENS_MAX), "a prompt has at most"),
        (pb.Ask(model="m", prompt_tokens=TOKENS_MAX + 1), "a prompt has at most"),
        (pb.Ask(model="m", prompt_tokens=2**32 - 1), "a prompt has at most"),
        (pb.Ask(model="m", keys=KEY * (TOKENS_MAX // TOKENS_PER_PIECE + 1)), "a prompt has at"),
        (pb.Ask(model="m", subset=["a"] * (WORKERS_MAX + 1)), "a subset has at most"),
        (pb.Ask(model="m", subset=["a" * (NAME_BYTES_MAX + 1)]), "a name has at most"),
        (pb.Ask(model="m" * (NAME_BYTES_MAX + 1)), "a name has at most"),
        (pb.Ask(model="m", tenant="t" * (NAME_BYTES_MAX + 1)), "a name has at most"),
        (pb.Ask(model="m", service="s" * (NAME_BYTES_MAX + 1)), "a name has at most"),
    ],
)
@driven(run)
async def test_numbers_that_no_prompt_has_are_refused(site: Site, ask: pb.Ask, why: str) -> None:
    with pytest.raises(Aborted, match=why) as aborted:
        await Stream(site).say(ask=ask)
    assert aborted.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert not site.core.open
    assert not site.service._streams


@pytest.mark.parametrize(
    "ask",
    [
        pb.Ask(model="m", keys=KEY * 64, block_tokens=BLOCK_TOKENS_MAX),
        pb.Ask(model="m", prompt_tokens=TOKENS_MAX),
        pb.Ask(
            model="m", tokens=pb.RouteTokens(ids=[2**32 - 1] * 1000), output_tokens_max=2**32 - 1
        ),
        pb.Ask(model="m"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_the_largest_numbers_cost_others_nothing(ask: pb.Ask, count: int) -> None:
    async def test(site: Site) -> None:
        streams = [Stream(site) for _ in range(8)]
        for stream in streams:
            assert (await stream.say(ask=ask)).worker
        for number in range(20):
            _, routed = await site.own(str(number))
            assert isinstance(routed, Routed)
        for stream in streams:
            await stream.over()

    run(test, count)


@driven(run)
async def test_a_stream_that_says_nothing_ends(site: Site) -> None:
    mute, asked, alive = Stream(site), Stream(site), Stream(site)
    begin_s = site.loop.time()
    with pytest.raises(StopAsyncIteration):
        await anext(mute._call)
    assert site.loop.time() - begin_s == pytest.approx(FIRST_WORD_S)
    await asked.say(ask=PLAIN)
    await alive.say(ask=PLAIN)
    begin_s = site.loop.time()
    reading = asyncio.gather(*(anext(each._call, None) for each in (asked, alive)))
    await asyncio.sleep(SILENCE_S - 1)
    alive._words.put_nowait(pb.RouteWord(first=pb.FirstPiece()))
    await asyncio.sleep(2)
    assert site.in_flight == len(site.core.open) == 1, "the other one has said a word"
    await reading
    assert site.loop.time() - begin_s == pytest.approx(2 * SILENCE_S - 1)
    assert site.in_flight == 0
    assert not site.service._streams


@driven(run)
async def test_streams_are_counted_by_certificate(site: Site) -> None:
    streams = site.service._streams
    for _ in range(3):
        await Stream(site, "greedy also").say(ask=PLAIN)
    assert streams == {"also.client.kvstore+greedy.client.kvstore": 3}, "in no order"
    streams["also.client.kvstore+greedy.client.kvstore"] = STREAMS_PER_CALLER
    with pytest.raises(Aborted, match=f"{STREAMS_PER_CALLER} streams") as aborted:
        await Stream(site, "also greedy").say(ask=PLAIN)
    assert aborted.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert streams["also.client.kvstore+greedy.client.kvstore"] == STREAMS_PER_CALLER
    assert (await Stream(site, "modest").say(ask=PLAIN)).worker
    assert (await Stream(site).say(ask=PLAIN)).worker, "on loopback, without certificates"


@driven(run)
async def test_failures_that_callers_claim_are_no_faults_of_workers(site: Site) -> None:
    for _ in range(20 * FAULTS_MAX):
        stream = Stream(site)
        seen = [(await stream.say(ask=PLAIN)).worker]
        seen.append((await stream.failed()).worker)
        assert {*seen} == {"a", "b"}, "not the same again"
        last = await stream.failed()
        assert (last.worker, last.status) == ("", 502)
        with pytest.raises(Aborted, match="Ask first"):
            await stream.failed()
    assert site.words() == {WorkerWord.UP}
    assert site.in_flight == len(site.core.open) == 0
    assert {worker.name for worker in site.suspected} == {"a", "b"}, "their probes decide"
    found = [(await site.own(str(number)))[1] for number in range(20)]
    assert all(isinstance(each, Routed) for each in found)


@driven(run, 4)
async def test_failures_that_callers_claim_take_no_retries_from_others(site: Site) -> None:
    for _ in range(2 * int(RETRY_BURST)):
        stream = Stream(site)
        await stream.say(ask=PLAIN)
        for _ in range(3):
            await stream.failed()
        await stream.left()
    life, routed = await site.own()
    assert isinstance(routed, Routed)
    again = await life.failed(Leg.DECODE, Fault(Failure.STATUS))
    assert isinstance(again, Routed)
    assert again.worker != routed.worker


@pytest.mark.parametrize(
    "words",
    [
        [{"failed": pb.WorkerFailed()}],
        [{"first": pb.FirstPiece()}],
        [{"done": pb.Done()}],
        [{}],
        [{"ask": PLAIN}, {"ask": PLAIN}],
        [{"ask": PLAIN}, {}],
        [{"ask": pb.Ask(model="unknown")}, {"done": pb.Done()}],
    ],
)
@driven(run)
async def test_words_out_of_their_order_end_the_stream(
    site: Site, words: list[dict[str, Any]]
) -> None:
    stream = Stream(site)
    for word in words[:-1]:
        await stream.say(**word)
    with pytest.raises(Aborted) as aborted:
        await stream.say(**words[-1])
    assert aborted.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert not site.core.open
    assert site.in_flight == 0
    assert not site.service._streams


@driven(run)
async def test_a_request_ends_once_whatever_its_caller_says(site: Site) -> None:
    events, step = list[RouteEvent](), site.core.step

    def noted(event: RouteEvent, now_ns: int) -> Any:
        events.append(event)
        return step(event, now_ns)

    site.core.step = noted  # type: ignore[method-assign]
    stream = Stream(site)
    await stream.say(ask=PLAIN)
    await stream.failed()
    for _ in range(5):
        stream._words.put_nowait(pb.RouteWord(first=pb.FirstPiece()))
    await stream.over(done=pb.Done(is_refused=True))
    ends = [each for each in events if isinstance(each, RequestEnded)]
    assert [each.end for each in ends] == [Ending.REFUSED]


@driven(run)
async def test_a_worker_that_has_left_has_no_address_and_its_claim_is_no_error(site: Site) -> None:
    stream = Stream(site)
    first = await stream.say(ask=PLAIN)
    other = {"a": "b", "b": "a"}[first.worker]
    site.workers.replace([WorkerAddress(name=other, url=f"http://{other}:1", models=("m",))])
    assert (await stream.failed()).worker == other
    assert not site.suspected
    site.workers.replace([])
    await stream.over(done=pb.Done())
    assert not site.core.open


class NotingPrefixes(BytePrefixes):
    """Notes what it is asked. `found`: all its answers; None: as without an index."""

    def __init__(self, found: Prefix | None) -> None:
        super().__init__()
        self.found, self.asked = found, list[tuple[Any, ...]]()

    async def of_ids(self, *asked: Any) -> Prefix:
        self.asked.append(asked)
        return self.found or await super().of_ids(*asked)

    async def of_keys(self, *asked: Any) -> Prefix:
        self.asked.append(asked)
        return self.found or await super().of_keys(*asked)


def test_a_prompt_is_at_least_what_its_keys_are() -> None:
    for found in (None, Prefix(777, KEY, 64)):
        prefixes = NotingPrefixes(found)

        async def test(
            site: Site, prefixes: NotingPrefixes = prefixes, found: Prefix | None = found
        ) -> None:
            asks = [
                pb.Ask(model="m", keys=KEY * 3, block_tokens=16, prompt_tokens=50),
                pb.Ask(model="m", keys=KEY * 3, block_tokens=16, prompt_tokens=7),
                pb.Ask(model="m", keys=KEY * 3),
                pb.Ask(model="m", tokens=pb.RouteTokens(ids=[1, 2, 3]), prompt_tokens=9),
                pb.Ask(model="m"),
            ]
            sizes = []
            for ask in asks:
                stream = Stream(site)
                await stream.say(ask=ask)
                [opened] = site.core.open.values()
                sizes.append(opened.request.prompt_tokens)
                await stream.over()
            own = [50, 48, 3 * TOKENS_PER_PIECE, 3, 1]
            assert sizes == (own if found is None else [777] * 5)
            assert prefixes.asked[3] == ("m", [1, 2, 3], "")
            assert [each[2] for each in prefixes.asked[:3]] == own[:3]

        run(test, prefixes=prefixes)
