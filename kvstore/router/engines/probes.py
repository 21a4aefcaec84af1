"""Probes of engines: their metrics page shows that they live, and their load; models served.

    every period: GET metrics, or where there is none health ─▶ Probed(answered), Scraped
                  of a worker in trouble both
                  nothing listens ─▶ refused     not 2xx ─▶ unwell     no answer yet ─▶ late
                  neither an answer nor a byte of any response for `silence_s` ─▶ silent
    every MODELS_S, and when a model is missing: GET /v1/models ─▶ names, contexts, Joined

A probe has no time limit but that of silence: a late answer is an answer, and lowers preference
only. PROBES_PER_S bounds what probes cost: with more engines the period is longer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvstore.net.aio import Tasks
from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.calls import EngineHttp, HttpAnswer
from kvstore.router.engines.failures import NoAnswer, NoConnection
from kvstore.router.engines.workers import Worker, WorkerAdapter
from kvstore.routing.events import Probed, Scraped
from kvstore.routing.values import LoadSample, ProbeResult, WorkerWord
from kvstore.types import Latest

# ── kinds of engines ──────────────────────────────────────────────────────────────────────────────
# Where their health and metrics are, and the names of the numbers. One table for all kinds; a
# number that a kind does not publish is None, and the core goes by its own counts. Several series
# of one name (data-parallel ranks) are added up, shares are averaged.

_LINE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')


LINE_BYTES_MAX: Final = 16 << 10
VALUE_MAX: Final = 1e12
"""Larger numbers of an engine are ignored: products of two must stay finite."""


class Figure(NamedTuple):
    """Series that hold one number: the metric's name, and the value of a label (empty: any series;
    None: the number is in the label).
    """

    metric: str
    label: str = ""
    value: str | None = ""


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Paths and metrics of one kind of engine. Empty metric: not published."""

    health: str = "/health"
    metrics: str = "/metrics"
    """Path of the metrics page; empty: none."""
    port: int = 0
    """Port of the metrics; 0: the engine's own."""
    waiting: Figure = Figure("")
    running: Figure = Figure("")
    memory: Figure = Figure("")
    """Share of the KV cache in use."""
    has_memory: bool = True
    """False: only some versions publish `memory`."""
    adapters: str = ""
    """Metric whose label `running_lora_adapters` lists adapters."""
    block: tuple[Figure, ...] = ()
    """Tokens of a block: the largest number counts, as versions differ in where they publish it."""
    blocks: tuple[Figure, ...] = ()
    """Number of blocks in the cache, likewise."""
    advice: str = ""
    """Hint for operators how to make the engine publish metrics."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All that are read."""
        return (self.waiting, self.running, self.memory, *self.block, *self.blocks)

    @functools.cached_property
    def wanted(self) -> tuple[bytes, ...]:
        """Beginnings of the lines that are read."""
        names = {*(figure.metric for figure in self.figures), self.adapters}
        return tuple(name.encode() for name in sorted(filter(None, names)))

    @property
    def load(self) -> tuple[Figure, ...]:
        """Figures of load that the page must have."""
        found = (self.waiting, self.running, *([self.memory] if self.has_memory else ()))
        return tuple(each for each in found if each.metric)


