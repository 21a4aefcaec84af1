"""Probes in virtual time: how many there are, whom they reach, and what they come to."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from yarl import URL

from kvstore.config.router import WorkerAddress
from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.calls import EngineHttp, HttpAnswer
from kvstore.router.engines.failures import NoAnswer, NoConnection
from kvstore.router.engines.probes import (
    CONTEXT_MAX,
    MODELS_MAX,
    MODELS_S,
    PROBES_PER_S,
    TICK_S,
    Probes,
)
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Probed, RouteEvent, Scraped
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import ProbeResult, WorkerWord
from tests.kit.coroutines import driven
from tests.kit.routing_check import check_fleet
from tests.kit.virtual_fleet import fleet
from tests.kit.virtual_loop import VirtualLoop

LATE_S, SILENCE_S = RoutingPolicy().probes.late_s, RoutingPolicy().probes.silence_s
PAGE = b"vllm:num_requests_waiting 1\nvllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5\n"
NEVER = 1e9
Answer = int | bytes | Exception


class Engines:
    """Pages of all engines, in place of their connections."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str, str]] = []
        """(when, host, path), models left out."""
        self.pages: dict[str, Answer] = {"/metrics": PAGE, "/health": 200}
        self.models: Any = {"data": [{"id": "m", "max_model_len": 4096}]}
        self.delay_s = self.trouble_s = 0.0
        self.broken_off = self.models_count = 0

    async def fetch(self, url: URL, **_: Any) -> HttpAnswer:
        now_s = asyncio.get_running_loop().time()
        if url.path == "/v1/models":
            self.models_count += 1
            content = self.models if isinstance(self.models, bytes) else json.dumps(self.models)
            return HttpAnswer(200, [], content if isinstance(content, bytes) else content.encode())
        self.asked.append((now_s, str(url.host), url.path))
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        page = self.pages[url.path]
        if isinstance(page, Exception):
            raise page
        return HttpAnswer(page, [], b"") if isinstance(page, int) else HttpAnswer(200, [], page)


