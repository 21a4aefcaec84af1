"""A trace through the router's own process in virtual time: its shell, and simulated engines.

    trace ─▶ clients ─▶ Router (HTTP, intake, probes, races, breakers, limits) ─▶ SimulatedEngine

The code is that of `kvstore router` with its default settings: what it holds, refuses, moves or is
late to learn counts in the figures. Engines show their load on their metrics page, when they are
asked; one request in `whole_every` is not streamed; clients allow long answers. The index is exact,
as in `drive`. In memory: connections, and nothing of time but the engines' own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
from aiohttp import web

from bench.routing.drive import OUTPUT_TOKENS_MAX
from bench.routing.engine import BLOCK_TOKENS, EngineModel, Job, SimulatedEngine
from bench.routing.traces import RouterTrace
from kvstore.config.router import WorkerAddress, load_router_config
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.router.front.intake import Peek
from kvstore.router.keys.prefixes import Prefixes
from kvstore.router.process import Router
from kvstore.routing.core import RouterCore
from kvstore.routing.learning import TokenEstimates
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import Prefix, PrefixAnswer
from tests.kit.virtual_fleet import MODEL, ask
from tests.kit.virtual_loop import MemoryServer, VirtualLoop

SEED: Final = 1


class ServedEngine:
    """A simulated engine behind HTTP."""

    def __init__(self, loop: VirtualLoop, model: EngineModel, jobs: Sequence[Job]) -> None:
        self.engine = SimulatedEngine(model)
        self._loop, self._jobs = loop, jobs
        self._firsts: dict[int, asyncio.Future[None]] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.port: MemoryServer = loop.serve(
            web.Server(self._answer, access_log=None, handler_cancellation=True)
        )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return self._page(request.path)
        asked = msgspec.json.decode(await request.content.read())
        asked_for = self._jobs[int(asked["prompt"])]
        job = msgspec.structs.replace(asked_for)  # a race has two
        try:
            return await self._served(request, asked, job)
        except (asyncio.CancelledError, ConnectionError):
            self.engine.abort(job, self._loop.time())
            self._wake()
            raise
        finally:
            if job.end_s >= 0:
                asked_for.first_s, asked_for.end_s = job.first_s, job.end_s
                asked_for.cached_tokens = job.cached_tokens

    async def _served(
        self, request: web.BaseRequest, asked: dict[str, Any], job: Job
    ) -> web.StreamResponse:
        first, end = self._loop.create_future(), self._loop.create_future()
        self._firsts[job.number], self._ends[job.number] = first, end
        self.engine.submit(job, self._loop.time())
        self._wake()
        usage = {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if not asked.get("stream"):
            await end
            usage["prompt_tokens_details"] = {"cached_tokens": job.cached_tokens}
            return web.json_response({"choices": [], "usage": usage})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await first
        await out.prepare(request)
        await out.write(b"data: {}\n\n")
        await end
        usage["prompt_tokens_details"] = {"cached_tokens": job.cached_tokens}
        await out.write(b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"usage": usage}))
        return out

    def _page(self, path: str) -> web.Response:
        if path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL}]})
        engine = self.engine
        return web.Response(
            text=f"vllm:num_requests_running {engine.running}\n"
            f"vllm:num_requests_waiting {len(engine.waiting)}\n"
            f"vllm:kv_cache_usage_perc {engine.used_share}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",'
            f'num_gpu_blocks="{engine.model.cache_blocks}"}} 1\n'
        )

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self.engine.is_busy:
            self._timer = self._loop.call_at(self.engine.until_s, self._step)

    def _step(self) -> None:
        firsts, ends = self.engine.advance(self._loop.time())
        for job in firsts:
            _done(self._firsts.pop(job.number))
        for job in ends:
            _done(self._ends.pop(job.number))
        self._wake()


def _done(waited: asyncio.Future[None]) -> None:
    if not waited.done():
        waited.set_result(None)


class _ExactPrefixes(Prefixes):
    """What each engine's cache holds at that moment."""

    def __init__(self, jobs: Sequence[Job], engines: Sequence[ServedEngine]) -> None:
        super().__init__(TokenEstimates(), cast("Any", None), cast("Any", None))
        self._jobs, self._engines = jobs, engines

    async def of(
        self, path: str, body: bytes, read: Peek, request_salt: str, tenant: str = ""
    ) -> Prefix:
        job = self._jobs[int(msgspec.json.decode(read.prompt))]
        matches = [
            Match(Holder(f"n{number}", "e"), hits)
            for number, each in enumerate(self._engines)
            if (hits := each.engine.hit_blocks(job.blocks))
        ]
        keys = b"".join(block.to_bytes(8, "little") * 4 for block in job.blocks)
        answer = PrefixAnswer(Trust.EXACT, matches)
        return Prefix(job.prompt_tokens, keys, BLOCK_TOKENS, answer)


def run_shell(
    trace: RouterTrace,
    policy: RoutingPolicy,
    model: EngineModel,
    *,
    workers: int,
    whole_every: int = 0,
) -> list[Job]:
    """All requests of a trace; returns them with their times and statuses. `whole_every` 0: all are
    streamed."""
    loop = VirtualLoop()
    return loop.run(_play(loop, trace, policy, model, workers, whole_every))


async def _play(
    loop: VirtualLoop,
    trace: RouterTrace,
    policy: RoutingPolicy,
    model: EngineModel,
    workers: int,
    whole_every: int,
) -> list[Job]:
    jobs = trace.fresh()
    engines = [ServedEngine(loop, model, jobs) for _ in range(workers)]
    urls = ["http://{}:{}".format(*each.port.port) for each in engines]
    config = load_router_config(
        None, {"listen": "127.0.0.1:0", "metrics": "off", "worker": [f"w0={urls[0]}"]}
    )
    router = Router(config, RouterCore(policy, seed=SEED), clock=loop.clock_ns)
    router.intake.prefixes = _ExactPrefixes(jobs, engines)
    await router.begin()
    router.workers.replace(
        WorkerAddress(name=f"w{n}", url=url, node=f"n{n}", engine="e") for n, url in enumerate(urls)
    )
    door = loop.serve(router.door)
    url = "http://{}:{}".format(*door.port)
    await asyncio.sleep(5)
    begin_s = loop.time()

    async def one(job: Job) -> None:
        job.arrival_s += begin_s
        await asyncio.sleep(job.arrival_s - loop.time())
        body = {"model": MODEL, "prompt": str(job.number), "max_tokens": OUTPUT_TOKENS_MAX}
        is_whole = whole_every > 0 and job.number % whole_every == 0
        body |= {"stream": not is_whole, "session_id": job.session}
        job.status = (await ask(loop, url, body)).status

    await asyncio.gather(*map(one, jobs))
    for each in engines:
        each.engine.check()
    await router.close()
    return jobs