ENGINES: Final[dict[str, EngineKind]] = {
    "vllm": EngineKind(
        waiting=Figure("vllm:num_requests_waiting"),
        running=Figure("vllm:num_requests_running"),
        memory=Figure("vllm:kv_cache_usage_perc"),
        adapters="vllm:lora_requests_info",
        block=(Figure("vllm:cache_config_info", "block_size", None),),
        blocks=(Figure("vllm:cache_config_info", "num_gpu_blocks", None),),
    ),
    "sglang": EngineKind(
        waiting=Figure("sglang:num_queue_reqs"),
        running=Figure("sglang:num_running_reqs"),
        memory=Figure("sglang:token_usage"),
        # The gauges: 0.5.11 and later.
        block=(Figure("sglang:cache_config_info", "page_size", None), Figure("sglang:page_size")),
        blocks=(Figure("sglang:cache_config_info", "num_pages", None), Figure("sglang:num_pages")),
        advice="start it with --enable-metrics",
    ),
    "tgi": EngineKind(waiting=Figure("tgi_queue_size"), running=Figure("tgi_batch_current_size")),
    "trtllm": EngineKind(
        metrics="/prometheus/metrics",
        waiting=Figure("trtllm_num_requests_waiting"),
        running=Figure("trtllm_num_requests_running"),
        memory=Figure("trtllm_kv_cache_utilization"),
        block=(Figure("trtllm_kv_cache_tokens_per_block"),),
        blocks=(Figure("trtllm_kv_cache_max_blocks"),),
        advice="set return_perf_metrics and enable_iter_perf_stats in its options",
    ),
    "triton": EngineKind(
        health="/v2/health/ready",
        port=8002,
        waiting=Figure("nv_trt_llm_request_metrics", "request_type", "waiting"),
        running=Figure("nv_trt_llm_request_metrics", "request_type", "scheduled"),
        memory=Figure("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"),
        block=(Figure("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"),),
        blocks=(Figure("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"),),
    ),
    "llamacpp": EngineKind(
        waiting=Figure("llamacpp:requests_deferred"),
        running=Figure("llamacpp:requests_processing"),
        memory=Figure("llamacpp:kv_cache_usage_ratio"),
        has_memory=False,
        advice="start it with --metrics",
    ),
    "ollama": EngineKind(health="/api/version", metrics=""),
    # DeepSpeed-FastGen and all others that speak OpenAI's API.
    "openai": EngineKind(health="/v1/models", metrics=""),
}


class EngineFigures(NamedTuple):
    """Numbers that were read from a page of metrics."""

    load: LoadSample
    block_tokens: int
    """Tokens of a block; 0: not published, as with `memory_tokens`."""
    memory_tokens: int
    missing: tuple[str, ...] = ()
    """Metrics of the kind that the page does not have: renamed, or not counted yet."""


def findings_of(kind: EngineKind, page: bytes) -> EngineFigures:
    """Numbers in a page of metrics of an engine. Lines that are no metrics, or have absurd values,
    are skipped.
    """
    sums: dict[Figure, list[float]] = {}
    adapters: tuple[float, tuple[str, ...]] | None = None
    for line in page.split(b"\n"):
        if not line.startswith(kind.wanted) or len(line) > LINE_BYTES_MAX:
            continue
        if (read := _read_line(line)) is None:
            continue
        name, labels, value = read
        for figure in kind.figures:
            its = labels.get(figure.label, "")
            if figure.metric == name and figure.value in (None, its):
                number = _count(its) if figure.value is None else value
                sums.setdefault(figure, []).append(number)
        if name == kind.adapters and (adapters is None or value >= adapters[0]):  # the newest
            named = labels.get("running_lora_adapters", "").split(",")
            adapters = (value, tuple(filter(None, (each.strip() for each in named))))
    memory = sums.get(kind.memory)
    block, blocks = (
        round(max([0.0, *(number for figure in its for number in sums.get(figure, ()))]))
        for its in (kind.block, kind.blocks)
    )
    return EngineFigures(
        LoadSample(
            waiting=_total(sums.get(kind.waiting)),
            running=_total(sums.get(kind.running)),
            memory_used=min(1.0, max(0.0, sum(memory) / len(memory))) if memory else None,
            adapters=adapters[1] if adapters else None,
        ),
        block,
        block * blocks,
        tuple(each.metric for each in kind.load if each not in sums),
    )