class Site:
    """`count` workers, w0, w1 …, and what the core was told."""

    def __init__(self, loop: VirtualLoop, count: int, **address: Any) -> None:
        self.loop, self.engines, self.address = loop, Engines(), address
        self.core = RouterCore(RoutingPolicy(), seed=1)
        self.dispatcher = Dispatcher(self.core, clock=loop.clock_ns)
        self.workers = self.dispatcher.workers
        self.told: list[RouteEvent] = []
        self._heard = self.dispatcher.note
        self.dispatcher.note = self._note  # type: ignore[method-assign]
        self.probes = Probes(cast("EngineHttp", self.engines), self.dispatcher)
        self.crew(count)

    def _note(self, event: RouteEvent) -> None:
        self.told.append(event)
        self._heard(event)

    def crew(self, count: int, begin: int = 0) -> None:
        self.workers.replace(
            WorkerAddress(name=f"w{n}", url=f"http://w{n}", **self.address)
            for n in range(begin, begin + count)
        )

    async def play(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Ticks for a while. Args: `each`: called before each of them."""
        end_s = self.loop.time() + seconds
        while self.loop.time() < end_s:
            each()
            await self.probes.once()
            await asyncio.sleep(TICK_S)

    def word(self) -> WorkerWord:
        return self.workers["w0"].word

    def results(self) -> list[ProbeResult]:
        found, self.told = [each for each in self.told if isinstance(each, Probed)], []
        return [each.result for each in found]

    def gaps_s(self, names: set[str] | None = None) -> float:
        """The longest time in which one of these workers was not asked, to now."""
        last = {worker.name: 1000.0 for worker in self.workers if not names or worker.name in names}
        longest = 0.0
        for at_s, host, _ in [*self.engines.asked, *((self.loop.time(), n, "") for n in [*last])]:
            if host in last:
                longest, last[host] = max(longest, at_s - last[host]), at_s
        return longest


def run(test: Callable[[Site], Coroutine[Any, Any, None]], count: int = 1, **address: Any) -> Site:
    loop = VirtualLoop()

    async def running() -> Site:
        site = Site(loop, count, **address)
        try:
            await test(site)
        finally:
            await site.probes.close()
        return site

    return loop.run(running())


def most_in_a_second(asked: list[tuple[float, str, str]]) -> int:
    at_s = [each[0] for each in asked]
    return max(sum(begin <= other < begin + 1 for other in at_s) for begin in set(at_s))


@pytest.mark.parametrize(("count", "period_s"), [(1, 1.0), (500, 10.0)])
@pytest.mark.parametrize("fails", ["none", "half", "each often"])
def test_probes_are_bounded_and_reach_everybody_whatever_fails(
    count: int, period_s: float, fails: str
) -> None:
    async def test(site: Site) -> None:
        def each() -> None:  # requests fail there, or callers say so
            for number, worker in enumerate(site.workers):
                if fails == "each often" or (fails == "half" and number % 2):
                    for _ in range(20 if fails == "each often" else 1):
                        site.probes.look_now(worker)

        await site.play(60, each)
        asked = site.engines.asked
        assert len(asked) <= 60 * PROBES_PER_S + PROBES_PER_S
        assert most_in_a_second(asked) <= 2 * PROBES_PER_S, "a first burst, and a second of ticks"
        assert len(asked) >= 0.8 * 60 * count / period_s
        others = {f"w{number}" for number in range(0, count, 2)}
        assert site.gaps_s(others) <= 2 * period_s + 2 * TICK_S
        assert site.gaps_s() <= 2 * period_s + 2 * TICK_S

    run(test, count)


@driven(run, 40)
async def test_the_second_probes_are_spread_over_the_period(site: Site) -> None:
    await site.play(3)
    ticks = {round(at_s, 3) for at_s, _, _ in site.engines.asked if at_s > 1000}
    assert len(ticks) >= 10


@pytest.mark.parametrize("count", [1, 100])
def test_a_worker_that_fails_is_probed_within_two_ticks(count: int) -> None:
    async def test(site: Site) -> None:
        await site.play(30)
        for number in range(min(count, 5)):
            before, name = len(site.engines.asked), f"w{number}"
            site.probes.look_now(site.workers[name])
            await site.play(1.5 * TICK_S)
            assert name in [host for _, host, _ in site.engines.asked[before:]]

    run(test, count)


@driven(run)
async def test_probes_that_were_not_needed_are_not_saved_for_a_crowd(site: Site) -> None:
    await site.play(600)
    site.engines.asked.clear()
    site.crew(500, begin=1)
    await site.play(TICK_S / 2)
    assert len(site.engines.asked) == PROBES_PER_S
    await site.play(12)
    assert len({host for _, host, _ in site.engines.asked}) == 500


@driven(run, 3)
async def test_workers_that_left_are_not_asked_and_not_kept(site: Site) -> None:
    site.engines.delay_s = NEVER
    await site.play(1)
    site.crew(2, begin=1)  # w0 leaves amid its probe
    await site.play(TICK_S)
    assert site.engines.broken_off == 1
    site.engines.asked.clear()
    site.engines.delay_s = 0.0
    for begin in range(200):
        gone = site.workers.get(f"w{begin}")
        site.crew(3, begin=begin)
        await site.play(TICK_S / 2)
        if gone is not None:
            site.probes.look_now(gone)
    late = [host for at_s, host, _ in site.engines.asked if at_s > site.loop.time() - 1.1]
    assert {int(host[1:]) for host in late} <= set(range(190, 203))
    await site.play(2)
    assert not site.probes._open
    assert site.probes._readings.keys() <= set(site.workers)


@driven(run)
async def test_an_answered_probe_is_the_load_and_the_health(site: Site) -> None:
    await site.play(1.5)
    assert {path for _, _, path in site.engines.asked} == {"/metrics"}
    scraped = [each for each in site.told if isinstance(each, Scraped)]
    load = scraped[-1].sample
    assert (load.waiting, load.running, load.memory_used) == (1, 2, 0.5)
    assert set(site.results()) == {ProbeResult.ANSWERED}
    worker = site.workers["w0"]
    assert (worker.word, worker.models, worker.contexts) == (
        *(WorkerWord.UP, ("m",)),
        {"m": 4096},
    )


@driven(run)
async def test_a_late_answer_is_an_answer(site: Site) -> None:
    site.engines.delay_s = LATE_S + 1.0
    await site.play(LATE_S + 0.7)
    assert set(site.results()) == {ProbeResult.LATE}
    assert site.word() is WorkerWord.NEW
    await site.play(0.5)
    probed = [each for each in site.told if isinstance(each, Probed)]
    [answered] = [each for each in probed if each.result is ProbeResult.ANSWERED]
    assert answered.late_s == 0
    assert site.word() is WorkerWord.UP
    site.results()
    await site.play(10)  # its page is slow, not the engine
    assert set(site.results()) == {ProbeResult.ANSWERED}
    site.engines.delay_s = 3 * LATE_S + 3
    await site.play(2 * LATE_S + 5)
    assert site.word() is WorkerWord.LATE, "it takes longer than twice of that"
    site.engines.delay_s = 0.0
    await site.play(5)
    assert site.word() is WorkerWord.UP
    assert site.engines.broken_off == 0


@driven(run)
async def test_only_an_engine_without_any_byte_is_silent(site: Site) -> None:
    await site.play(1)
    worker = site.workers["w0"]
    site.engines.delay_s = NEVER
    site.results()

    def each() -> None:
        worker.heard_s = site.loop.time()  # its streams go on

    await site.play(5 * SILENCE_S, each)
    assert not site.results()
    await site.play(SILENCE_S - TICK_S)
    assert set(site.results()) == {ProbeResult.LATE}
    await site.play(2 * TICK_S)
    assert ProbeResult.SILENT in site.results()
    assert site.word() is WorkerWord.DOWN
    assert f"{SILENCE_S:g} s" in worker.why
    site.engines.delay_s = 0.0
    await site.play(SILENCE_S + 2)
    assert site.word() is WorkerWord.UP, "the probe after it was answered"


def test_a_router_without_descriptors_finds_no_engine_silent() -> None:
    async def played() -> None:
        async with fleet(2) as its:
            opened = its.loop.create_connection

            async def exhausted(*_: Any, **__: Any) -> Any:
                raise OSError(errno.EMFILE, "too many open files")

            for engine in its.engines:  # no kept connection is left
                engine.port.kill()
                engine.port.listen()
            its.loop.create_connection = exhausted  # type: ignore[method-assign]
            await asyncio.sleep(5 * SILENCE_S)
            words = {worker.word for worker in its.router.workers}
            assert words <= {WorkerWord.UP, WorkerWord.LATE}
            assert "too many open files" in its.router.engines.trouble
            its.loop.create_connection = opened  # type: ignore[method-assign]
            await asyncio.sleep(3)
            assert {worker.word for worker in its.router.workers} == {WorkerWord.UP}
            assert its.router.engines.trouble == ""
            its.engines[0].freeze()
            await asyncio.sleep(SILENCE_S + 2)
            assert its.router.workers["a"].word is WorkerWord.DOWN, "that is over"

    VirtualLoop().run(played())


@pytest.mark.parametrize(
    ("kind", "pages", "result", "why"),
    [
        ("vllm", {"/metrics": 404}, "answered", ""),
        ("vllm", {"/metrics": NoAnswer("it broke")}, "answered", ""),
        ("vllm", {"/metrics": 500, "/health": 503}, "unwell", "/health: status 503"),
        ("vllm", {"/metrics": 404, "/health": 301}, "unwell", "/health: status 301"),
        ("vllm", {"/metrics": NoConnection("nobody", is_gone=True)}, "refused", "nobody"),
        ("vllm", {"/metrics": 404, "/health": NoAnswer("it broke")}, "refused", "it broke"),
        ("ollama", {"/api/version": 200}, "answered", ""),
        ("ollama", {"/api/version": 404}, "unwell", "/api/version: status 404"),
        (
            "triton",  # its metrics are at a port of their own: that it is closed proves nothing
            {"/metrics": NoConnection("closed", is_gone=True), "/v2/health/ready": 200},
            *("answered", ""),
        ),
    ],
)
def test_what_a_probe_comes_to(kind: str, pages: dict[str, Answer], result: str, why: str) -> None:
    async def test(site: Site) -> None:
        site.engines.pages = {"/health": 200, **pages}
        await site.play(1)
        [probed, *_] = [each for each in site.told if isinstance(each, Probed)]
        assert (probed.result.value, probed.why) == (result, why)

    run(test, kind=kind)


@driven(run)
async def test_an_engine_in_trouble_is_asked_for_its_health_too(site: Site) -> None:
    site.engines.pages |= {"/metrics": 500, "/health": 503}
    await site.play(1)
    assert site.word() is WorkerWord.DOWN
    site.engines.pages["/metrics"] = PAGE
    await site.play(3)
    assert site.word() is WorkerWord.DOWN, "it publishes metrics, and is unwell"
    site.engines.pages["/health"] = 200
    await site.play(2)
    assert site.word() is WorkerWord.UP


@driven(run, kind="sglang")
async def test_metrics_that_cannot_be_read_are_said_after_a_while_and_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.engines.pages["/metrics"] = 404
    await site.play(2.5)
    assert site.workers["w0"].unread == ""
    await site.play(10)
    trouble = site.workers["w0"].unread
    assert trouble == "/metrics: status 404: start it with --enable-metrics"
    assert sum("load of worker" in each.message for each in caplog.records) == 1
    site.engines.pages["/metrics"] = PAGE
    await site.play(2)
    assert not site.workers["w0"].unread
    site.engines.pages["/metrics"] = 404
    await site.play(2.5)
    assert not site.workers["w0"].unread, "after as long a while as the first time"
    site.engines.pages["/metrics"] = b"sglang:num_running_reqs 1\nsglang:token_usage 0.1\n"
    await site.play(10)
    assert not site.workers["w0"].unread, "some metrics are there after a first request only"
    site.workers["w0"].has_served = True
    await site.play(2)
    assert "/metrics does not have sglang:num_queue_reqs" in site.workers["w0"].unread
    assert site.word() is WorkerWord.UP, "it is routed to all the same"


LISTS: list[tuple[Any, tuple[str, ...], dict[str, int]]] = [
    (b"{", (), {}),
    (b"\xff", (), {}),
    ({"data": 1}, (), {}),
    ({"data": [{"id": 1}]}, (), {}),
    ({"error": "none"}, (), {}),
    ({"data": []}, (), {}),
    ({"data": [{"id": "m", "max_model_len": -5}]}, ("m",), {}),
    ({"data": [{"id": "m", "max_model_len": 0}]}, ("m",), {}),
    (b'{"data":[{"id":"m","max_model_len":1%b}]}' % (b"0" * 400), ("m",), {}),
    ({"data": [{"id": "m", "max_model_len": CONTEXT_MAX}]}, ("m",), {"m": CONTEXT_MAX}),
    ({"data": [{"id": "m"}, {"id": "m"}]}, ("m",), {}),
    (
        {"data": [{"id": str(n)} for n in range(MODELS_MAX + 9)]},
        tuple(map(str, range(MODELS_MAX))),
        {},
    ),
]


@pytest.mark.parametrize(("listed", "models", "contexts"), LISTS, ids=range(len(LISTS)))
@driven(run)
async def test_lists_of_models_are_bounded_whatever_they_hold(
    site: Site, listed: Any, models: tuple[str, ...], contexts: dict[str, int]
) -> None:
    site.engines.models = listed
    await site.play(1)
    worker = site.workers["w0"]
    assert worker.word is WorkerWord.UP
    assert (set(worker.models), worker.contexts) == (set(models), contexts)
    assert bool(worker.unlisted) == (not models), "it gets requests for any model, which is said"
    check_fleet(site.core.fleet)


@driven(run)
async def test_adapters_are_no_models_and_keep_what_is_known_of_them(site: Site) -> None:
    rows = [
        {"id": "m"},
        {"id": "lora", "parent": "m", "root": "/l"},
        {"id": "x", "parent": "y"},
    ]
    site.engines.models = {"data": rows}
    await site.play(1)
    worker = site.workers["w0"]
    assert (worker.models, [*worker.adapters]) == (("m", "x"), ["lora"])
    known = worker.adapters["lora"]
    assert (known.base, known.path) == ("m", "/l")
    site.engines.models = {"data": [*rows, {"id": "n", "parent": "m"}]}
    await site.play(MODELS_S + 2)
    assert [*worker.adapters] == ["lora", "n"]
    assert worker.adapters["lora"] is known
    rows[1]["root"] = "/other"
    site.probes.read_models(worker)
    await site.play(TICK_S)
    assert worker.adapters["lora"] is not known
    assert worker.spec().adapters == ("lora", "n")


@driven(run)
async def test_models_are_read_at_once_when_one_is_missing_and_not_twice(site: Site) -> None:
    await site.play(1)
    site.engines.models = {"data": [{"id": "new"}]}
    before, worker = site.engines.models_count, site.workers["w0"]
    for _ in range(10):
        site.probes.read_models(worker)
    [reading] = site.probes._readings.values()
    await reading
    assert worker.models == ("new",)
    assert site.engines.models_count == before + 1
    await site.play(MODELS_S - 1)
    assert site.engines.models_count == before + 1


@driven(run)
async def test_probes_that_have_no_answer_end_with_the_router(site: Site) -> None:
    site.engines.delay_s = NEVER
    await site.play(1)
    assert site.probes._open
    await site.probes.close()
    assert site.engines.broken_off == 1
    assert all(task.done() for _, task in site.probes._open.values())


@driven(run)
async def test_a_pause_of_the_router_is_no_silence_of_the_engines(site: Site) -> None:
    """A machine that was stopped reads what came meanwhile after it has looked."""
    await site.play(1)
    site.engines.delay_s = 3.0
    await site.play(2)
    site.results()
    site.loop.now_s += 2 * SILENCE_S
    await site.probes.once()
    assert ProbeResult.SILENT not in site.results()
    await site.play(5)
    assert site.word() is WorkerWord.UP