@functools.lru_cache(maxsize=4096)
def _read_line(line: bytes) -> tuple[str, dict[str, str], float] | None:
    """(name, labels, value) of a line; None: it is no metric. Cached, as most lines are those of
    the last probe, so the labels must not be changed.
    """
    found = _LINE.match(line.decode("utf-8", "replace"))
    try:
        value = float(found[3]) if found is not None else math.nan
    except ValueError:
        return None
    if found is None or not abs(value) <= VALUE_MAX:  # no NaN, either
        return None
    return found[1], dict(_LABEL.findall(found[2] or "")), value


def _total(values: list[float] | None) -> int | None:
    return None if values is None else max(0, round(sum(values)))


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# ── probes ────────────────────────────────────────────────────────────────────────────────────────

TICK_S: Final = 0.2
PROBES_PER_S: Final = 50
"""Most probes per second, of all engines together."""
STALL_S: Final = 1.0
UNREAD_MAX: Final = 4
MODELS_S: Final = 10.0
MODELS_PER_S: Final = 5
TROUBLED: Final = (WorkerWord.DOWN, WorkerWord.OPEN, WorkerWord.HALF_OPEN)
"""States of workers whose health endpoint is asked as well: an engine may publish metrics and be
unwell.
"""
ROUND_S: Final = 1.0
"""Time between two rounds of reading all models, and the most that a request waits for one."""
PAGE_BYTES_MAX: Final = 4 << 20
SOUGHT_MAX: Final = 1024
MODELS_MAX: Final = 1 << 14
CONTEXT_MAX: Final = 1 << 32
"""Longer contexts are ignored: no model has one."""


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    """Base model of an adapter, as vLLM gives it."""
    root: str | None = None
    """Path of an adapter, as vLLM gives it."""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_log = logging.getLogger(__name__)


class Probes:
    """See the module; `once` is repeated by its owner."""

    pause_s: Final = TICK_S

    def __init__(self, engines: EngineHttp, dispatcher: Dispatcher) -> None:
        self._engines, self._workers, self._dispatcher = engines, dispatcher.workers, dispatcher
        self._note, self._clock = dispatcher.note, dispatcher.clock
        self._budget: float = PROBES_PER_S
        """Probes that may begin now. Bounds also those that callers cause by reporting failures."""
        self._open: dict[Worker, tuple[float, asyncio.Task[None]]] = {}
        """Probes, ended ones until `once` looks again: worker → (when it began, its task)."""
        self._readings: dict[Worker, asyncio.Task[None]] = {}
        """Reads of models under way."""
        self._tasks = Tasks("a bug: a probe failed")
        self._looked_s = self._awake_s = asyncio.get_running_loop().time()
        """When `once` ran last, and when it last ran after a stall of this process."""
        self._round: asyncio.Task[None] | None = None
        self._round_due_s = 0.0
        self._sought = Latest[str, float](SOUGHT_MAX)
        """Names of models that nobody listed → when they were looked for; the oldest first."""
        self._workers.read_again = self.read_again

    async def once(self) -> None:
        """Begin the probes that are due, and look at those without an answer."""
        settings = self._dispatcher.core.policy.probes
        now_s = asyncio.get_running_loop().time()
        if now_s - self._looked_s > STALL_S:  # what came meanwhile is not read yet
            self._awake_s = now_s
        self._looked_s = now_s
        present = list(self._workers)
        self._open = {its: under for its, under in self._open.items() if not under[1].done()}
        for gone in {*self._open, *self._readings}.difference(present):  # nobody waits for it
            if gone in self._open:
                self._open[gone][1].cancel()
            if (reading := self._readings.pop(gone, None)) is not None:
                reading.cancel()
        for worker in list(self._open):
            self._look(worker, now_s)
        period_s = max(settings.period_s, len(present) / PROBES_PER_S)
        self._budget = min(PROBES_PER_S, self._budget + PROBES_PER_S * TICK_S)
        for worker in present:
            worker.probe_due_s = worker.probe_due_s or now_s  # it is new
        due = (worker for worker in present if worker.probe_due_s <= now_s)
        for worker in sorted(due, key=lambda worker: worker.probe_due_s):
            if self._budget < 1:
                break
            if worker not in self._open:
                self._budget -= 1
                self._open[worker] = now_s, self._tasks.run(self._probe(worker))
            share = 1.0
            if not worker.probe_count:  # the second one at a moment of its own: not all at once
                share = xxhash.xxh32_intdigest(worker.name.encode()) / 2**32
            worker.probe_due_s = now_s + period_s * share
            worker.probe_count += 1

    def look_now(self, worker: Worker) -> None:
        """A request failed at this worker: it is probed next, behind those that are due."""
        worker.probe_due_s = min(worker.probe_due_s, asyncio.get_running_loop().time())

    def _look(self, worker: Worker, now_s: float) -> None:
        """Look at a probe that has no answer yet: report it as late, or end it as silent."""
        (since_s, task), settings = self._open[worker], self._dispatcher.core.policy.probes
        # Not the router's own silence.
        heard_s = max(since_s, worker.heard_s, self._engines.trouble_s, self._awake_s)
        late_s = now_s - heard_s - max(settings.late_s, 2 * worker.probe_s)  # slow pages are usual
        if now_s - heard_s >= settings.silence_s:
            task.cancel()
            why = f"it has not answered for {settings.silence_s:g} s"
            self._note(Probed(worker.name, ProbeResult.SILENT, why))
        elif late_s > 0 or worker.word is WorkerWord.LATE:
            self._note(Probed(worker.name, ProbeResult.LATE, late_s=max(0.0, late_s)))

    async def _probe(self, worker: Worker) -> None:
        kind, loop = ENGINES[worker.address.kind], asyncio.get_running_loop()
        since_s, asked_ns = loop.time(), self._clock()
        page: bytes | None = None
        try:
            if kind.metrics:
                page = await self._metrics(worker, kind)
            if page is None or worker.word in TROUBLED:
                found = await self._get(worker, kind.health)
                if not 200 <= found.status < 300:
                    why = f"{kind.health}: status {found.status}"
                    self._note(Probed(worker.name, ProbeResult.UNWELL, why))
                    return
        except NoAnswer as error:
            self._note(Probed(worker.name, ProbeResult.REFUSED, str(error)))
            return
        worker.heard_s = loop.time()
        worker.probe_s = worker.heard_s - since_s
        self._note(Probed(worker.name, ProbeResult.ANSWERED))
        if worker.heard_s >= worker.models_due_s:
            self.read_models(worker)
        if page is not None:
            self._read(worker, kind, page, asked_ns)

    async def _metrics(self, worker: Worker, kind: EngineKind) -> bytes | None:
        """The worker's metrics page; None: it has none that can be read, which is logged from the
        UNREAD_MAX-th time in a row on. Raises NoConnection: nothing listens at the engine's own
        port.
        """
        try:
            found = await self._get(worker, kind.metrics, kind.port)
            if 200 <= found.status < 300:
                worker.unread_count = 0
                return found.body
            why = f"status {found.status}"
        except NoAnswer as error:
            if isinstance(error, NoConnection) and not kind.port:
                raise
            why = str(error)
        worker.unread_count += 1
        if worker.unread_count >= UNREAD_MAX:
            advice = f": {kind.advice}" if kind.advice else ""
            _say_unread(worker, f"{kind.metrics}: {why}{advice}")
        return None

    def _read(self, worker: Worker, kind: EngineKind, page: bytes, asked_ns: int) -> None:
        found = findings_of(kind, page)
        missing = " and ".join(dict.fromkeys(found.missing)) if worker.has_served else ""
        _say_unread(worker, f"{kind.metrics} does not have {missing}" if missing else "")
        block_tokens = worker.address.block_tokens or found.block_tokens
        known = (worker.memory_tokens, worker.block_tokens)
        worker.memory_tokens, worker.block_tokens = found.memory_tokens, block_tokens
        self._note(Scraped(worker.name, found.load, asked_ns))
        if known != (found.memory_tokens, block_tokens):
            self._workers.describe(worker)

    def read_models(self, worker: Worker) -> None:
        """Begin to read the worker's models: they may have changed."""
        reading = self._readings.get(worker)
        if reading is None or reading.done():
            pause_s = max(MODELS_S, len(self._workers) / MODELS_PER_S)
            worker.models_due_s = asyncio.get_running_loop().time() + pause_s
            self._readings[worker] = self._tasks.run(self._read_models(worker))

    async def read_again(self, name: str, *, is_taken: bool) -> None:
        """Read the models of all engines now, because a request names an unknown one; joins a round
        that is under way. A round ends after ROUND_S, read or not, and with more than PROBES_PER_S
        engines begins that much later. `is_taken`: an engine takes any name, so one is looked for
        once in MODELS_S only, and its further requests do not wait.
        """
        now_s = asyncio.get_running_loop().time()
        if is_taken and now_s < self._sought.get(name, -math.inf) + MODELS_S:
            return
        self._sought[name] = now_s
        if self._round is None or self._round.done():
            self._round = self._tasks.run(self._read_all())
        await asyncio.wait([self._round])

    async def _read_all(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._round_due_s - loop.time()))
        self._round_due_s = loop.time() + max(ROUND_S, len(self._workers) / PROBES_PER_S)
        for worker in self._workers:
            if worker.is_answering:
                self.read_models(worker)
        if under_way := [each for each in self._readings.values() if not each.done()]:
            await asyncio.wait(under_way, timeout=ROUND_S)

    async def _read_models(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(MODELS_S):
                found = await self._get(worker, "/v1/models")
            rows = msgspec.json.decode(found.body, type=_Models).data[:MODELS_MAX]
        except (NoAnswer, TimeoutError):
            return  # known by its probes
        except msgspec.MsgspecError:
            _say_unlisted(worker, f"status {found.status} without a list of models")
            return  # healthy all the same
        bases = {row.id for row in rows}
        adapters = {r.id: (r.parent, r.root or "") for r in rows if r.parent in bases}
        known = {name: (each.base, each.path) for name, each in worker.adapters.items()}
        names = tuple(bases.difference(adapters)) or worker.address.models
        _say_unlisted(worker, "" if names else "no models")
        lengths = ((row.id, row.max_model_len or 0) for row in rows)
        contexts = {name: tokens for name, tokens in lengths if 0 < tokens <= CONTEXT_MAX}
        if (set(names), adapters, contexts) == (set(worker.models), known, worker.contexts):
            return
        worker.models, worker.contexts = tuple(sorted(names)), contexts
        worker.adapters = {
            name: worker.adapters[name]
            if known.get(name) == (base, path)
            else WorkerAdapter(base or "", path)
            for name, (base, path) in adapters.items()
        }
        self._workers.describe(worker)

    async def _get(self, worker: Worker, path: str, port: int = 0) -> HttpAnswer:
        """GET of a path at a worker. Raises NoConnection, NoAnswer."""
        url = worker.url.with_path(path)
        url = url.with_port(port) if port else url
        return await self._engines.fetch(url, bytes_max=PAGE_BYTES_MAX)

    async def close(self) -> None:
        """End the probes and reads that are under way."""
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)


def _say_unlisted(worker: Worker, why: str) -> None:
    why = f"/v1/models: {why}" if why and not worker.models else ""
    if why and worker.unlisted != why:
        _log.warning(
            "models of worker %s are not known, so it gets requests for any: %s", worker.name, why
        )
    worker.unlisted = why


def _say_unread(worker: Worker, why: str) -> None:
    if why and worker.unread != why:
        _log.warning("load of worker %s is not known: %s", worker.name, why)
    worker.unread = why
